"""One table: every tensor argument of every public function, with every kind of tensor that it
refuses.

Rank 0 makes the bad calls by itself, while rank 1 waits for it in a collective call: each must be a
`TypeError` or `ValueError` that names the argument and the remedy, nothing may be sent, and both
ranks then make the collective call.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import torch
from support.ranks import on_ranks
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

import weft
import weft.nn

SAYS_WHAT_WOULD_DO = re.compile(
    r"\bpass\b|\bmust\b|supported are|make it with|\bgive\b|write to|leave it out"
)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
# rows of the result; a has 4
ROWS = {
    "all_gather_matmul": 8,
    "matmul_reduce_scatter": 2,
    "matmul_all_reduce": 4,
}


class Subclass(torch.Tensor):
    """A user's own tensor class."""


def zeros(good, dtype=None):
    return torch.zeros(good.shape, dtype=dtype or good.dtype)


# Substitutes for a good tensor, by name; None if the substitute does not apply.
ANYWHERE = {
    "sparse COO": lambda good: torch.sparse_coo_tensor(size=good.shape, dtype=good.dtype),
    "sparse CSR": lambda good: torch.zeros(4, 4).to_sparse_csr(),
    "mkldnn": lambda good: torch.zeros(4, 4).to_mkldnn(),
    "nested": lambda good: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "jagged": lambda good: torch.nested.nested_tensor(
        [torch.zeros(2), torch.zeros(3)], layout=torch.jagged
    ),
    "meta": lambda good: good.to("meta"),
    "fake": lambda good: FakeTensorMode().from_tensor(zeros(good)),
    "quantised": lambda good: torch.quantize_per_tensor(
        torch.zeros(good.shape), 1.0, 0, torch.qint8
    ),
    "complex": lambda good: zeros(good, torch.complex64),
    "conjugate": lambda good: zeros(good, torch.complex64).conj(),
    "negative": lambda good: zeros(good, torch.complex64).conj().imag,
    "wrong dtype": lambda good: zeros(good, torch.uint16),
    "subclass": lambda good: zeros(good).as_subclass(Subclass),
    "uninitialised": lambda good: nn.UninitializedParameter(),
    "list": lambda good: [0.0] * 4,
    "numpy": lambda good: np.zeros(tuple(good.shape)),
    "number": lambda good: 1.0,
}
ON_A_MESH = {
    "DTensor": lambda good, mesh: DTensor.from_local(
        zeros(good), mesh, [Replicate()], run_check=False
    )
}
REQUIRED = {"None": lambda good: None}
SHAPED = {"zero-dimensional": lambda good: torch.zeros((), dtype=good.dtype)}
WRITTEN = {
    "expanded": lambda good: torch.zeros(1, dtype=good.dtype).expand(good.shape),
    "overlapping itself": lambda good: zeros(good).as_strided(good.shape, [1] * good.dim()),
}
OUT = {
    "requires a gradient": lambda good: torch.zeros(good.shape, dtype=good.dtype).requires_grad_()
}
RECORDED = {"result that requires a gradient": lambda good: 2 * OUT["requires a gradient"](good)}


class Call:
    """A function of named tensors: good tensors, the optional ones, and the ones of any shape."""

    def __init__(self, function, optional=(), any_shape=(), on_mesh=True, gradients=True, **good):
        self.function, self.good, self.optional, self.any_shape, self.on_mesh = (
            function,
            good,
            optional,
            any_shape,
            on_mesh,
        )
        self.gradients = gradients

    def bad(self, argument, mesh):
        """All sets of tensors in which this argument is bad, by kind."""
        good = self.good[argument]
        kinds = dict(ANYWHERE)
        kinds |= (
            {name: partial(make, mesh=mesh) for name, make in ON_A_MESH.items()}
            if self.on_mesh
            else {}
        )
        kinds |= {} if argument in self.optional else REQUIRED
        kinds |= {} if argument in self.any_shape else SHAPED
        kinds |= WRITTEN if argument in ("out", "dst", "tensor") else {}
        kinds |= OUT if argument == "out" else {}
        kinds |= {} if self.gradients else RECORDED
        made = {name: self.good | {argument: make(good)} for name, make in kinds.items()}
        if argument == "out" and "a" in self.good and good.dtype == self.good["a"].dtype:
            memory, a = (
                torch.zeros(good.numel() + self.good["a"].numel(), dtype=good.dtype),
                self.good["a"],
            )
            inside = {
                "a": memory[: a.numel()].view(a.shape),
                "out": memory[1 : 1 + good.numel()].view(good.shape),
            }
            made["overlapping a"] = self.good | inside
        return made


def fused(name):
    function, rows = getattr(weft, name), ROWS[name]
    out = torch.zeros(rows, 6)

    def good():
        return {"a": torch.zeros(4, 8), "b": torch.zeros(8, 6), "bias": torch.zeros(6)}

    yield name, Call(function, optional=("bias", "out"), **good(), out=out)

    def recorded(a, b, bias, out=None):
        """With a gradient to record, possibly for another tensor than the bad one."""
        given = {"a": a, "b": b, "bias": bias}
        for tensor in given.values():
            if type(tensor) in (torch.Tensor, Subclass) and tensor.is_floating_point():
                tensor.requires_grad_()
        return function(**given, out=out)

    yield f"{name} recorded", Call(recorded, optional=("bias",), **good())
    yield (
        f"{name} recorded into",
        Call(lambda out: recorded(**good(), out=out), optional=("out",), out=out),
    )
    halves = {
        "a": torch.zeros(4, 8).to(torch.float8_e4m3fn),
        "b": torch.zeros(6, 8).to(torch.float8_e4m3fn).t(),
    }
    scales = {"scale_a": torch.ones(4, 1), "scale_b": torch.ones(1, 6)}
    single = ("scale_a", "scale_b")
    yield (
        f"{name} float8",
        Call(
            function,
            ("bias", "out"),
            single,
            **halves,
            **scales,
            bias=torch.zeros(6),
            out=out.bfloat16(),
        ),
    )


def gather_for_several(a, b, bias, out):
    weft.all_gather_matmul(
        a, [torch.zeros(8, 6), b], bias=[None, bias], out=[torch.zeros(8, 6), out]
    )


def collectives():
    sizes = {"all_gather": 8, "reduce_scatter": 2, "all_reduce": 4, "all_to_all": 4}
    for name in COLLECTIVES:
        for form in (name, f"{name}_async"):
            function = getattr(weft, form)
            if name == "broadcast":
                yield (
                    form,
                    Call(
                        partial(function, source=1),
                        any_shape=("tensor",),
                        gradients=False,
                        tensor=torch.zeros(4, 6),
                    ),
                )
            else:
                out, free = torch.zeros(sizes[name], 6), ("a",) if name == "all_reduce" else ()
                yield (
                    form,
                    Call(
                        function,
                        optional=("out",),
                        any_shape=free,
                        gradients=False,
                        a=torch.zeros(4, 6),
                        out=out,
                    ),
                )
    columns = {"a": torch.zeros(4, 6), "out": torch.zeros(4, 3)}
    yield (
        "reduce_scatter of columns",
        Call(partial(weft.reduce_scatter, dim=1), ("out",), gradients=False, **columns),
    )
    splits = partial(weft.all_to_all, input_split_sizes=[1, 3], output_split_sizes=[1, 2])
    yield (
        "all_to_all with splits",
        Call(
            splits, optional=("out",), gradients=False, a=torch.zeros(4, 6), out=torch.zeros(3, 6)
        ),
    )


def one_sided(symmetric, signals):
    plain = torch.zeros(symmetric.shape)
    for name in ("put", "put_async"):
        yield name, Call(partial(getattr(weft, name), peer=1), dst=symmetric, src=plain)
    for name in ("get", "get_async"):
        yield name, Call(partial(getattr(weft, name), peer=1), dst=plain, src=symmetric)
    yield (
        "put_notify",
        Call(partial(weft.put_notify, signals=signals, index=0, peer=1), dst=symmetric, src=plain),
    )


def layers(mesh):
    column, row, norm = weft.nn.ColumnParallelLinear, weft.nn.RowParallelLinear, nn.RMSNorm(8)
    x = torch.zeros(4, 8)
    for name, layer, parts in (
        ("ColumnParallelLinear", column(8, 6), 1),
        ("ColumnParallelLinear of a sequence", column(8, 6, sequence_dim=0), 1),
        ("RowParallelLinear", row(8, 6), 2),
        ("RowParallelLinear of a sequence", row(8, 6, sequence_dim=0), 2),
    ):
        yield (
            name,
            Call(lambda input, layer=layer: layer(input), on_mesh=False, input=x[:, : 8 // parts]),
        )
    norm = parallelize_module(
        norm, mesh, weft.nn.SequenceParallel(sequence_dim=0, use_local_output=True)
    )
    yield "RMSNorm", Call(lambda input: norm(input), any_shape=("input",), on_mesh=False, input=x)


def calls(world, mesh):
    """The table: the calls by name."""
    symmetric, signals = world.empty(4, 6).zero_(), world.signals(1)
    for name in FUSED:
        yield from fused(name)
        explained = partial(weft.explain, operator=name)
        yield f"explain {name}", Call(explained, a=torch.zeros(4, 8), b=torch.zeros(8, 6))
    several = {
        "a": torch.zeros(4, 8),
        "b": torch.zeros(8, 6),
        "bias": torch.zeros(6),
        "out": torch.zeros(8, 6),
    }
    yield (
        "all_gather_matmul of several",
        Call(gather_for_several, optional=("bias", "out"), **several),
    )
    yield from collectives()
    yield from one_sided(symmetric, signals)
    yield "pack", Call(weft.pack, b=torch.zeros(8, 6))
    yield "World.peer", Call(partial(world.peer, rank=1), tensor=symmetric)
    yield from layers(mesh)


ARGUMENTS = {
    **dict.fromkeys((*FUSED, "all_gather_matmul of several"), "a b bias out"),
    **{f"{name} recorded": "a b bias" for name in FUSED},
    **{f"{name} recorded into": "out" for name in FUSED},
    **{f"{name} float8": "a b scale_a scale_b bias out" for name in FUSED},
    **{f"explain {name}": "a b" for name in FUSED},
    **{
        name + form: "tensor" if name == "broadcast" else "a out"
        for name in COLLECTIVES
        for form in ("", "_async")
    },
    **dict.fromkeys(("reduce_scatter of columns", "all_to_all with splits"), "a out"),
    **dict.fromkeys(("put", "get", "put_async", "get_async", "put_notify"), "dst src"),
    "pack": "b",
    "World.peer": "tensor",
    **dict.fromkeys(
        (
            "ColumnParallelLinear",
            "ColumnParallelLinear of a sequence",
            "RowParallelLinear",
            "RowParallelLinear of a sequence",
            "RMSNorm",
        ),
        "input",
    ),
}
CASES = [
    f"{name}: {argument}" for name, arguments in ARGUMENTS.items() for argument in arguments.split()
]


def refused(world):
    """The outcome of every bad call, by case and kind, as (type, message); and the number of times
    that the world stayed usable.
    """
    found = {}
    mesh = init_device_mesh("cpu", (world.ranks,))
    table = dict(calls(world, mesh))
    for name, call in table.items():
        if world.rank == 0:
            for argument in call.good:
                made = world.executor.calls
                verdicts = found[f"{name}: {argument}"] = {}
                for kind, tensors in call.bad(argument, mesh).items():
                    try:
                        call.function(**tensors)
                        verdicts[kind] = "nothing", "it was taken"
                    except Exception as error:
                        verdicts[kind] = type(error).__name__, str(error)
                    if world.closed or world.executor.calls != made:
                        verdicts[kind] = "sent", f"{verdicts[kind]}: {world.closed}"
                        return found  # peers are out of step
        own = torch.tensor([world.rank, len(name)])
        assert weft.all_gather(own).tolist() == [0, len(name), 1, len(name)]
    return found


@pytest.fixture(scope="module")
def verdicts():
    return on_ranks(refused, 2)[0]


@pytest.mark.parametrize("case", CASES)
def test_a_bad_tensor_is_refused_by_name(verdicts, case):
    argument = case.split(": ")[1]
    assert len(verdicts[case]) > len(ANYWHERE)
    for kind, (error, message) in verdicts[case].items():
        assert error in ("TypeError", "ValueError"), f"{kind}: {error}: {message}"
        assert re.search(rf"\b{argument}\b", message), f"{kind}: {message}"
        assert SAYS_WHAT_WOULD_DO.search(message), f"{kind}: {message}"


def test_the_table_is_complete(verdicts):
    assert sorted(verdicts) == sorted(CASES)


def accepted(world):
    """Unusual operands that are accepted: parameters, views of any strides, no dimension, no rows."""
    own = nn.Parameter(torch.full((2, 2), float(world.rank)))
    with torch.no_grad():
        assert weft.all_gather(own)[:, 0].tolist() == [0, 0, 1, 1]
        assert weft.all_reduce(own[:1].expand(3, 2)).tolist() == [[1, 1]] * 3
        assert weft.all_reduce(own[0, 0]).item() == 1
        assert weft.reduce_scatter(own, dim=1).tolist() == [[1], [1]]
    for source in (1, 0, 1):
        with torch.no_grad():
            own.fill_(world.rank)
        assert weft.broadcast(own, source) is own
        assert own.tolist() == [[source, source]] * 2
    with torch.no_grad():
        assert weft.all_gather(own[world.rank, None], out=own).tolist() == [[1, 1]] * 2
    symmetric = world.empty(2, 2).zero_()
    weft.barrier()
    weft.put(symmetric, own, 1 - world.rank)
    weft.barrier()
    assert symmetric.tolist() == [[1, 1]] * 2
    assert world.is_symmetric(symmetric.t())
    odd = [make(own) for name, make in ANYWHERE.items() if name not in ("list", "numpy", "number")]
    assert not any(world.is_symmetric(tensor) for tensor in odd)
    with pytest.raises(TypeError, match="tensor must be a tensor; got list"):
        world.is_symmetric([1.0])
    with pytest.raises(
        ValueError, match=r"input must have 8 features in its last dimension; got shape \(4, 6\)"
    ):
        weft.nn.ColumnParallelLinear(8, 6)(torch.zeros(4, 6))


def test_unusual_operands_are_accepted():
    on_ranks(accepted, 2)


def changed_in_place(world):
    """A cached call is not found any more after its tensors have changed in place."""
    a, out = torch.full((4,), float(world.rank)), torch.empty(8)
    symmetric, plain = world.empty(4).zero_(), torch.zeros(4)
    for _ in range(3):
        weft.all_gather(a, out=out)
        weft.get(plain, symmetric, world.rank)
    if world.rank == 0:
        made = world.executor.calls
        for tensor, name in ((a, "a"), (out, "out")):
            tensor.requires_grad_()
            with pytest.raises(ValueError, match=f"^{name} requires a gradient"):
                weft.all_gather(a, out=out)
            tensor.requires_grad_(False)
        out.data = torch.empty(1).expand(8)
        with pytest.raises(ValueError, match="out must be contiguous"):
            weft.all_gather(a, out=out)
        plain.data = torch.empty(1).expand(4)
        with pytest.raises(ValueError, match="dst holds elements more than once"):
            weft.get(plain, symmetric, 0)
        out.data = torch.empty(4)
        with pytest.raises(ValueError, match=r"out must have shape \(8,\)"):
            weft.all_gather(a, out=out)
        out.data = torch.empty(8)
        address = id(a)
        del a
        for _ in range(100):  # another tensor at the earlier one's address
            a = torch.sparse_coo_tensor(size=(4,))
            if id(a) == address:
                break
        with pytest.raises(ValueError, match="a has the layout"):
            weft.all_gather(a, out=out)
        a = torch.zeros(4)
        assert world.executor.calls == made
    assert weft.all_gather(a, out=out).tolist() == [0.0] * 4 + [1.0] * 4


def test_a_cached_call_detects_changed_tensors():
    on_ranks(changed_in_place, 2)
