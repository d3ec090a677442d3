"""Ranks of this host that claim to be on several, and connect over the loopback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

import weft
from weft.bootstrap import endpoint
from weft.bootstrap.listener import Listener


@contextlib.contextmanager
def claiming(
    hosts: int, made: Callable[[], contextlib.AbstractContextManager[object]] | None = None
) -> Iterator[object]:
    """A world or group, by default the default world, of ranks that claim to be on so many hosts:
    the first ranks on the first, and so on.
    """
    here = int(os.environ["RANK"]) * hosts // int(os.environ["WORLD_SIZE"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "host_identity", lambda: f"host {here}")
        patch.setattr(endpoint, "listen_to_hosts", lambda rank: Listener("127.0.0.1"))
        with made() if made else weft.init(timeout=20) as each:
            yield each


def two_hosts() -> contextlib.AbstractContextManager[object]:
    """The default world of ranks of which the first half claims to be on another host."""
    return claiming(2)
