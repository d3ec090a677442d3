"""Bytes and clocks of several hosts: the bytes sent by operators, and traces of a barrier."""

from __future__ import annotations

from pathlib import Path

import torch

import weft
from weft.engines.recording import clock_offsets, record


def traffic(world):
    """The bytes that this host sends for each operator and collective, and the least possible
    number.

    Rows reach each other host once, and so do sums of a host's rows: the part that a rank of
    another host keeps goes to that rank, and comes back if all ranks need it.
    """
    rows, columns = 1024, 512
    size, hosts = rows * columns * 4, world.hosts.number
    here = world.hosts.count(world.hosts[world.rank])
    far, mine, part = world.ranks - here, here * (hosts - 1), torch.randn(rows, columns)
    whole, b = torch.randn(world.ranks * rows, columns), torch.eye(columns)
    calls = {
        "all_gather": (lambda: weft.all_gather(part), mine),
        "all_gather_matmul": (lambda: weft.all_gather_matmul(part, b), mine),
        "all_gather_matmul, sequential": (
            lambda: weft.all_gather_matmul(part, b, algorithm="sequential"),
            mine,
        ),
        "reduce_scatter": (lambda: weft.reduce_scatter(whole), far),
        "matmul_reduce_scatter": (lambda: weft.matmul_reduce_scatter(whole, b), far),
        "matmul_reduce_scatter, sequential": (
            lambda: weft.matmul_reduce_scatter(whole, b, algorithm="sequential"),
            far,
        ),
        "all_reduce": (lambda: weft.all_reduce(whole), far + mine),
        "matmul_all_reduce": (lambda: weft.matmul_all_reduce(whole, b), far + mine),
        "matmul_all_reduce, sequential": (
            lambda: weft.matmul_all_reduce(whole, b, algorithm="sequential"),
            far + mine,
        ),
        "all_gather, ring": (lambda: weft.all_gather(part, algorithm="ring"), mine),
        "broadcast": (
            lambda: weft.broadcast(whole, 0),
            world.ranks * (hosts - 1) if world.hosts.here(0) else 0,
        ),
        "all_to_all": (lambda: weft.all_to_all(whole), here * far),
    }
    found = {}
    for name, (call, least) in calls.items():
        rounds = []
        for _ in range(2):  # since packets are sent again now and then
            weft.barrier()
            before = sent()
            weft.barrier()  # no rank begins before all have read their counters
            call()
            weft.barrier()
            rounds.append(sent() - before)
        found[name] = min(rounds), least * size
    return found


def traces(world):
    """On rank 0, the begin and end of a barrier on all ranks, and the offsets of the other clocks."""
    with record(world) as recording:
        weft.barrier()
    trace, ahead = recording.gather("a barrier"), clock_offsets(world)
    if trace is None:
        return None
    spans = [[span for span in trace.spans if span.rank == rank] for rank in range(world.ranks)]
    return [
        [min(span.start for span in own), max(span.stop for span in own)] for own in spans
    ], ahead


def sent():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
