"""Why a group's world was closed, and what is called before that."""

from __future__ import annotations

import logging
from collections.abc import Callable

from weft.errors import PeerLost, PeerTimeout

_log = logging.getLogger("weft")


class Failure:
    """What a world calls before an error closes it: the `hooks`, by their numbers.

    Attributes: `error`, by which the world was closed, None without.
    """

    def __init__(self) -> None:
        self.hooks: dict[int, Callable[[], object]] = {}
        self.error: BaseException | None = None

    def __call__(self, error: BaseException) -> None:
        self.error = error
        for hook in [*self.hooks.values()]:
            try:
                hook()
            except Exception:  # the world is to be closed all the same
                _log.exception("an abort hook of a process group failed")

    @property
    def kind(self) -> str:
        """The name in torch's ErrorType."""
        if isinstance(self.error, PeerTimeout):
            return "TIMEOUT"
        if isinstance(self.error, PeerLost):
            return "REMOTE_ERROR"
        return "SUCCESS" if self.error is None else "COMM_ERROR"
