"""Every native kernel, and every weight that is no tensor, on special values, against float64: what
is no number or infinite, zeros, denormals, the largest, beyond exp's range, ties of rounding.

The walk at the end finds kernels, activations and weights that no test here has.
"""

from __future__ import annotations

import inspect
import itertools
import os
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest
import torch

import weft
import weft.kernels
from weft import _native
from weft.experts.methods import ACTIVATIONS, METHODS
from weft.kernels import compression, half, int8
from weft.kernels.float8 import ScaledWeight
from weft.kernels.weights import FLOAT8, PreparedWeight
from weft.plan.compression import BLOCK
from weft.variables import VALUES

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
NATIVE = FLOATS[:3]
METHODS_HERE = [name for name in METHODS if name != "native" or half.COLUMNS]
LEAST_NORMAL = 2.0**-126  # of float32 and bfloat16
PRODUCTS = pytest.mark.skipif(not half.COLUMNS, reason="these instructions have no products")
by_name = {"ids": lambda value: str(value).removeprefix("torch.")}


def special(dtype: torch.dtype) -> torch.Tensor:
    """The values, of both signs."""
    limits = torch.finfo(dtype)
    sizes = torch.tensor(
        [
            *(float("nan"), float("inf"), 0.0),
            *(limits.smallest_normal * limits.eps, limits.smallest_normal * (1 - limits.eps)),
            *(limits.smallest_normal, limits.max, limits.max / 2),
            *(1.0, 1 + limits.eps, 1 + 3 * limits.eps, limits.eps / 2, 0.5, 3.0),
            *(11.0, 16.7, 86.9, 87.4, 88.3, 88.6, 89.2, 104.0, 1e4, 6e4, 1e13, 2e38),
        ],
        dtype=torch.float64,
    )
    return torch.cat((sizes, -sizes)).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of special values."""
    values = special(dtype)
    both = torch.cartesian_prod(values, values)
    return both[:, 0].contiguous(), both[:, 1].contiguous()


def assert_same(found, wanted, words=""):
    """Equal numbers, and NaN where NaN is wanted."""
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=words or None)


def assert_near(found, wanted, error, words):
    """Within an error, tensors in float64: infinite and NaN where `wanted` is, rounded to the dtype
    of `found`.
    """
    rounded = wanted.to(found.dtype).double()
    found = found.double()
    regular = rounded.isfinite()
    assert_same(found[~regular], rounded[~regular], words)
    wrong = ~((found - rounded).abs() <= error) & regular
    assert not wrong.any(), (words, found[wrong], rounded[wrong])


def test_the_instructions_that_were_asked_for():
    assert _native.instructions() == os.environ.get("WEFT_INSTRUCTIONS", _native.instructions())


# -- experts


def experts_of(values, up, dtype, activation, inner):
    """An expert for each value, which is its gate at one of `inner` places."""
    gate_up = torch.zeros(len(values), 2 * inner, 1, dtype=dtype)
    places = torch.arange(len(values)) % inner
    gate_up[torch.arange(len(values)), places, 0] = values
    gate_up[torch.arange(len(values)), inner + places, 0] = up
    down = torch.ones(len(values), 1, inner, dtype=dtype)
    return weft.pack_experts(gate_up, down, activation=activation)


def experts_run(experts, method, x, chosen, scores, out_dtype):
    out = torch.full((len(x), x.shape[1]), 7, dtype=out_dtype)
    METHODS[method].run(experts.form(method), experts, x, chosen, scores, out)
    return out


def regular(activation, method, values):
    """The values of which torch, if it computes them, makes what it should: its vectors of gelu are
    NaN for infinity, and infinite for the largest.
    """
    of_vectors = ACTIVATIONS[activation](values[:, None].expand(-1, 64).contiguous())[:, 0]
    exact = ACTIVATIONS[activation](values.double()).to(values.dtype)
    right = (of_vectors.isfinite() == exact.isfinite()) & (of_vectors.isnan() == exact.isnan())
    return right if method == "each" else torch.ones_like(right)


def error_of(gate, up, dtype, out_dtype):
    """That of an activation in float32, which may be a difference of numbers as large as the gate
    is, and of roundings to the dtype; an activation below the normal numbers may be 0.
    """
    size = (gate * up).abs().nan_to_num(0, 0, 0)
    activated = ACTIVATIONS["silu"](gate).mul(up).abs().nan_to_num(0, 0, 0)
    eps = max(torch.finfo(dtype).eps, torch.finfo(out_dtype).eps, 2**-20)
    least = max(torch.finfo(dtype).smallest_normal, LEAST_NORMAL) * (1 + up.abs())
    return 2 * eps * activated + 2**-21 * size + least


@pytest.mark.parametrize("method", METHODS_HERE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", NATIVE, **by_name)
def test_activations(dtype, activation, method):
    values = special(dtype)
    chosen = torch.arange(len(values))[:, None]
    ones = torch.ones(len(values), 1)
    for inner, up, out_dtype in itertools.product((1, 33), (1.0, -0.25), (dtype, torch.float32)):
        experts = experts_of(values, up, dtype, activation, inner)
        found = experts_run(experts, method, ones.to(dtype), chosen, ones, out_dtype)[:, 0]
        gate, factor = values.double(), torch.tensor(up).double()
        wanted = ACTIVATIONS[activation](gate) * factor
        error = error_of(gate, factor, dtype, out_dtype)
        kept = regular(activation, method, values)
        assert_near(found[kept], wanted[kept], error[kept], f"{inner} {up} {out_dtype}")


@pytest.mark.parametrize("method", METHODS_HERE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", NATIVE, **by_name)
def test_tokens_of_experts(dtype, activation, method):
    """A token is its own gate, and up: places that fill vectors and pairs change nothing."""
    values = special(dtype)
    values = values[(values.abs() < 1e4) | ~values.isfinite()]  # squares are regular, or none is
    for inner in (1, 3):
        ones = torch.ones(1, 2 * inner, 1, dtype=dtype)
        down = torch.ones(1, 1, inner, dtype=dtype)
        experts = weft.pack_experts(ones, down, activation=activation)
        chosen, scores = torch.zeros(len(values), 1).long(), torch.ones(len(values), 1)
        found = experts_run(experts, method, values[:, None], chosen, scores, torch.float32)[:, 0]
        gate = values.double()
        once = ACTIVATIONS[activation](gate) * gate
        wanted = sum([once] * inner)
        error = (inner + 1) * error_of(gate, gate.abs().nan_to_num(0, 0, 0), dtype, torch.float32)
        in_range = once.abs() < torch.finfo(dtype).max
        # a method may round between its products
        checked = regular(activation, method, values) & (in_range | ~wanted.isfinite())
        assert_near(found[checked], wanted[checked], error[checked], f"{inner}")


@pytest.mark.parametrize("method", METHODS_HERE)
@pytest.mark.parametrize("dtype", NATIVE, **by_name)
def test_scores_of_experts(dtype, method):
    scores = special(torch.float32)[:, None]
    one = torch.ones(1, 2, 1, dtype=dtype)
    experts = weft.pack_experts(one, one[:, :1], activation="relu")
    chosen = torch.zeros(len(scores), 1).long()
    found = experts_run(
        experts, method, torch.ones(len(scores), 1, dtype=dtype), chosen, scores, dtype
    )
    assert_same(found, scores.to(dtype))


def test_every_activation_is_native():
    assert [*ACTIVATIONS] == [each.name for each in _native.Activation]


# -- products


@PRODUCTS
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", NATIVE[:2], **by_name)
def test_products_of_16_bits(dtype, packed):
    """Computed in float32, then rounded once."""
    values = special(dtype)
    exact = (values.double()[:, None] * values.double()).float()
    bias = special(torch.float32)[: len(values)]
    b = values[None]
    for out_dtype in (dtype, torch.float32):
        for added in (None, bias):
            found = torch.empty(len(values), len(values), dtype=out_dtype)
            half.multiply(values[:, None], half.panels(b) if packed else b, found, added, packed)
            wanted = exact if added is None else exact + added
            assert_same(found, wanted.to(out_dtype))


def test_products_of_int8():
    """A row or a column with what is no finite float32 is NaN; else numbers are within half a step
    of their largest, or 2^-127.
    """

    largest = torch.finfo(torch.float32).max

    def rounding(size):
        return (size / 250).clamp(min=2.0**-127)

    for dtype in FLOATS:
        values = special(dtype)
        # beside ones, beside a third of itself, and alone
        rows = torch.cat(
            [
                torch.stack((values, values * by + add), 1)
                for by, add in ((0, 1), (1 / 3, 0), (0, 0))
            ]
        )
        for b in (rows.t(), torch.eye(2, dtype=dtype)):
            found = torch.empty(len(rows), b.shape[1])
            weft.quantize(b).multiply([rows], found, None, len(rows))
            x, w = rows.float().double(), b.float().double()
            wanted = x @ w
            row, column = x.abs().amax(1, keepdim=True), w.abs().amax(0, keepdim=True)
            none = ~(row.isfinite() & column.isfinite())
            row, column = row.nan_to_num(0, 0), column.nan_to_num(0, 0)
            error = 2 * (row + rounding(row)) * (column + rounding(column)) - 2 * row * column
            assert_same(found[none], torch.full_like(found[none], torch.nan))
            sure = ~none & ((wanted.abs() + error < largest) | (wanted.abs() - error > 2 * largest))
            assert_near(found[sure], wanted[sure], error[sure] + LEAST_NORMAL, f"{dtype}")


@pytest.mark.parametrize("k", [int8._EXACT, int8._EXACT + 1, 2 * int8._EXACT + 1000])
def test_sums_of_any_number_of_int8(k):
    """The largest of all sums are beyond int32 from a number of columns on."""
    b = weft.quantize(torch.ones(k, 8))
    for sign in (1, -1):
        found = torch.empty(1, 8, dtype=torch.float32)
        b.multiply([torch.full((1, k), float(sign))], found, None, 1)
        torch.testing.assert_close(found, torch.full((1, 8), float(sign * k)), rtol=1e-6, atol=0)


def test_scales_of_int8_are_applied_without_an_infinite_step():
    found = torch.empty(1, 1)
    weft.quantize(torch.full((200, 1), 1e-30)).multiply(
        [torch.full((1, 200), 3e38)], found, None, 1
    )
    torch.testing.assert_close(found, torch.full((1, 1), 6e10))


INT8_PRODUCT = """
import torch
from weft.kernels import int8
for k in (64, 1000, int8._EXACT):
    numbers = torch.full((16, k), 127, dtype=torch.int8) * torch.tensor([1, -1] * 8, dtype=torch.int8)[:, None]
    found = int8.exact_sums(numbers, numbers.t())
    assert found.equal((numbers.double() @ numbers.t().double()).to(found.dtype)), k
    found = int8.exact_sums(numbers, numbers.t().contiguous())
    assert found.equal((numbers.double() @ numbers.t().double()).to(found.dtype)), k
print(int8._int32_product().__name__)
"""


@pytest.mark.parametrize(
    "instructions",
    [
        "AVX2",
        pytest.param("AVX512_CORE", marks=pytest.mark.slow),
        pytest.param("SSE41", marks=pytest.mark.slow),
    ],
)
def test_products_of_int8_by_processors_without_instructions_for_them(instructions):
    """Whose own sums of two products saturate in 16 bits."""
    done = subprocess.run(
        [sys.executable, "-c", INT8_PRODUCT],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": instructions},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", FLOAT8, **by_name)
def test_products_of_float8(dtype):
    values = torch.arange(256).to(torch.uint8).view(dtype)[:, None]
    weight = ScaledWeight(torch.ones(1, 8).to(dtype), torch.full((1, 8), 2.0))
    found = torch.empty(256, 8)
    weight.multiply([values, torch.ones(256, 1)], found, None, 256)
    assert_same(found, (values.float() * 2).expand(256, 8))


# -- sums


def reduced(op, parts):
    total = parts[0]
    for part in parts[1:]:
        if op in ("sum", "avg"):
            total = total + part
        else:
            total = (torch.maximum if op == "max" else torch.minimum)(total, part)
    return total / len(parts) if op == "avg" else total


@pytest.mark.parametrize("op", [each.name for each in _native.Combine])
@pytest.mark.parametrize("dtype", FLOATS, **by_name)
def test_sums_and_extremes(dtype, op):
    """Accumulated in float32 (float64 for float64), rounded once. Two ranks and three: two rows and
    more go by other loops.
    """
    one, other = pairs(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for parts in ((one, other), (one, other, one.flip(0))):
        with weft.local_world(len(parts)) as local:
            made = local.run(
                lambda parts=parts: weft.all_reduce(parts[weft.init().rank].clone(), op=op)
            )
        wanted = reduced(op, [part.to(wide) for part in parts]).to(dtype)
        for found in made:
            assert_same(found, wanted)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", INTEGERS, **by_name)
def test_sums_and_extremes_of_integers(dtype, op):
    limits = torch.iinfo(dtype)
    values = torch.tensor([limits.min, limits.min + 1, 0, 1, 3, limits.max - 1, limits.max])
    both = torch.cartesian_prod(values, values).to(dtype)
    with weft.local_world(2) as local:
        made = local.run(lambda: weft.all_reduce(both[:, weft.init().rank].contiguous(), op=op))
    for found in made:
        assert torch.equal(found, reduced(op, [*both.t()]))


@pytest.mark.parametrize("dtype", FLOATS, **by_name)
def test_sums_of_visits(dtype):
    one, other = pairs(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    places, found = torch.tensor([[0, 1]]), torch.empty(1, len(one), dtype=dtype)
    for hosts in ([0, 0], [0, 1]):
        _native.add_up_visits(
            torch.stack((one, other)),
            places,
            [1, 2],
            hosts,
            found,
            getattr(_native.Dtype, str(dtype).removeprefix("torch.")),
        )
        assert_same(found[0], (one.to(wide) + other.to(wide)).to(dtype))


# -- compressed rows


@pytest.mark.parametrize("dtype", compression.DTYPES, **by_name)
def test_compressed_rows(dtype):
    """A block with an infinity or a NaN is NaN; others are within half a step of the largest."""
    values = special(dtype)
    rows = torch.cat([values[:, None].expand(-1, BLOCK + 3) * by for by in (1, 1 / 3, 0)]).clone()
    rows[len(values) :, 0] = torch.cat((values, values))
    count, columns = rows.shape
    with weft.local_world(2, hosts=(0, 1), timeout=20) as local:
        made = local.run(
            lambda: weft.all_gather_matmul(
                rows,
                torch.eye(1, dtype=dtype).expand(columns, 1),
                compress="int8",
                return_gathered=True,
            )[1]
        )
    for rank, found in enumerate(made):
        found = found.view(2, count, columns)
        assert_same(found[rank], rows)
        assert_same(found[1 - rank], compression.rounded(rows))
        for start in range(0, columns, BLOCK):
            block, exact = (t[:, start : start + BLOCK].double() for t in (found[1 - rank], rows))
            largest = exact.abs().amax(1, keepdim=True)
            none = ~largest.isfinite()[:, 0]
            assert block[none].isnan().all()
            error = (largest / 128).clamp(min=2.0**-127) + torch.finfo(
                dtype
            ).smallest_normal * torch.finfo(dtype).eps
            assert ((block - exact).abs() <= error)[~none].all()


# -- the walk

NATIVE_KERNELS = {
    "Compiled": [test_sums_and_extremes, test_sums_and_extremes_of_integers, test_compressed_rows],
    "PackedExperts": [test_activations, test_tokens_of_experts, test_scores_of_experts],
    "add_up_visits": [test_sums_of_visits],
    "half_product": [test_products_of_16_bits],
}
"""By the functions and classes of the native core that know dtypes."""

WEIGHTS = {
    "FunctionWeight": [],  # the caller's
    "Int8Weight": [test_products_of_int8],
    "PackedWeight": [test_products_of_16_bits],  # others are torch's
    "RoutedExperts": [test_activations],
    "ScaledWeight": [test_products_of_float8],
}


def test_no_kernel_is_forgotten():
    def words(value):
        of_class = inspect.getmembers(value) if isinstance(value, type) else []
        return " ".join(str(each.__doc__) for each in (value, *(member for _, member in of_class)))

    found = [
        name for name, value in inspect.getmembers(_native) if "weft._native.Dtype" in words(value)
    ]
    assert found == [*NATIVE_KERNELS]
    for module in pkgutil.iter_modules(weft.kernels.__path__):
        import_module(f"weft.kernels.{module.name}")
    own = [
        kind.__name__
        for kind in PreparedWeight.__subclasses__()
        if kind.__module__.startswith("weft.")
    ]
    assert sorted(own) == [*WEIGHTS]


@pytest.mark.slow
@pytest.mark.parametrize("instructions", VALUES["WEFT_INSTRUCTIONS"])
def test_each_set_of_instructions(instructions):
    """This module with each that the processor has."""
    every = VALUES["WEFT_INSTRUCTIONS"]
    if every.index(instructions) >= every.index(_native.instructions()):
        pytest.skip("tested above, or not on this processor")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            __file__,
        ],
        env=os.environ | {"WEFT_INSTRUCTIONS": instructions},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


def test_a_variable_limits_the_instructions():
    program = "import weft._native as native; print(native.instructions())"
    for limit in ("baseline", _native.instructions()):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"WEFT_INSTRUCTIONS": limit},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.split() == [limit]
