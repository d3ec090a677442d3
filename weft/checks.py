"""Checks of arguments that need no world: plain tensors, dtypes, numbers and time limits."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import weft._native as _native

PLAIN = (Tensor, torch.nn.Parameter)
LOOK = getattr(Tensor, "__dlpack_c_exchange_api__", None)
"""The interface by which native code reads a tensor's metadata; None in torch 2.9."""
# before any tensor is read: what a watch has read is compared with what it reads later
_native.set_tensor_access(PLAIN, LOOK)
_TRACED = (*PLAIN, FakeTensor, FunctionalTensor)
_TRACING = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)
_FUNCTIONALIZE = "torch.func.functionalize"
"""The transform of which any operator of torch can be a part."""
_REMEDIES = {
    "DTensor": "to_local()",
    "AsyncCollectiveTensor": "wait()",
    "NestedTensor": "to_padded_tensor(0.0)",
}
"""The calls that convert torch's own subclasses to plain tensors."""


@cache
def name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def check_tensor(tensor: object, argument: str, traced: bool = False) -> None:
    """Raise `TypeError` or `ValueError` unless `tensor` is plain: its memory holds its elements and
    all that torch computes with.

    Subclasses other than `torch.nn.Parameter` are rejected, even with plain memory, since they may
    redefine their elements. Sparse and nested tensors are rejected too, conjugate and negative
    views, which are computed only when they are read, tensors that stand for others in a transform
    of torch.func or have a tangent, and all tensors while torch traces operators. With `traced`,
    for calls of operators of torch, they may be those of a trace.
    """
    kinds = _TRACED if traced and tracing_modes() else PLAIN
    if not isinstance(tensor, Tensor) or type(tensor) not in kinds:
        raise TypeError(_of_another_type(tensor, argument))
    check_untransformed(tensor, argument, traced)
    if not traced:
        check_untraced(argument)
    elif type(tensor) in PLAIN:
        _check_fake(argument)
    if tensor.is_nested:
        raise ValueError(
            f"{argument} is a nested tensor: pass {argument}.to_padded_tensor(0.0), or each "
            "part separately"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{argument} has the layout {tensor.layout}: pass {argument}.to_dense()")
    if tensor.is_neg() or tensor.is_conj():
        view = "negative" if tensor.is_neg() else "conjugate"
        raise ValueError(
            f"{argument} is a {view} view: pass {argument}.resolve_conj().resolve_neg()"
        )


def check_own_elements(tensor: Tensor, argument: str) -> None:
    """Raise `TypeError` or `ValueError` if the elements of a tensor are not its own, but those of a
    trace, of a transform of torch.func, or of a forward-mode gradient.
    """
    if isinstance(tensor, (FakeTensor, FunctionalTensor)):
        raise TypeError(_of_another_type(tensor, argument))
    if in_modes():
        check_untransformed(tensor, argument)
        check_untraced(argument)


def in_modes() -> bool:
    """Whether this thread sees operators of torch, or is in a transform of torch.func or in a
    forward-mode gradient: only there the elements of plain tensors may not be their own.
    """
    return bool(
        torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or _functorch.peek_interpreter_stack() is not None
    )


def check_untraced(subject: str) -> None:
    """Raise `ValueError` if this thread traces operators of torch: the call of `subject`, an
    argument or a function, is none of them.
    """
    for mode in tracing_modes():
        raise ValueError(
            f"{subject} must be used outside of {type(mode).__name__}, which traces operators of "
            "torch: weft's fused operators and torch's functional collectives are some, this call "
            "is none"
        )


def _check_fake(argument: str) -> None:
    """Raise `ValueError` if a mode of this thread takes fake tensors only."""
    for mode in tracing_modes():
        if isinstance(mode, FakeTensorMode) and not mode.allow_non_fake_inputs:
            raise ValueError(
                f"{argument} is no fake tensor, and FakeTensorMode takes no others: pass "
                f"mode.from_tensor({argument})"
            )


def check_untransformed(tensor: Tensor, argument: str, traced: bool = False) -> None:
    """Raise `ValueError` for a tensor that stands for others in a transform of torch.func, or has a
    tangent. With `traced` the transform may be one that traces operators.
    """
    found = transforms(tensor)
    if refused := found - ({_FUNCTIONALIZE} if traced else set()):
        raise ValueError(
            f"{argument} is a tensor of {min(refused)}, of which this call cannot be a part: call "
            "it outside, and pass plain tensors; gradients are those of backward()"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise ValueError(
            f"{argument} has a tangent, for a forward-mode gradient, which weft's calls have not: "
            f"pass torch.autograd.forward_ad.unpack_dual({argument}).primal"
        )


def transforms(tensor: Tensor) -> set[str]:
    """The transforms of torch.func in which a tensor stands for others."""
    found = set[str]()
    while _functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            found.add("torch.func.vmap")
        elif not _functorch.is_gradtrackingtensor(tensor):
            return found | {_FUNCTIONALIZE}
        else:
            level = _functorch.maybe_get_level(tensor)
            stack = {each.level(): each.key() for each in _functorch.get_interpreter_stack() or ()}
            forward = stack.get(level) == _functorch.TransformType.Jvp
            found.add("torch.func.jvp" if forward else "a gradient of torch.func")
        tensor = _functorch.get_unwrapped(tensor)
    return found


def tracing_modes() -> Sequence[TorchDispatchMode]:
    """The modes of this thread that trace operators of torch in place of executing them."""
    if not torch._C._len_torch_dispatch_stack():
        return ()
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _TRACING)]


def waited(tensor: Tensor) -> Tensor:
    """The tensor of a functional collective's result, once it is there; any other as it is."""
    wait = None if type(tensor) in PLAIN else getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def _of_another_type(value: object, argument: str) -> str:
    kind = type(value).__name__
    if not isinstance(value, Tensor):
        return f"{argument} must be a tensor; got {kind}{_instead(value, argument)}"
    if kind in _REMEDIES:
        remedy = f"{argument}.{_REMEDIES[kind]}"
    elif type(
        value
    ).__torch_dispatch__ is Tensor.__torch_dispatch__ and not torch.nn.parameter.is_lazy(value):
        remedy = f"{argument}.as_subclass(torch.Tensor)"
    else:
        remedy = "a plain tensor of its elements"
    return f"{argument} must be a plain torch.Tensor; got the subclass {kind}: pass {remedy}"


def _instead(value: object, argument: str) -> str:
    """What to pass instead of a value that is no tensor."""
    if isinstance(value, torch.nn.Linear) and argument == "b":
        return ": pass b.weight.t()"
    if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
        return f": make one call for each tensor, or pass torch.stack({argument})"
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        return f": pass torch.as_tensor({argument})"
    return ""


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors span common bytes."""
    (a, b), (c, d) = _span(one), _span(other)
    return a < d and c < b


def _span(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def check_dtype(dtype: object, argument: str) -> None:
    """Raise `TypeError` unless `dtype` is one of torch."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{argument} must be a torch.dtype, such as torch.float32; got {dtype!r}")


def check_module(module: object, argument: str) -> None:
    """Raise `TypeError` unless `module` is one of torch."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{argument} must be a torch.nn.Module; got {type(module).__name__}")


def suggestion(given: object, names: Collection[str]) -> str:
    """A phrase with the name that was probably meant, "" if none is like it."""
    near = get_close_matches(str(given).rpartition(".")[2].lower(), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def integer(number: object, expected: str) -> int:
    """An integer. Raises `TypeError` with the text `expected` for anything else."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{expected}; got {type(number).__name__}") from None


def integers(numbers: object, argument: str) -> list[int]:
    """A list of integers. Raises `TypeError` for anything else, `ValueError` for one that no tensor
    has as a size.
    """
    try:
        found = [operator.index(number) for number in numbers]  # type: ignore[attr-defined]
    except TypeError:
        raise TypeError(
            f"{argument} must be a list of integers, one per rank; got {numbers!r}"
        ) from None
    for number in found:
        check_size(number, argument)
    return found


def check_size(number: int, argument: str) -> None:
    """Raise `ValueError` for a number that is larger than any size of a tensor."""
    if number > _LARGEST:
        raise ValueError(f"{argument} must be less than 2**63; got {number}")


def check_number(number: object, argument: str) -> None:
    """Raise `TypeError` unless `number` is a real number."""
    if not isinstance(number, Real):
        raise TypeError(f"{argument} must be a number; got {number!r}")


def check_rank(rank: object, argument: str, ranks: int) -> int:
    """The number of one of `ranks` ranks. Raises `ValueError` or `TypeError` if it is none."""
    number = integer(rank, f"{argument} must be the number of a rank")
    if not 0 <= number < ranks:
        raise ValueError(f"there is no rank {number} in a world of {ranks}")
    return number


def check_ranks(ranks: object) -> None:
    """Raise `ValueError` or `TypeError` unless `ranks` is a number of ranks for a new world."""
    if integer(ranks, "ranks must be an integer") < 1:
        raise ValueError(f"at least one rank is needed; got {ranks}")


def check_call(caller: str, fn: Callable[..., Any], args: Sequence[object]) -> None:
    """Raise `TypeError` unless `fn` can be called with `args`, which is what `caller` passes to it
    on each rank.
    """
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except ValueError:  # some functions of C have none
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(
            f"{caller} calls the function with {len(args)} argument(s), those given after it, and "
            f"adds no rank: {error}; in the function weft.init().rank is the rank's number"
        ) from None


_LARGEST = 2**63 - 1

LONGEST = 1e6
"""Seconds of the longest time limit: clocks must not overflow."""


def limited(timeout: float) -> float:
    """A time limit of at most `LONGEST`. Raises `ValueError` unless `timeout` is a positive number
    of seconds.
    """
    check_timeout(timeout)
    return min(float(timeout), LONGEST)


def check_timeout(timeout: float | None) -> None:
    """Raise `ValueError` unless `timeout` is None or a positive number of seconds."""
    try:
        if timeout is None or (timeout > 0 and float(timeout)):
            return
    except (TypeError, ValueError, OverflowError):  # no number, or one of more than 308 digits
        pass
    raise ValueError(f"timeout must be a positive number of seconds; got {timeout!r}")
