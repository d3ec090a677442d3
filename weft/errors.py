"""How things fail. Bad arguments are `ValueError` or `TypeError`, raised before anything is sent."""

from __future__ import annotations

import logging
import re
import threading

_LOG = logging.getLogger("weft")


class _Error(RuntimeError):
    """What `WeftError` stands on as long as torch is not loaded, which plans can do without."""


class WeftError(_Error):
    """Base of all errors below; raised itself for the use of a closed world.

    Where torch is loaded it is a `torch.distributed.DistBackendError`, so that handlers of torch's
    errors catch weft's.
    """


def in_use(thread: int) -> WeftError:
    """The error of a call on a world in which `thread`, by its identifier, is in the middle of
    another.
    """
    if thread == threading.get_ident():
        return WeftError(
            "this thread is in the middle of a call on this world: a signal handler that "
            "interrupts it can make none"
        )
    name = next((each.name for each in threading.enumerate() if each.ident == thread), str(thread))
    return WeftError(
        f"thread {name!r} is in the middle of a call on this world, which is used by one thread at "
        "a time: let one thread make all "
        "calls, or make a world for each by weft.init(group)"
    )


def stand_on(base: type[RuntimeError]) -> None:
    """Make `base` that of all errors, in place of what stands in for it."""
    WeftError.__bases__ = (base,)


class PeerLost(WeftError):
    """A peer died, closed its world or failed with an exception of its own while this rank needed
    it.

    `how` says which, as a phrase.
    """

    def __init__(self, message: str, how: str = "died") -> None:
        super().__init__(message)
        self.how = how


class PeerTimeout(WeftError, TimeoutError):
    """A wait reached its time limit."""


class MismatchError(WeftError):
    """The ranks did not make the same call; the message shows what differs, and both calls.

    How weft carries them out is told at level DEBUG of the logger ``weft``, and in the message
    where nothing else differs. `ranks` are the two that it shows.
    """

    ranks: tuple[int, ...] = ()

    @classmethod
    def between(cls, number: int, rank: int, call: str, peer: int, theirs: str) -> MismatchError:
        """The error of a rank that makes one call where a peer makes another.

        Of a call first what the user called, then, on a line of its own, how weft carries it out.
        """
        both = dict(sorted({rank: call, peer: theirs}.items()))
        _LOG.debug("call %d of this world, with those that weft makes itself: %s", number, both)
        (one, how), (other, hows) = [said.partition("\n")[::2] for said in both.values()]
        if one != other:
            why, shown = _difference(one, other), [one, other]
        elif _algorithm(how) != _algorithm(hows):
            why = "algorithms differ (give all ranks one algorithm=, and the same tables of weft tune and weft calibrate)"
            shown = [f"{one} by {_algorithm(each)}" for each in (how, hows)]
        else:
            why, shown = "they carry it out differently", [how, hows]
        lines = [f"\n  rank {number}: {each}" for number, each in zip(both, shown, strict=True)]
        error = cls(f"the ranks do not make the same call: {why}{''.join(lines)}")
        error.ranks = tuple(both)
        return error


def _difference(one: str, other: str) -> str:
    """What of two calls, each ``operator(shape dtype, option=value, …)``, is not the same, in
    words.
    """
    if one.partition("(")[0] != other.partition("(")[0]:
        return "operators differ"
    found = [
        what
        for what, pattern in _PARTS.items()
        if re.findall(pattern, one) != re.findall(pattern, other)
    ]
    options, others = [dict(re.findall(r"(\w+)=([^=]*)(?:, |\))", call)) for call in (one, other)]
    known = {
        name for name, value in (options | others).items() if re.search(_PARTS["dtypes"], value)
    }
    found += [
        name
        for name in options | others
        if name not in known and options.get(name) != others.get(name)
    ]
    return f"{' and '.join(found) or 'arguments'} differ{'s' if len(found) == 1 and found[0] not in _PARTS else ''}"


_PARTS = {
    "shapes": r"\(\d*,[\d, ]*\)|\[[\d, ]*\] rows x \d+|\(\) ",
    "dtypes": r"\b(?:b?float|u?int|bool|complex)\w*",
}


def _algorithm(how: str) -> str:
    """By which algorithm a call is carried out."""
    return "".join(re.findall(r"algorithm=(\w+)", how)[:1])


class PlanError(WeftError, ValueError):
    """A plan that cannot be proved right; the message lists the defects."""


class SymmetricMemoryError(WeftError, MemoryError):
    """Symmetric memory could not be had on some rank."""
