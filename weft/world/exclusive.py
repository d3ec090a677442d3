"""The part of a call during which no other thread may call."""

from __future__ import annotations

from typing import Any

import weft._native as _native
from weft.errors import WeftError
from weft.world.failure import Failure


class Exclusive:
    """Context of a part of a call during which no other thread may call, as ranks make calls in one
    order: a deferred call begins before. A second thread closes the world.

    Attributes: `deferred`, the call, if there is one, whose method `begin` is to be called before
    the next call.
    """

    def __init__(self, executor: _native.Executor, failure: Failure) -> None:
        self.executor = executor
        self.failure = failure
        self.deferred: Any = None

    def __enter__(self) -> None:
        if self.deferred is not None:
            self.deferred.begin()
        try:
            self.executor.enter()
        except WeftError as error:
            self.failure.fail(error)
            raise

    def __exit__(self, *raised: object) -> None:
        self.executor.leave()
