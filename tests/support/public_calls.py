"""Every public function that makes a collective call, found by its signature, with good arguments,
and with bad ones in the place of each.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import weft

RANKS = 2


def _rows() -> Tensor:
    return torch.arange(8.0).view(4, 2)


def _experts(rank: int) -> weft.Experts:
    gate_up, down = torch.ones(1, 2, 2), torch.ones(1, 2, 1)
    return weft.Experts(gate_up, down, first=rank, activation="relu")


REQUIRED: Mapping[str, Callable[[int], Any]] = {
    "a": lambda rank: _rows(),
    "b": lambda rank: torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "tensor": lambda rank: _rows(),
    "source": lambda rank: 1,
    "x": lambda rank: _rows(),
    "chosen": lambda rank: torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]]),
    "scores": lambda rank: torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0], [2.0, 2.0]]),
    "experts": _experts,
}
"""Good arguments for the required parameters of all functions, by name, on a rank of two."""

_SIZES = {"input_split_sizes": [1, 3]}
_BOTH = {**_SIZES, "output_split_sizes": [[1, 1], [3, 3]]}  # by rank
_OWN = {"experts_of_ranks": [1, 1]}
MORE: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "all_to_all": {"of sizes": _SIZES, "of both sizes": _BOTH},
    "all_to_all_async": {"of sizes": _BOTH},
    "all_to_all_matmul": {"of sizes": _SIZES, "of both sizes": _BOTH},
    "matmul_all_to_all": {"of sizes": _SIZES, "of both sizes": _BOTH},
    "all_to_all_matmul_all_to_all": {"of sizes": _SIZES},
    "all_gather_matmul_reduce_scatter": {"of sizes": {"input_split_sizes": [4]}},
    "moe": {"of own tokens": _OWN, "by push": {**_OWN, "algorithm": "push"}},
}
"""Other ways through a function: further good arguments."""
CONSTANT = {"all_gather_matmul_reduce_scatter": "b"}
"""The operands that have no gradient."""
ONE_SIDED = ("put", "get", "put_async", "get_async", "put_notify", "notify", "wait", "test")
NOT_COLLECTIVE = ("explain", *ONE_SIDED)
"""Functions in which no peer takes part."""


class Public(NamedTuple):
    """A way through a public function; `recorded` by autograd."""

    function: Callable[..., Any]
    more: Mapping[str, Any]
    recorded: bool

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    def good(self, rank: int) -> dict[str, Any]:
        """Good arguments of a rank: those that are required, and `more`."""
        required = [
            name
            for name, each in self.parameters.items()
            if each.default is inspect.Parameter.empty
        ]
        made = {name: REQUIRED[name](rank) for name in required} | self.more
        if "output_split_sizes" in made:
            made["output_split_sizes"] = made["output_split_sizes"][rank]
        return made

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The result of a call, also of one that returns at once."""
        if self.recorded:
            constant = CONSTANT.get(self.function.__name__)
            arguments = {
                name: each if name == constant else _recorded(each)
                for name, each in arguments.items()
            }
        made = self.function(**arguments)
        return made.wait() if hasattr(made, "wait") and not isinstance(made, Tensor) else made


def _recorded(argument: Any) -> Any:
    """A float tensor that requires a gradient."""
    if type(argument) is Tensor and argument.is_floating_point():
        return argument.detach().requires_grad_()
    return argument


def public_calls() -> dict[str, Public]:
    """All ways through all collective functions, by name."""
    found: dict[str, Public] = {}
    for name in weft.__all__:
        function = getattr(weft, name)
        if name in NOT_COLLECTIVE or not inspect.isfunction(function):
            continue
        if "world" not in inspect.signature(function).parameters:
            continue
        differentiable = "matmul" in name or name == "moe"
        for words, more in {"": {}, **MORE.get(name, {})}.items():
            way = f"{name} {words}".strip()
            found[way] = Public(function, more, False)
            if differentiable:
                found[f"{way}, recorded"] = Public(function, more, True)
    return found


_HUGE = 2**63
LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda good: good.t().contiguous().t(),
    "sliced": lambda good: good.repeat_interleave(2, -1)[..., ::2],
    "of every second row": lambda good: good.repeat_interleave(2, 0)[::2],
    "of one row": lambda good: good[:1].expand_as(good),
    "of one column": lambda good: good[..., :1].expand_as(good),
}
"""Tensors of other strides."""
SHAPES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "without rows": lambda good: good[:0],
    "without rows, transposed": lambda good: good[:0].t().contiguous().t(),
    "without columns": lambda good: good[..., :0],
    "of more dimensions": lambda good: good.reshape(1, *good.shape, 1),
}
"""Tensors of other shapes, that may be right."""
_BAD_TENSORS: Mapping[str, Callable[[Tensor], Any]] = {
    "of another dtype": lambda good: good.to(torch.complex64),
    "of bool": lambda good: good.to(torch.bool),
    "on meta": lambda good: good.to("meta"),
    "a number": lambda good: 2.0,
    "a text": lambda good: "rows",
    "a list": lambda good: [1.0],
}
_BAD: Mapping[str, Mapping[str, Any]] = {
    "int": {"2**63": _HUGE, "-2**63 - 1": -_HUGE - 1, "1.5": 1.5, "text": "1", "None": None},
    "int | None": {"2**63": _HUGE, "-1": -1, "1.5": 1.5, "text": "1"},
    "bool": {},  # anything has a truth
    "str": {"unknown": "unknown", "number": 3, "list": ["push"], "tensor": torch.ones(2)},
    "str | None": {"unknown": "unknown", "number": 3},
    "float | None": {"-1": -1, "nan": math.nan, "10**400": 10**400, "text": "1", "list": [1]},
    "torch.dtype | None": {"text": "float32", "int64": torch.int64},
    "Sequence[int] | None": {
        "2**63": [_HUGE, 0],
        "negative": [-1, 5],
        "one more": [2, 2, 0],
        "floats": [2.0, 2.0],
        "number": 4,
        "text": "22",
        "tensor": torch.tensor(4),
    },
    "Launch | None": {"number": 3, "without a kernel": weft.Launch()},
    "Experts": {
        "number": 3,
        "None": None,
        "of others": weft.Experts(torch.ones(1, 2, 4), torch.ones(1, 4, 1)),
    },
}
"""Bad arguments by the annotation of a parameter."""
METHODS: Mapping[str, Sequence[Any]] = {
    "empty": [
        (4,),
        ((-1,), {}),
        ((_HUGE,), {}),
        ((1 << 32, 1 << 32), {}),
        (("4",), {}),
        ((1.5,), {}),
        ((None,), {}),
        ((4,), {"dtype": "float32"}),
        ((4,), {"dtype": torch.float64}),
    ],
    "signals": [
        (2,),
        ((0,), {}),
        ((-1,), {}),
        ((_HUGE,), {}),
        (("2",), {}),
        ((1.5,), {}),
        ((None,), {}),
    ],
}
"""Collective methods of a world: good arguments, then bad ones."""
OTHER_METHODS = (
    "allocate",
    "is_symmetric",
    "peer",
    "emulate_link",
    "configure",
    "shrink",
    "grow",
    "invitation",
    "disown",
    "close",
)
"""Methods of this rank alone, and those by which ranks find each other again."""


def bad_one_sided(name: str) -> Mapping[str, Any]:
    """Bad arguments for a parameter of a one-sided call."""
    numbers = {"2**64": 2 * _HUGE, "-1": -1, "1.5": 1.5, "text": "1", "None": None}
    texts = {"unknown": "unknown", "number": 3, "list": []}
    tensors = {
        "a number": 2.0,
        "a list": [1.0],
        "None": None,
        "on meta": torch.ones(2, device="meta"),
    }
    return {
        "dst": tensors,
        "src": tensors,
        "peer": numbers,
        "world": {"text": "world"},
        "algorithm": texts,
        "comm_sms": {name: each for name, each in numbers.items() if name != "None"},
        "signals": {"number": 3, "None": None},
        "index": {**numbers, "a slice": slice(0, 3), "a slice of text": slice("0", None)},
        "op": texts,
        "cmp": texts,
        "value": numbers,
        "timeout": dict(_BAD["float | None"]),
    }[name]


_WEIGHTS = ("Weight", "Weight | Sequence[Weight]")
_TENSORS = (
    "Tensor",
    "Tensor | None",
    "Tensor | Optionals | None",
    "Tensor | Sequence[Tensor] | None",
    "Tensor | Sequence[Tensor | None] | None",
    *_WEIGHTS,
)
_IN_PLACE = ("out", "tensor")  # contiguous tensors only
_SCALES = ("scale_a", "scale_b")  # of float8 alone


def layouts(public: Public) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    """The operands of a call, each with the layouts in which it is right."""
    for name, each in public.parameters.items():
        if each.annotation in _TENSORS and name not in (*_IN_PLACE, *_SCALES):
            for words, make in LAYOUTS.items():
                if name != "bias" or words in ("sliced", "of one row"):
                    yield name, words, make


def bad(public: Public, name: str, like: Any) -> dict[str, Any]:
    """Bad arguments for a parameter, of which `like` is a good one."""
    annotation = public.parameters[name].annotation
    if annotation in _TENSORS:
        made = {words: make(like) for words, make in _BAD_TENSORS.items()}
        if annotation in _WEIGHTS:
            made |= {"a layer": torch.nn.Linear(2, 2), "an empty list": []}
        if public.parameters[name].default is inspect.Parameter.empty:
            made["None"] = None
        if name in _IN_PLACE and like.dim() == 2:
            made |= {
                words: LAYOUTS[words](like) for words in ("transposed", "sliced", "of one row")
            }
        return made
    return dict(_BAD[annotation])
