"""Collectives between two hosts beside one connection of sockets that poll, and beside gloo.

    benchmarks/two_hosts.sh 0 benchmarks/sockets.py

Calls take turns; a time is the median over the rounds, of rank 0. The connection is of TCP between
the two ranks, whose ends ask the kernel without a pause. A *message* takes half of the time there
and back; beside it an all-reduce of as many bytes. *Both ways*, 16 MiB travel from each rank to the
other, on the connection as on weft's by one thread of each rank: an all-gather; *one way*, from
rank 0, a broadcast.
"""

import argparse
import os
import socket
from functools import partial
from statistics import median

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
CALLS, LARGE_CALLS = 300, 2  # in a turn
GLOO_CALLS = 10
TOKEN = 96  # all-reduces
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


def round_trip(made: socket.socket, rank: int, values: memoryview) -> None:
    """A message to the peer and one of equal size back."""
    none = values[:0]
    for sends in (rank == 0, rank == 1):
        exchange(made, values if sends else none, none if sends else values)


def one_way(made: socket.socket, rank: int, values: memoryview) -> None:
    """A message from rank 0, and one byte back."""
    exchange(made, values if rank == 0 else values[:1], values[:1] if rank == 0 else values)


def ratios(
    name: str, calls: dict[str, Call], numbers: dict[str, int], rounds: int, halves: bool = False
) -> list[str]:
    """A row of the table: the microseconds of sockets, weft and gloo, and weft's and gloo's
    relative to those of sockets.
    """
    for _ in range(WARM):
        for call in calls.values():
            call()
    times = {call: median(each) for call, each in alternating(calls, numbers, rounds).items()}
    if halves:
        times["sockets"] /= 2
    return [
        name,
        *(f"{1e6 * time:.1f}" for time in times.values()),
        *(f"{times[each] / times['sockets']:.2f}" for each in ("weft", "gloo")),
    ]


def rows(world: weft.World, made: socket.socket, rounds: int) -> list[list[str]]:
    """The rows of the table."""
    found = []
    small = {"sockets": CALLS, "weft": CALLS, "gloo": GLOO_CALLS}
    large = dict.fromkeys(small, LARGE_CALLS)
    for size, name in ((8, "8 B"), (8 * KIB, "8 KiB")):
        values = torch.zeros(size // 4)
        calls: dict[str, Call] = {
            "sockets": partial(round_trip, made, world.rank, memoryview(bytearray(size))),
            "weft": partial(weft.all_reduce, values, out=values),
            "gloo": partial(dist.all_reduce, values.clone()),
        }
        found.append(ratios(f"message, all-reduce: {name}", calls, small, rounds, halves=True))
    token = torch.zeros(2 * KIB)

    def repeated(call: Call) -> None:
        for _ in range(TOKEN):
            call()

    there = memoryview(bytearray(8 * KIB))
    calls = {
        "sockets": partial(repeated, partial(round_trip, made, world.rank, there)),
        "weft": partial(repeated, partial(weft.all_reduce, token, out=token)),
        "gloo": partial(repeated, partial(dist.all_reduce, token.clone())),
    }
    once = {"sockets": 5, "weft": 5, "gloo": 1}
    found.append(ratios(f"{TOKEN} of them", calls, once, rounds, halves=True))
    gathered = torch.zeros(world.ranks * LARGE // 4)
    own, values = gathered.chunk(world.ranks)[world.rank], torch.zeros(LARGE // 4)
    there, back = (memoryview(bytearray(LARGE)) for _ in range(2))
    calls = {
        "sockets": partial(exchange, made, there, back),
        "weft": partial(weft.all_gather, own, out=gathered),
        "gloo": partial(dist.all_gather_into_tensor, gathered, own),
    }
    found.append(ratios("both ways, all-gather: 16 MiB", calls, large, rounds))
    calls = {
        "sockets": partial(one_way, made, world.rank, there),
        "weft": partial(weft.broadcast, values, 0),
        "gloo": partial(dist.broadcast, values, 0),
    }
    found.append(ratios("one way, broadcast: 16 MiB", calls, large, rounds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    table = Table(
        "", "sockets, us", "weft, us", "gloo, us", "weft", "gloo, times sockets", box=None
    )
    for column in table.columns[1:]:
        column.justify = "right"
    with weft.init() as world, connection(world.rank) as made:
        for row in rows(world, made, rounds):
            table.add_row(*row)
    if world.rank == 0:
        Console(width=100).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
