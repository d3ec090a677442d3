"""The experts of one rank, against a model in float64, and the promises about bits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mixture import Mixture, defined, random

import weft
from weft.experts import fastest
from weft.experts.methods import METHODS
from weft.kernels import half

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
METHODS_HERE = [name for name in METHODS if name != "native" or half.COLUMNS]


def by(method: str, mixture: Mixture, first=0, stop=None, activation="silu", out_dtype=None):
    """The sums of some experts by one method, or by weights as they are."""
    experts = weft.pack_experts(*mixture.part(first, stop), first=first, activation=activation)
    x = mixture.x
    out = torch.full((len(x), x.shape[1] + 1), 7, dtype=out_dtype or x.dtype)
    run = METHODS[method].run
    run(experts.form(method), experts, x, mixture.chosen, mixture.scores, out[:, :-1])
    assert (out[:, -1] == 7).all()
    return out[:, :-1]


def assert_near(found, mixture, **options):
    """The sums of a mixture are as in float64, up to errors in proportion to their summands."""
    expected = defined(*mixture, **options)
    summands = defined(*mixture, **options, magnitude=torch.abs)
    scale = summands.max().item() if expected.numel() else 1.0
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=TOLERANCE[mixture.x.dtype] * max(scale, 1e-3)
    )


@pytest.mark.parametrize("method", METHODS_HERE)
@settings(max_examples=60)
@given(
    tokens=st.integers(0, 40),
    width=st.integers(1, 140),
    inner=st.integers(1, 140),
    experts=st.integers(1, 9),
    first=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    wide=st.booleans(),
    activation=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]),
    data=st.data(),
)
def test_any_sizes_and_routings(
    method, tokens, width, inner, experts, first, dtype, wide, activation, data
):
    top = data.draw(st.integers(1, min(experts, 4)))
    favoured = data.draw(st.sampled_from([0, top]))
    seed = data.draw(st.integers(0, 1 << 30))
    mixture = random(tokens, width, inner, experts, top, dtype, seed, favoured)
    first = min(first, experts)
    found = by(method, mixture, first, None, activation, torch.float32 if wide else dtype)
    part = Mixture(*mixture[:3], *mixture.part(first, None))
    assert_near(found, part, first=first, activation=activation)


@pytest.mark.parametrize("dtype", [*TOLERANCE])
def test_public_operator(dtype):
    mixture = random(33, 48, 40, 6, 3, dtype)
    part = Mixture(*mixture[:3], *mixture.part(1, 5))
    for experts in (
        weft.Experts(*mixture.part(1, 5), first=1),
        weft.pack_experts(*mixture.part(1, 5), first=1),
    ):
        found = weft.expert_sums(*mixture[:3], experts)
        assert found.dtype == dtype
        assert_near(found, part, first=1)


def test_other_layouts_of_operands():
    mixture = random(9, 40, 24, 4, 2)
    x = torch.cat([mixture.x, mixture.x], 1)[:, :40]
    chosen = mixture.chosen.int().t().contiguous().t()
    gate_up = mixture.gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    down = mixture.down.repeat_interleave(2, 0)[::2]
    for make in (weft.Experts, weft.pack_experts):
        found = weft.expert_sums(x, chosen, mixture.scores.double(), make(gate_up, down))
        assert_near(found, mixture)


@pytest.mark.parametrize("method", METHODS_HERE)
def test_numbers_of_no_expert_count_as_none(method):
    mixture = random(5, 16, 8, 3, 3)
    chosen = torch.tensor([[-1, 3, 99], [0, 3, 3], [2, 2, 1], [1 << 40, 0, -5], [1, 1, 1]])
    mixture = mixture._replace(chosen=chosen)
    assert_near(by(method, mixture), mixture)


@pytest.mark.skipif(not half.COLUMNS, reason="this processor lacks the instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_a_token_depend_on_no_other_and_on_no_number_of_threads(dtype):
    mixture = random(70, 200, 96, 4, 2, dtype)
    whole = by("native", mixture)
    parts = [
        by("native", Mixture(*(each[start:stop] for each in mixture[:3]), *mixture[3:]))
        for start, stop in ((0, 1), (1, 8), (8, 70))
    ]
    assert torch.equal(whole, torch.cat(parts))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(whole, by("native", mixture))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("each", "method"),
    [
        ((9.0, 9.0, 9.0, 9.0), "native"),
        ((1.0, 1.0, 1.0, 1.0), "native"),
        ((0.9, 0.9, 0.9, 0.9), "native"),
        ((0.7, 0.7, 0.7, 0.7), "each"),
        ((1.4, 1.0, 0.5, 0.3), "each"),  # one for all numbers of rows
        ((1.0, 1.0, 1.0, 0.5), "native"),
    ],
)
def test_one_method_is_used_for_any_number_of_rows(each, method):
    """The times of ``each``, those of ``native`` being 1, by the number of rows."""
    times = [{"native": 1.0, "each": time} for time in each]
    assert fastest._fastest(times) == method


@pytest.mark.skipif(not half.COLUMNS, reason="this processor lacks the instructions")
def test_special_numbers_stay_where_they_are():
    mixture = random(4, 32, 32, 2, 1)
    chosen = torch.tensor([[0], [1], [0], [1]])
    x = mixture.x.clone()
    x[1, 3] = float("nan")
    x[2] = 1e4
    found = by("native", mixture._replace(x=x, chosen=chosen))
    assert found[1].isnan().all()
    assert found[[0, 2, 3]].isfinite().all()


def test_changes_after_packing_are_errors():
    mixture = random(3, 16, 8, 2, 1)
    experts = weft.pack_experts(mixture.gate_up, mixture.down)
    weft.expert_sums(*mixture[:3], experts)
    mixture.down.mul_(2)
    with pytest.raises(ValueError, match="changed after they were packed"):
        weft.expert_sums(*mixture[:3], experts)


def test_packed_before_the_operators_are_loaded():
    """As in a program that packs its weights before its first call."""
    packed = "weft.pack_experts(torch.ones(1, 2, 1), torch.ones(1, 1, 1)), weft.pack(torch.eye(2))"
    program = (
        f"import torch, weft; packed = {packed}; import weft.ops; "
        "assert not any(each.changed() for each in packed)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"gate_up": torch.ones(2, 8)}, ValueError, r"gate_up must be \(experts, 2 I, K\)"),
        ({"down": torch.ones(2, 16, 4)}, ValueError, r"needs down \(2, 16, 8\)"),
        ({"down": torch.ones(2, 16, 8).half()}, TypeError, "must have one dtype"),
        ({"gate_up": torch.ones(2, 16, 16).long()}, TypeError, "must have one dtype of"),
        ({"activation": "swish"}, ValueError, "no activation 'swish'; choose one of silu, gelu"),
        ({"x": torch.ones(3, 15)}, ValueError, r"x must be tokens \(T, 16\)"),
        ({"x": torch.ones(3, 16).double()}, TypeError, "x is float64 and the experts float32"),
        ({"chosen": torch.ones(3, 1)}, TypeError, "chosen must be numbers of experts"),
        ({"scores": torch.ones(3, 2)}, ValueError, r"must be \(3, top\) for 3 tokens"),
        ({"scores": torch.ones(3, 1).long()}, TypeError, "scores must be of a floating dtype"),
        ({"experts": torch.ones(3)}, TypeError, "experts must be weft.Experts"),
    ],
)
@pytest.mark.parametrize("make", [weft.Experts, weft.pack_experts])
def test_wrong_arguments_are_errors(make, changes, error, words):
    own = random(3, 16, 8, 2, 1)._asdict() | {"activation": "silu"} | changes
    with pytest.raises(error, match=words):
        made = make(own["gate_up"], own["down"], activation=own["activation"])
        weft.expert_sums(own["x"], own["chosen"], own["scores"], changes.get("experts", made))
