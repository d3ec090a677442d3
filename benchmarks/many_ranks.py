"""How long many ranks take to find each other, and what each of them keeps.

    python benchmarks/many_ranks.py rendezvous --ranks 1024
    python benchmarks/many_ranks.py groups --ranks 64 --groups 64 --members 8

All ranks are processes of this host, forked from one that has torch loaded. A rendezvous is what
ranks do in ``init_process_group`` before they connect: each publishes its record in a store, and
reads those of all others. Groups are made by ``new_group`` after ``init_process_group("weft")``;
all make all groups, as torch asks for, and the members use each of them once.

torch's store resolves the name of each client's address, ``::ffff:127.0.0.1`` here: unless
/etc/hosts has it, the time of a name server is a part of what is measured.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from weft.bootstrap.endpoint import Endpoint
from weft.bootstrap.rendezvous import StoreRendezvous
from weft.process_group import compiled
from weft.world.backend import Backend

LIMIT = 300.0
"""Seconds within which all ranks must have ended."""

app = typer.Typer(add_completion=False, help=(__doc__ or "").split("\n", 1)[0])


class Times(ctypes.Structure):
    """What a rank reports, in shared memory: seconds of `CLOCK_MONOTONIC`, kB, and numbers."""

    _fields_ = (
        ("begun", ctypes.c_double),
        ("ended", ctypes.c_double),
        ("memory", ctypes.c_int64),
        ("files", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


def on_forked(ranks: int, program: Callable[[int, int, Times], None]) -> list[Times]:
    """Run ``program(rank, port of a store, report)`` on forked ranks, which begin together; the
    reports of all. Exits if one fails.
    """
    shared = mmap.mmap(-1, ctypes.sizeof(Times) * ranks)
    reports = (Times * ranks).from_buffer(shared)
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT))
    go_in, go_out = os.pipe()
    started = time.monotonic()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            os.close(go_out)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            os.read(go_in, 1)  # ends when the parent closes its end
            program(rank, server.port, reports[rank])
            code = 0
        except BaseException as error:
            print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    print(f"{ranks} ranks forked in {time.monotonic() - started:.1f} s", flush=True)
    os.close(go_out)
    endings = [os.waitpid(child, 0)[1] for child in children]
    if any(endings):
        sys.exit(f"{sum(map(bool, endings))} of {ranks} ranks failed")
    return [*reports]


def resources(report: Times) -> None:
    """Add what this process has: memory of its own in kB, open files, threads."""
    with open("/proc/self/smaps_rollup") as file:
        report.memory = sum(int(line.split()[1]) for line in file if line.startswith("Private"))
    report.files = len(os.listdir("/proc/self/fd"))
    report.threads = len(os.listdir("/proc/self/task"))


def shown(reports: list[Times], title: str) -> None:
    """Print the median and the most of what ranks reported."""
    begun = min(each.begun for each in reports)
    table = Table("a rank's", "median", "most", title=title, title_justify="left")
    for name, values, form in (
        ("time until it has all (s)", [each.ended - begun for each in reports], ".2f"),
        ("memory of its own (MiB)", [each.memory / 1024 for each in reports], ".1f"),
        ("open files", [each.files for each in reports], ".0f"),
        ("threads", [each.threads for each in reports], ".0f"),
    ):
        table.add_row(name, format(median(values), form), format(max(values), form))
    Console().print(table)


@app.command()
def rendezvous(ranks: int = 1024) -> None:
    """Exchange the records of all ranks by a store."""
    torch.set_num_threads(1)

    def program(rank: int, port: int, report: Times) -> None:
        endpoint = Endpoint(Backend())
        report.begun = time.monotonic()
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=LIMIT))
        with StoreRendezvous(store, rank, ranks).exchange(endpoint.info, LIMIT) as infos:
            assert len({info.pid for info in infos}) == ranks
        report.ended = time.monotonic()
        resources(report)

    shown(on_forked(ranks, program), f"rendezvous of {ranks} ranks")


@app.command()
def groups(ranks: int = 64, groups: int = 64, members: int = 8) -> None:
    """Make a group of all ranks, then groups of some of them, use each, and destroy them."""
    torch.set_num_threads(1)
    compiled.backend()
    draw = random.Random(0)
    chosen = [sorted(draw.sample(range(ranks), members)) for _ in range(groups)]

    def program(rank: int, port: int, report: Times) -> None:
        report.begun = time.monotonic()
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=LIMIT))
        dist.init_process_group("weft", store=store, rank=rank, world_size=ranks)
        dist.all_reduce(x := torch.ones(1))
        assert x.item() == ranks
        if rank == 0:
            print(f"the group of {ranks} after {time.monotonic() - report.begun:.2f} s", flush=True)
        made = [dist.new_group(each) for each in chosen]
        for group, of in zip(made, chosen, strict=True):
            if rank in of:
                dist.all_reduce(x := torch.ones(1), group=group)
                assert x.item() == members
        report.ended = time.monotonic()
        resources(report)
        dist.barrier()
        before = time.monotonic()
        dist.destroy_process_group()
        if rank == 0:
            print(f"all are destroyed in {time.monotonic() - before:.2f} s", flush=True)

    shown(
        on_forked(ranks, program),
        f"{groups} groups of {members} among {ranks} ranks, and one of all",
    )


if __name__ == "__main__":
    app()
