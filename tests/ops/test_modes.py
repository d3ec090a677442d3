"""Every public call in every mode of torch that changes what tensors or operators are: its result is
right, or the call is rejected by the name of an argument before anything is sent. The outcome of all
of them is the table of docs/new-operator.md.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import weft
import weft.nn

PAGE = Path(__file__).parents[2] / "docs" / "new-operator.md"
ROWS, K, N = 4, 6, 2
REPEATED = 3  # calls before the one in the mode: it is found in the call cache


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def within(context) -> Callable:
    def run(call, a):
        with context():
            return call(a)

    return run


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def forward_gradient(call, a):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(a, torch.ones_like(a)))


def other_forward_gradient(call, a):
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(1), torch.ones(1))
        return call(a)


def within_function_gradient(call, a):
    results = []

    def total(x):
        results.append(call(x))
        return x.sum()

    torch.func.grad(total)(a)
    return results[0]


def fake(call, a):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return call(mode.from_tensor(a))


TRACE = "`make_fx`"
MODES = {
    "`torch.inference_mode()`, `no_grad()`": within(torch.inference_mode),
    "`torch.autocast`": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    'a default device, as `torch.device("meta")`': within(lambda: torch.device("meta")),
    "`torch.set_default_device`": within(default_device),
    "`torch.set_default_dtype`": within(default_dtype),
    "`torch.use_deterministic_algorithms`": within(deterministic),
    "a mode that sees operators, as of a profiler": within(SeesOperators),
    "a mode that sees functions": within(SeesFunctions),
    "a gradient by `backward()`": lambda call, a: call(a.clone().requires_grad_() * 1),
    "a tangent, of a forward-mode gradient": forward_gradient,
    "no tangent in a forward-mode gradient": other_forward_gradient,
    "`torch.func.jvp`": lambda call, a: torch.func.jvp(call, (a,), (torch.ones_like(a),))[0],
    "`torch.func.vmap`": lambda call, a: torch.func.vmap(call)(torch.stack([a, a]))[0],
    "`torch.func.grad`": within_function_gradient,
    "`torch.func.functionalize`": lambda call, a: torch.func.functionalize(call)(a),
    "fake tensors, `FakeTensorMode`": fake,
    "real tensors in `FakeTensorMode`": within(FakeTensorMode),
    TRACE: lambda call, a: make_fx(call)(a.clone())(a),
    "a subclass of `Tensor`": lambda call, a: call(a.as_subclass(Subclass)),
}


def calls(world):
    """The calls by group and name: functions of a matrix of this rank to their result."""
    rank, peer = world.rank, 1 - world.rank
    b = whole(9, K, N)
    symmetric, signals = world.empty(ROWS, K).zero_(), world.signals(4)
    column = weft.nn.ColumnParallelLinear(K, 2 * N, bias=False, world=world)
    row = weft.nn.RowParallelLinear(2 * K, N, bias=False, world=world)
    for layer in (column, row):
        with torch.no_grad():
            layer.weight.copy_(whole(5, *layer.weight.shape))
    wide = copy.deepcopy(column).double()
    with torch.no_grad():
        wide.weight.div_(3)
    here = {"world": world}

    def put(name):
        def call(a):
            moved = getattr(weft, name)(symmetric, a, peer)
            if moved is not None:
                moved.wait()
            weft.barrier(world)
            try:
                return torch.from_numpy(symmetric.numpy().copy())
            finally:
                weft.barrier(world)

        return call

    def get(name):
        def call(a):
            moved = getattr(weft, name)(a, symmetric, peer)
            if moved is not None:
                moved.wait()
            return a

        return call

    def given(like):
        return torch.empty(like, dtype=torch.float32, device="cpu")

    def notified(a):
        weft.notify(signals, 0, peer)
        weft.wait(signals, 0, ">=", 1)
        made = world.empty(2, 3, dtype=torch.float32)
        return torch.tensor([*made.shape], dtype=torch.float32, device="cpu")

    def in_group(collective, shape=None):
        def call(a):
            out = a if shape is None else given(shape)
            collective(out, *(() if shape is None else (a,)))
            return out

        return call

    def exchanged(a):
        out = given((ROWS, K))
        works = [dist.isend(a, peer), dist.irecv(out, peer)]
        for work in works:
            work.wait()
        return out

    return {
        "collectives": {
            "all_gather": lambda a: weft.all_gather(a, **here),
            "reduce_scatter": lambda a: weft.reduce_scatter(a, **here),
            "all_reduce": lambda a: weft.all_reduce(a, **here),
            "all_to_all": lambda a: weft.all_to_all(a, **here),
            "all_reduce in place": lambda a: weft.all_reduce(a, out=a, **here),
            "all_gather into": lambda a: weft.all_gather(a, out=given((2 * ROWS, K)), **here),
            "broadcast": lambda a: weft.broadcast(a, 0, **here),
            "all_gather_async": lambda a: weft.all_gather_async(a, **here).wait(),
            "all_reduce_async": lambda a: weft.all_reduce_async(a, **here).wait(),
            "all_to_all with splits": lambda a: weft.all_to_all(
                a,
                input_split_sizes=[1, 3] if rank == 0 else [2, 2],
                output_split_sizes=[1, 2] if rank == 0 else [3, 2],
                **here,
            ),
        },
        "fused operators": {
            "all_gather_matmul": lambda a: weft.all_gather_matmul(a, b, **here),
            "matmul_reduce_scatter": lambda a: weft.matmul_reduce_scatter(a, b, **here),
            "matmul_all_reduce": lambda a: weft.matmul_all_reduce(a, b, **here),
        },
        "layers": {
            "ColumnParallelLinear": lambda a: column(a),
            "RowParallelLinear": lambda a: row(a),
            "ColumnParallelLinear of float64": lambda a: wide(a),
        },
        "weights": {
            "pack": lambda a: weft.pack(a).as_tensor(),
            "quantize": lambda a: weft.quantize(a).scales.new_ones(1),
        },
        "one-sided": {name: put(name) for name in ("put", "put_async")}
        | {name: get(name) for name in ("get", "get_async")},
        "signals, memory": {"notify, wait, empty": notified},
        "`torch.distributed`": {
            "all_reduce": in_group(dist.all_reduce),
            "broadcast": in_group(lambda a: dist.broadcast(a, 0)),
            "all_gather": in_group(dist.all_gather_into_tensor, (2 * ROWS, K)),
            "reduce_scatter": in_group(dist.reduce_scatter_tensor, (ROWS // 2, K)),
            "all_to_all": in_group(dist.all_to_all_single, (ROWS, K)),
            "send, recv": exchanged,
        },
    }


def whole(seed, *shape):
    """Small numbers, of which bfloat16 holds all sums of products."""
    numbers = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, 3, shape, generator=numbers, device="cpu").float()


def outcomes(_):
    """The verdict on every call in every mode, by mode, group and call."""
    world = weft.init(dist.group.WORLD, timeout=20)
    found = {}
    with world:
        for kind, members in calls(world).items():
            for name, call in members.items():
                made = partial(operand, world, "float64" in name)
                wanted = detached(call(made()))
                for mode, run in MODES.items():
                    if mode == TRACE and name == "send, recv":
                        continue  # torch's traces have no waits, of any backend
                    verdicts = []
                    for before in (0, REPEATED):
                        for _ in range(before):
                            call(made())
                        verdicts.append(verdict(world, run, call, made(), wanted))
                        if world.closed is not None:
                            return {mode: {kind: {name: verdicts}}}
                        dist.barrier()
                    found.setdefault(mode, {}).setdefault(kind, {})[name] = verdicts
    return found


def operand(world, wide):
    made = whole(world.rank, ROWS, K)
    return made.double() if wide else made


def detached(result):
    return result.detach().clone()


def verdict(world, run, call, a, wanted):
    """Whether a call in a mode is right or rejected; else a description of what is wrong."""
    made = world.executor.calls
    try:
        result = run(call, a)
    except (ValueError, TypeError) as error:
        if world.closed is not None:
            return f"closed the world: {error}"
        if world.executor.calls != made:
            return f"rejected after a call was made: {error}"
        named = re.match(r"(a|b|src|dst|tensor|tensors|input|out|empty)\b", str(error))
        return "rejected" if named else f"rejected without a name: {error}"
    except BaseException as error:
        if world.executor.calls == made and "c10d" in str(error):
            return "rejected"  # by torch's own operators, as on other backends
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    if type(result) is not torch.Tensor:  # fake: it has no elements to compare
        return "right" if (result.shape, result.dtype) == (wanted.shape, wanted.dtype) else "wrong"
    right = result.device.type == "cpu" and torch.equal(result.detach().to(wanted.dtype), wanted)
    return "right" if right else f"wrong: {result}, not {wanted}"


def table(found):
    """The outcomes as a table of modes and groups of calls; one word each if all calls agree."""
    kinds = [*next(iter(found.values()))]
    lines = [f"| mode | {' | '.join(kinds)} |", f"|---{'|---' * len(kinds)}|"]
    for mode, groups in found.items():
        cells = []
        for kind in kinds:
            by_verdict = {}
            for name, verdicts in groups[kind].items():
                for each in verdicts:
                    by_verdict.setdefault(each, []).append(name)
            several = [
                f"{each}: {', '.join(dict.fromkeys(names))}" for each, names in by_verdict.items()
            ]
            cells.append(next(iter(by_verdict)) if len(by_verdict) == 1 else "; ".join(several))
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def found():
    first, second = on_ranks(outcomes, 2, limit=120, context=group)
    assert first == second, "ranks differ"
    return first


def test_every_call_is_right_or_rejected(found):
    wrong = [
        f"{mode}: {name}: {each}"
        for mode, groups in found.items()
        for members in groups.values()
        for name, verdicts in members.items()
        for each in verdicts
        if each not in ("right", "rejected")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_has_the_table(found):
    made = table(found)
    assert made in PAGE.read_text(), f"docs/new-operator.md must have this table:\n{made}"


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


def factory_calls(module):
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(ast.Name("torch"), name)) if name in FACTORIES:
                yield node


def test_every_new_tensor_names_its_device():
    """Under a default device it would be elsewhere, also where the calls above do not come by."""
    modules = sorted(Path(weft.__file__).parent.rglob("*.py"))
    assert sum(1 for module in modules for _ in factory_calls(module)) > 50
    unnamed = [
        f"{module}:{call.lineno}"
        for module in modules
        for call in factory_calls(module)
        if not {"device", "out"} & {each.arg for each in call.keywords}
    ]
    assert not unnamed, unnamed
