"""Hints that are added to an exception that nobody has caught when it is about to be shown, so that
calls without a mistake cost nothing: weft's equivalents of torch's keywords, and the name of a
layer.
"""

from __future__ import annotations

import re
from types import TracebackType

import torch

from weft.schedules.operators import COLLECTIVES, OPERATORS

_KEYWORDS = {
    "async_op": "begin it by weft.{name}_async(...), and call wait() of the handle that it returns",
    "src": "name the rank that sends by source=, or as the second argument: weft.{name}(x, source)",
    "group": "make a world of the group once, world = weft.init(group), and pass world=world",
    "tensor": "pass the tensor as the first argument, without a name",
    "input_tensor": "pass the tensor as the first argument, without a name, and the result as out=",
    "output_tensor": "pass the result as out=, or take the tensor that weft.{name} returns",
    "tensor_list": "weft.{name} returns one tensor of all ranks' rows: pass a tensor as out=",
}
"""Weft's equivalents of the keywords of torch.distributed."""
_UNEXPECTED = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_TOO_MANY = re.compile(
    r"(\w+)\(\) takes (?:from )?\d.* positional arguments? but \d+ (?:was|were) given"
)


def add(error: BaseException, trace: TracebackType | None) -> None:
    """Add what is known to the message of an exception with this traceback, once."""
    if error.args and isinstance(text := error.args[0], str):
        found = (hint for hint in (*_of_keywords(error), *_of_layers(trace)) if hint not in text)
        error.args = ("; ".join([text, *found]), *error.args[1:])


def _of_keywords(error: BaseException) -> list[str]:
    if type(error) is not TypeError:
        return []
    text = str(error)
    found = _UNEXPECTED.search(text) or _TOO_MANY.search(text)
    if found is None or found[1].removesuffix("_async") not in (*OPERATORS, *COLLECTIVES):
        return []
    if found.re is _TOO_MANY:
        return [f"name all but the first, as in weft.{found[1]}(x, out=y)"]
    hint = _KEYWORDS.get(found[2])
    return [hint.format(name=found[1])] if hint else []


def _of_layers(trace: TracebackType | None) -> list[str]:
    """The name of the innermost layer of weft's that a call has reached, in the outermost module
    that calls it.
    """
    modules = list[torch.nn.Module]()
    own = None
    while trace is not None:
        frame = trace.tb_frame
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            modules.append(module)
            if str(frame.f_globals.get("__name__")).startswith("weft.nn."):
                own = module
        trace = trace.tb_next
    if own is None:
        return []
    names = (name for name, each in modules[0].named_modules() if each is own)
    name = next(names, "")
    return [f"in the layer {name} of {type(modules[0]).__name__}"] if name else []
