"""Why a group's world was closed, and what is called before that."""

from __future__ import annotations

import logging
from collections.abc import Callable

from weft.errors import PeerLost, PeerTimeout

_log = logging.getLogger("weft")


class Failure:
    """What a world calls before an error closes it: the `hooks`, by their numbers.

    Attributes: `kind`, the error by which the world was closed, as torch's ErrorType names it. The
    error itself would keep the group alive: its frames refer to torch's group, whose references
    Python's collector does not see.
    """

    def __init__(self) -> None:
        self.hooks: dict[int, Callable[[], object]] = {}
        self.kind = "SUCCESS"

    def __call__(self, error: BaseException) -> None:
        self.kind = _kind(error)
        for hook in [*self.hooks.values()]:
            try:
                hook()
            except Exception:  # the world is to be closed all the same
                _log.exception("an abort hook of a process group failed")


def _kind(error: BaseException) -> str:
    if isinstance(error, PeerTimeout):
        return "TIMEOUT"
    return "REMOTE_ERROR" if isinstance(error, PeerLost) else "COMM_ERROR"
