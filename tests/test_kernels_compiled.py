"""Every kernel compiled for NVIDIA's and AMD's GPUs without one, and what must be seen in the assembly."""

import os
import re
from typing import NamedTuple

import pytest

pytest.importorskip("triton")
from compiled import TARGETS, Compiled, build

from weft.kernels.all_gather import all_gather_kernel
from weft.kernels.all_gather_gluon import all_gather_gluon_kernel

pytestmark = pytest.mark.parametrize("target", TARGETS)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))


GATHER = {
    "shard": "*i32",
    "gathered": "*i32",
    "gathered_bases": "*i64",
    "counters": "*i64",
    "counter_bases": "*i64",
    "calls": "*i64",
    "tickets": "*i32",
    "ledger": "*i64",
    "vectors": "i64",
    "rank": "i32",
    "polls": "i32",
}


def loops(assembly: str) -> list[str]:
    """The bodies of innermost loops: from a label to a jump back to it, without another label that is jumped back to."""
    lines, found, labels = assembly.splitlines(), [], {}
    for at, line in enumerate(lines):
        if label := re.match(r"([$.]L\w+):", line):
            labels[label.group(1)] = at
        jump = re.search(r"(?:\bbra(?:\.uni)?|s_cbranch_\w+|s_branch)\s+([$.]L\w+)", line)
        if jump and jump.group(1) in labels:
            found.append("\n".join(lines[labels[jump.group(1)] : at]))
    return found


class Words(NamedTuple):
    """What instructions are called in the assembly of a maker's GPUs."""

    load: str
    store: str
    any_load: str
    any_store: str
    poll: str
    tell: list[str]


NVIDIA = Words(
    load=r"ld\.global\.v4\.b32",
    store=r"st\.global\.v4\.b32",
    any_load=r"\bld\.\S*global",
    any_store=r"\bst\.\S*global",
    poll=r"ld\.global\.sys\.acquire\.b64",
    tell=[
        "bar.sync",
        "atom.global.gpu.acq_rel.add",
        "bar.sync",
        "atom.global.sys.release.add.u64",
        "ld.global.sys.acquire.b64",
        "bar.sync",
    ],
)
AMD = Words(
    load="global_load_dwordx4",
    store="global_store_dwordx4",
    any_load=r"(?:global|flat|buffer)_load\w*",
    any_store=r"(?:global|flat|buffer)_store\w*",
    poll=r"global_load_dwordx2 .* sc0 sc1\n",
    tell=[
        "s_barrier",
        "buffer_wbl2 sc1",
        "global_atomic_add v",
        "s_barrier",
        "buffer_wbl2 sc0 sc1",
        "global_atomic_add_x2",
        "buffer_inv sc0 sc1",
    ],
)


def gathers(made: Compiled, target: str, ranks: int, per_thread: int) -> None:
    """In the loop over tiles all accesses are of 16 bytes: one load and `ranks` stores for each of a thread's 16 bytes.

    After it come all threads, then all programs, then the peers; and a wait reads memory every time it looks.
    """
    words, every = NVIDIA if target.startswith("sm") else AMD, loops(made.assembly)
    tiles = [loop for loop in every if re.search(words.load, loop)]
    assert tiles
    body = max(tiles, key=len)
    assert len(re.findall(words.load, body)) == len(re.findall(words.any_load, body)) == per_thread
    assert len(re.findall(words.store, body)) == len(re.findall(words.any_store, body)) == per_thread * ranks
    assert any(re.search(words.poll, loop) for loop in every)
    at = made.assembly.index(body) + len(body)
    for step in words.tell:
        at = made.assembly.find(step, at) + 1
        assert at, f"no {step} where it should be"
    assert made.spills == 0


@pytest.mark.parametrize("ranks", [2, 8])
def test_all_gather(target: str, ranks: int) -> None:
    made = build(all_gather_kernel, GATHER, {"RANKS": ranks, "TILE": 4096}, target, num_warps=4)
    gathers(made, target, ranks, 4096 // 4 // (4 * TARGETS[target].warp_size))


def test_all_gather_gluon(target: str) -> None:
    lanes = TARGETS[target].warp_size
    made = build(all_gather_gluon_kernel, GATHER, {"RANKS": 8, "TILE": 4096, "LANES": lanes}, target, num_warps=4)
    gathers(made, target, 8, 4096 // 4 // (4 * lanes))
