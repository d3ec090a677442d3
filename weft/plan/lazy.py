"""A sequence and a mapping whose items are computed when they are read: the lanes and the result of
a plan.

A rank that executes a plan of many ranks needs only its own lanes. So a planner describes the lanes
of all ranks, and only lanes that are read cost time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, overload

Item = TypeVar("Item")
Key = TypeVar("Key")


class PerRank(Sequence[Item]):
    """A sequence with an item for each rank, which `make` computes when it is first read.

    It compares and prints like the tuple of all items. `request` is a text that determines all
    items, if there is one: ranks compare it in place of the items. Then all ranks do the same work,
    unless there are `examples`, which together do all kinds of it.

    `toward` makes the parts of a rank's item that concern a host, and possibly more.
    """

    def __init__(
        self,
        ranks: int,
        make: Callable[[int], Item],
        request: str = "",
        examples: Collection[int] = (),
        toward: Callable[[int, int], Item] | None = None,
    ) -> None:
        self.request, self.examples, self._ranks, self.make = request, examples, range(ranks), make
        self.toward = toward or (lambda rank, host: make(rank))
        self._made: dict[int, Item] = {}

    @classmethod
    def of(
        cls, items: Sequence[Item], request: str = "", examples: Collection[int] = ()
    ) -> PerRank[Item]:
        """These items, one for each rank."""
        return cls(len(items), items.__getitem__, request, examples)

    def changed(self, change: Callable[[Item], Item], request: str) -> PerRank[Item]:
        """The sequence with each item changed; `request` determines the changed items."""
        return PerRank(
            len(self),
            lambda rank: change(self.make(rank)),
            request,
            self.examples,
            lambda rank, host: change(self.toward(rank, host)),
        )

    def only(self, ranks: Container[int], empty: Item) -> PerRank[Item]:
        """The items of these `ranks`, and `empty` ones of all others."""
        return PerRank(
            len(self),
            lambda rank: self[rank] if rank in ranks else empty,
            self.request,
            self.examples,
            self.toward,
        )

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, at: int) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, at: int | slice) -> Item | tuple[Item, ...]:
        if isinstance(at, slice):
            return tuple(self[rank] for rank in self._ranks[at])
        rank = self._ranks[at]
        if rank not in self._made:
            self._made[rank] = self.make(rank)
        return self._made[rank]

    def __iter__(self) -> Iterator[Item]:
        # `Sequence.__iter__` takes an `IndexError` for the end, also one that `make` raises
        return (self[rank] for rank in self._ranks)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, tuple | PerRank) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


class Deferred(Mapping[Key, Item]):
    """A mapping that `make` computes when it is first read."""

    def __init__(self, make: Callable[[], Mapping[Key, Item]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[Key, Item]:
        return self._make()

    def __getitem__(self, key: Key) -> Item:
        return self._made[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __repr__(self) -> str:
        return repr(self._made)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
