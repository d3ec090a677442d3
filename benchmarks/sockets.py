"""Collectives between two hosts beside one connection of sockets that poll, and beside gloo.

    benchmarks/two_hosts.sh 0 benchmarks/sockets.py

Calls take turns; a time is the median over the rounds, of rank 0. The connection is of TCP between
the two ranks, whose ends ask the kernel without a pause. A *message* takes half of the time there
and back; beside it an all-reduce of as many bytes. *Both ways*, 16 MiB travel from each rank to the
other, on the connection as on weft's by one thread of each rank: an all-gather; *one way*, from
rank 0, a broadcast. `send` and `recv` are torch.distributed's, on groups of weft and of gloo.
`put_notify` is weft's alone: the peer waits for the counter, and puts back.
"""

import argparse
import os
import socket
from functools import partial
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rounds import Call, alternating

import weft

KIB, MIB = 1 << 10, 1 << 20
LARGE = 16 * MIB
PIECE = MIB  # bytes of one call of the kernel
PORT = 29401
TOKEN = 96  # all-reduces
NAMES = "sockets", "weft", "gloo"
WARM = 10  # calls in which weft measures its paths


def connection(rank: int) -> socket.socket:
    """The connection of the two ranks."""
    address = (os.environ["MASTER_ADDR"], PORT)
    if rank == 0:
        with socket.create_server(address) as server:
            weft.barrier()
            made, _ = server.accept()
    else:
        weft.barrier()
        made = socket.create_connection(address)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setblocking(False)
    return made


def exchange(made: socket.socket, sent: memoryview, received: memoryview) -> None:
    """Send and receive all of these bytes."""
    out = got = 0
    while out < len(sent) or got < len(received):
        try:
            if got < len(received):
                got += made.recv_into(received[got : got + PIECE])
        except BlockingIOError:
            pass
        try:
            if out < len(sent):
                out += made.send(sent[out : out + PIECE])
        except BlockingIOError:
            pass


def round_trip(made: socket.socket, rank: int, sent: memoryview, received: memoryview) -> None:
    """A message to the peer and one of equal size back."""
    none = sent[:0]
    for sends in (rank == 0, rank == 1):
        exchange(made, sent if sends else none, none if sends else received)


def two(size: int) -> tuple[memoryview, memoryview]:
    """What a rank sends, and where it receives: as in weft's calls, not the same, which the
    processor would have in its cache.
    """
    return memoryview(bytearray(size)), memoryview(bytearray(size))


def one_way(made: socket.socket, rank: int, values: memoryview) -> None:
    """A message from rank 0, and one byte back."""
    exchange(made, values if rank == 0 else values[:1], values[:1] if rank == 0 else values)


def messages(made: socket.socket, rank: int, size: int, times: int = 1) -> dict[str, Call]:
    """Messages of so many bytes, one after the other, and as many all-reduces."""
    values = torch.zeros(size // 4)
    calls: dict[str, Call] = {
        "sockets": partial(round_trip, made, rank, *[memoryview(bytearray(size))] * 2),
        "weft": partial(weft.all_reduce, values, out=values),
        "gloo": partial(dist.all_reduce, values.clone()),
    }
    return {name: partial(repeated, call, times) for name, call in calls.items()}


def repeated(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def by_send(made: socket.socket, groups: dict[str, Any], rank: int, size: int) -> dict[str, Call]:
    """A message of so many bytes there and back, by `send` and `recv` of torch.distributed."""
    here, there = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def there_and_back(group: Any) -> None:
        for sends in (rank == 0, rank == 1):
            (dist.send if sends else dist.recv)(here if sends else there, 1 - rank, group)

    return {
        "sockets": partial(round_trip, made, rank, *two(size)),
        **{name: partial(there_and_back, group) for name, group in groups.items()},
    }


def by_put(made: socket.socket, world: weft.World, size: int) -> dict[str, Call]:
    """Bytes put there and back, each with a notify for which the peer waits."""
    part, arrived = world.empty(size, dtype=torch.uint8), world.signals(1)
    own, turns = torch.zeros(size, dtype=torch.uint8), count(1)

    def there_and_back() -> None:
        turn = next(turns)
        for sends in (world.rank == 0, world.rank == 1):
            if sends:
                weft.put_notify(part, own, arrived, 0, 1 - world.rank)
            else:
                weft.wait(arrived, 0, ">=", turn)

    return {
        "sockets": partial(round_trip, made, world.rank, *two(size)),
        "weft": there_and_back,
    }


def both_ways(made: socket.socket, world: weft.World) -> dict[str, Call]:
    sent, received = (memoryview(bytearray(LARGE)) for _ in range(2))
    gathered = torch.zeros(world.ranks * LARGE // 4)
    own = gathered.chunk(world.ranks)[world.rank]
    return {
        "sockets": partial(exchange, made, sent, received),
        "weft": partial(weft.all_gather, own, out=gathered),
        "gloo": partial(dist.all_gather_into_tensor, gathered, own),
    }


def from_rank_0(made: socket.socket, rank: int) -> dict[str, Call]:
    values = torch.zeros(LARGE // 4)
    return {
        "sockets": partial(one_way, made, rank, memoryview(bytearray(LARGE))),
        "weft": partial(weft.broadcast, values, 0),
        "gloo": partial(dist.broadcast, values, 0),
    }


class Measured(NamedTuple):
    """A row of the table: its calls, how many of them a turn has, and the trips of each on the
    sockets, of which one counts.
    """

    name: str
    calls: dict[str, Call]
    numbers: dict[str, int]
    trips: int

    def row(self, rounds: int) -> list[str]:
        """The microseconds of sockets, weft and gloo, as far as it makes the call, and those of
        weft and gloo relative to those of sockets.
        """
        for call in self.calls.values():
            repeated(call, WARM)
        numbers = {name: self.numbers[name] for name in self.calls}
        every = alternating(self.calls, numbers, rounds)
        times = {name: median(each) for name, each in every.items()}
        times["sockets"] /= self.trips
        return [
            self.name,
            *(f"{1e6 * times[each]:.1f}" if each in times else "" for each in NAMES),
            *(
                f"{times[each] / times['sockets']:.2f}" if each in times else ""
                for each in NAMES[1:]
            ),
        ]


def measured(made: socket.socket, world: weft.World) -> list[Measured]:
    rank = world.rank
    small, token, large = (
        dict(zip(NAMES, numbers, strict=True)) for numbers in ((300, 300, 10), (5, 5, 1), (2, 2, 2))
    )
    once = dict.fromkeys(small, 1)
    groups = {name: dist.new_group(backend=name) for name in ("weft", "gloo")}
    sizes = (
        ("8 B", 8, small),
        ("64 KiB", 64 * KIB, token),
        ("1 MiB", MIB, large),
        ("64 MiB", 64 * MIB, once),
    )
    return [
        *(
            Measured(
                f"there and back, send and recv: {name}", by_send(made, groups, rank, size), n, 1
            )
            for name, size, n in sizes
        ),
        *(
            Measured(f"there and back, put_notify: {name}", by_put(made, world, size), n, 1)
            for name, size, n in sizes
        ),
        Measured("message, all-reduce: 8 B", messages(made, rank, 8), small, 2),
        Measured("message, all-reduce: 8 KiB", messages(made, rank, 8 * KIB), small, 2),
        Measured(f"{TOKEN} of them", messages(made, rank, 8 * KIB, TOKEN), token, 2),
        Measured("both ways, all-gather: 16 MiB", both_ways(made, world), large, 1),
        Measured("one way, broadcast: 16 MiB", from_rank_0(made, rank), large, 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    table = Table(
        "", "sockets, us", "weft, us", "gloo, us", "weft", "gloo, times sockets", box=None
    )
    for column in table.columns[1:]:
        column.justify = "right"
    dist.init_process_group("gloo")
    with weft.init() as world, connection(world.rank) as made:
        for each in measured(made, world):
            table.add_row(*each.row(rounds))
    if world.rank == 0:
        Console(width=100).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
