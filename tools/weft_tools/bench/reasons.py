"""The reasons for which options of fused operators' benchmarks have no effect: a function for each
option, which returns an empty text if it has one.

The settings have the number of ranks that will run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from weft.schedules.device_options import DeviceOptions, honours, tile_of
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Operator, Request

_ALONE = "a single rank exchanges no rows: use --ranks 2 or more"


def algorithm(settings: Any) -> str:
    return _ALONE if settings.ranks == 1 else ""


def chunk_rows(settings: Any) -> str:
    operator = _operator(settings)
    if settings.ranks == 1:
        return _ALONE
    candidates = (
        operator.auto_candidates_over_links if settings.link_gbps else operator.auto_candidates
    )
    chosen = candidates if settings.algorithm == "auto" else (settings.algorithm,)
    if {*chosen} <= {*operator.uncut}:
        cutting = either(_cutting(operator))
        return f"{settings.algorithm} does not cut shards into pieces: use --algorithm {cutting}"
    return ""


def order(settings: Any) -> str:
    ordered = _operator(settings).ordered
    if settings.algorithm not in ordered:
        return f"{settings.algorithm} has no orders: use --algorithm {either(ordered)}"
    return _ALONE if settings.ranks == 1 else ""


def comm_threads(settings: Any) -> str:
    if settings.ranks == 1:
        return _ALONE
    if (engine := settings.place["engine"]) != "host":
        return f"the engine {engine} has no threads that move rows: omit one of them"
    names = [name for name in _operator(settings).algorithms if _has_comm_lane(settings, name)]
    if settings.algorithm not in names:
        lane = f"{settings.algorithm} may move no rows in the background"
        return f"{lane}: use --algorithm {either(names)}"
    return ""


def of_kernel(settings: Any) -> str:
    """Why products have no tile and no SMs."""
    if (engine := settings.place["engine"]) not in ("triton", "interpreter"):
        kernels = "--engine triton" if settings.device == "cuda" else "--engine interpreter"
        return f"the engine {engine} does not multiply by weft's kernel: use {kernels}"
    return ""


def own_tile(settings: Any) -> str:
    return of_kernel(settings) or _honoured(
        settings, DeviceOptions(own_tile=tile_of(settings.own_tile))
    )


def comm_sms(settings: Any) -> str:
    if settings.device == "cpu" and (engine := settings.place["engine"]) != "interpreter":
        return f"the engine {engine} runs no kernels: use --device cuda, or --engine interpreter"
    return _honoured(settings, DeviceOptions(comm_sms=settings.comm_sms))


def symmetric_out(settings: Any) -> str:
    if (settings.operator, settings.algorithm) != ("matmul_all_reduce", "push"):
        return "only matmul-all-reduce --algorithm push puts results there: use it, or omit it"
    return ""


def links(settings: Any) -> str:
    if (engine := settings.place["engine"]) in ("host", "reference"):
        return f"the engine {engine} has one lane for transfers: use --engine streams"
    if settings.ranks > 1 and settings.links > settings.ranks - 1:
        return f"each link serves other peers: use at most {settings.ranks - 1}, or more ranks"
    return _honoured(settings, DeviceOptions(links=settings.links))


def _honoured(settings: Any, options: DeviceOptions) -> str:
    """Why the algorithm does not honour these options of a device."""
    if settings.ranks == 1:
        return _ALONE
    operator, ranks = _operator(settings), settings.ranks
    plans = {
        name: operator.plan(Request(ranks, 2, name, symmetric=True, links=options.links))
        for name in operator.algorithms
    }
    serving = [name for name, plan in plans.items() if honours(plan, options)]
    if not serving:
        return f"no algorithm of {settings.operator.replace('_', '-')} has {options}: omit it"
    if settings.algorithm not in ("auto", *serving):
        return f"{settings.algorithm} has no {options}: use --algorithm {either(serving)}"
    return ""


def ablate(settings: Any) -> str:
    cutting = _cutting(_operator(settings))
    if settings.ranks > 1 and settings.algorithm in (*cutting, "auto"):
        return ""
    subject = "one rank" if settings.ranks == 1 else settings.algorithm
    needed = f"use 2 or more ranks and --algorithm {either(cutting)}"
    return f"{subject} has no transfers to overlap: {needed}"


def link_gbps(settings: Any) -> str:
    operator = _operator(settings)
    if settings.algorithm in operator.moves_nothing:
        moving = [name for name in _cutting(operator) if name not in operator.moves_nothing]
        why = f"{settings.algorithm} moves no rows, so an emulated link cannot slow it"
        return f"{why}: use --algorithm {either(moving)}"
    if settings.ranks == 1:
        return "a single rank sends nothing over a link: use --ranks 2 or more"
    return ""


def over_time(settings: Any) -> str:
    """Why there is no trace of a run."""
    reference = getattr(settings, "engine", None) == "reference"
    return "the reference engine has no lanes over time: omit one of them" if reference else ""


def either(names: Sequence[str]) -> str:
    """Names as alternatives."""
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names)


def _operator(settings: Any) -> Operator:
    return OPERATORS[settings.operator]


def _cutting(operator: Operator) -> list[str]:
    return [name for name in operator.algorithms if name not in operator.uncut]


def _has_comm_lane(settings: Any, name: str) -> bool:
    """Whether ranks move rows in the background, as the plan of an algorithm has it. Over links
    peers' memory cannot be read, so some algorithms get its rows there.
    """
    operator, ranks = _operator(settings), settings.ranks
    of_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    reads = not settings.link_gbps and of_host == ranks
    plan = operator.plan(Request(ranks, 2, name, symmetric=True, remote_reads=reads))
    return "comm" in plan.lanes[0]
