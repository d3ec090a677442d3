"""How things fail. Bad arguments are `ValueError` or `TypeError`, raised before anything is sent."""

from __future__ import annotations

import threading


class _Error(RuntimeError):
    """What `WeftError` stands on as long as torch is not loaded, which plans can do without."""


class WeftError(_Error):
    """Base of all errors below; raised itself for the use of a closed world.

    Where torch is loaded it is a `torch.distributed.DistBackendError`, so that handlers of torch's errors catch weft's.
    """


def in_use(thread: int) -> WeftError:
    """The error of a call on a world in which `thread`, by its identifier, is in the middle of another."""
    if thread == threading.get_ident():
        return WeftError("this thread is in the middle of a call on this world: a signal handler that interrupts it can make none")
    name = next((each.name for each in threading.enumerate() if each.ident == thread), str(thread))
    return WeftError(
        f"thread {name!r} is in the middle of a call on this world, which is used by one thread at a time: let one thread make all "
        "calls, or make a world for each by weft.init(group)"
    )


def stand_on(base: type[RuntimeError]) -> None:
    """Make `base` that of all errors, in place of what stands in for it."""
    WeftError.__bases__ = (base,)


class PeerLost(WeftError):
    """A peer died, closed its world or failed with an exception of its own while this rank needed it.

    `how` says which, as a phrase.
    """

    def __init__(self, message: str, how: str = "died") -> None:
        super().__init__(message)
        self.how = how


class PeerTimeout(WeftError, TimeoutError):
    """A wait reached its time limit."""


class MismatchError(WeftError):
    """The ranks did not make the same call; the message shows both."""

    @classmethod
    def between(cls, number: int, rank: int, call: str, peer: int, theirs: str) -> MismatchError:
        """The error of a rank that makes one call where a peer makes another."""
        return cls(f"call {number} of this world: rank {rank} calls {call}, but rank {peer} calls {theirs}")


class PlanError(WeftError, ValueError):
    """A plan that cannot be proved right; the message lists the defects."""


class SymmetricMemoryError(WeftError, MemoryError):
    """Symmetric memory could not be had on some rank."""
