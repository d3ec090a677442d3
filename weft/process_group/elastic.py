"""Process groups that torch.distributed connects and reconnects by handles of processes:
``init_process_group("weft", enable_reconfigure=True)`` of torch 2.14.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.distributed.distributed_c10d import PrefixStore, Store

import weft.world as worlds
from weft.errors import WeftError
from weft.process_group.operations import Operations


class Elastic:
    """The connections of a group, one after the other, each of the processes that are named then.

    `store` serves only those operations of a connected group that use one.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.listener: worlds.Endpoint | None = None  # for the next connection
        self.used: set[int] = set()

    def handle(self) -> str:
        """The text by which others name this process in the next connection."""
        if self.listener is None:
            self.listener = worlds.Endpoint()
        return worlds.handle_of(self.listener)

    def connect(
        self,
        uuid: int,
        handles: Collection[str],
        limit: float,
        timeout: float,
        before: Operations | None,
    ) -> Operations:
        """The operations of exactly the processes with these handles, within `limit` seconds; each
        of them calls this with one new `uuid`. Ranks are in the order of a list, and in one that
        all agree on of a set. `timeout` is the new group's.

        The connection `before` ends once the new one is made, and works of it that are outstanding
        fail. After an error it is unchanged and the handle can be used again, with another `uuid`.
        Raises `WeftError` without a handle or for a `uuid` that was used, and as
        `weft.world.reconfigure`.
        """
        if uuid in self.used:
            raise WeftError(
                f"uuid {uuid} was already used for this group: each attempt needs its own"
            )
        self.used.add(uuid)
        if self.listener is None:
            raise WeftError(
                "the reconfigure handle was already used: get a new one by "
                "torch.distributed._get_reconfigure_handle() before each attempt"
            )
        ordered = [*handles] if isinstance(handles, list) else sorted(handles)
        world = worlds.reconfigure(str(uuid), ordered, self.listener, limit)
        self.listener = None  # the world's
        world.timeout = timeout
        if before is not None:
            before.leave()
        return Operations(world, PrefixStore(f"weft {uuid}", self.store))

    def close(self) -> None:
        """Make the handle useless."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
