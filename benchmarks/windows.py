"""Windows of torch 2.14 on weft, and messages of gloo: two ranks of one thread each that exchange
values.

``python benchmarks/windows.py [ROUNDS]``, by a Python with torch 2.14: by default 15. Every round
runs both, in alternating order; the script prints the median and the best of the rounds, and the
median of the ratios within a round. It runs twice: each rank on a core of its own, and without
binding, so that gloo's threads may use other cores.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from rounds import compared

from weft import launch

SIZES = (8, 512, 4 << 10, 64 << 10, 1 << 20, 16 << 20)


def by_messages(group: Any) -> Callable[[torch.Tensor], object]:
    """Send values to the peer and receive its own."""
    peer = 1 - dist.get_rank()

    def exchange(values: torch.Tensor) -> None:
        received = spare[: len(values)]
        works = (dist.isend(values, peer, group), dist.irecv(received, peer, group))
        for work in works:
            work.wait()

    spare = torch.empty(SIZES[-1], dtype=torch.uint8)
    return exchange


def by_window(group: Any) -> Callable[[torch.Tensor], object]:
    """Put values into the peer's window, and wait until its own are there. The halves of a window
    take turns: the peer puts into one while this rank may still read the other.
    """
    peer = 1 - dist.get_rank()
    window = dist._new_window(torch.empty(2 * SIZES[-1], dtype=torch.uint8), group=group)
    turns = count()

    def exchange(values: torch.Tensor) -> None:
        window.put(values, peer, next(turns) % 2 * SIZES[-1], False)
        window.signal(peer, False)
        window.wait_signal(peer, False)

    return exchange


def measure(rounds: int) -> list[str]:
    """The lines of the table."""
    dist.init_process_group("gloo")
    weft = dist.new_group(backend="weft")
    ways = {"gloo": by_messages(dist.group.WORLD), "weft": by_window(weft)}
    rows = []
    for size in SIZES:
        values = torch.ones(size, dtype=torch.uint8)
        calls = {name: partial(exchange, values) for name, exchange in ways.items()}
        rows.append(f"{size:9d} B{compared(calls, dict.fromkeys(ways, dist.barrier), rounds)}")
    dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for title, bind in (("each rank on a core of its own", True), ("not bound", False)):
        print(title, *launch(measure, 2, rounds, threads=1, bind=bind)[0], sep="\n")
