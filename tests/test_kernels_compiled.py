"""Every kernel compiled for NVIDIA's and AMD's GPUs without one, and what must be seen in the assembly."""

import os
import re
from typing import NamedTuple

import pytest

pytest.importorskip("triton")
from compiled import TARGETS, Compiled, build

from weft.kernels.all_gather import all_gather_kernel
from weft.kernels.all_gather_gluon import all_gather_gluon_kernel
from weft.kernels.all_gather_matmul import all_gather_matmul_kernel
from weft.kernels.matmul_put import matmul_put_kernel
from weft.kernels.sum_in_rank_order import sum_in_rank_order_kernel

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


def test_all_gather(target: str) -> None:
    made = build(all_gather_kernel, GATHER, {"RANKS": 8, "TILE": 4096}, target, num_warps=4)
    gathers(made, target, 8, 4096 // 4 // (4 * TARGETS[target].warp_size))


def test_all_gather_gluon(target: str) -> None:
    lanes = TARGETS[target].warp_size
    made = build(all_gather_gluon_kernel, GATHER, {"RANKS": 8, "TILE": 4096, "LANES": lanes}, target, num_warps=4)
    gathers(made, target, 8, 4096 // 4 // (4 * lanes))


def multiplies(made: Compiled, target: str) -> None:
    """Tiles are multiplied by matrix instructions, read by TMA where there is one, kept in registers and stored 16 bytes at a time."""
    instruction = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(target, "v_mfma_f32_")
    assert any(instruction in loop for loop in loops(made.assembly))
    assert made.count(r"cp\.async\.bulk\.tensor\.2d") > 0 or not target.startswith("sm")
    assert made.count(NVIDIA.store if target.startswith("sm") else AMD.store) > 0
    assert made.spills == 0


def blocks(target: str, transposed: bool = False, products: str = "fp16") -> tuple[dict[str, str], dict[str, int], dict[str, int]]:
    """Descriptors, sizes of tiles and options as the kernels' users have them, by the dtype of the products."""
    n, k, stages = (256, 64, 3) if target.startswith("sm") else (128, 32, 2)
    n = 128 if products == "fp32" else n
    weight = f"{n},{k}" if transposed else f"{k},{n}"
    sizes = {"BLOCK_M": 128, "BLOCK_N": n, "BLOCK_K": k, "TRANSPOSED": transposed, "K": 4096}
    return (
        {"x": f"tensordesc<fp16[128,{k}]>", "weight": f"tensordesc<fp16[{weight}]>"},
        sizes,
        {"num_warps": 8, "num_stages": stages},
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_all_gather_matmul(target: str, transposed: bool) -> None:
    descriptors, sizes, options = blocks(target, transposed=transposed)
    types = {"bias": "*fp16", "out": "*fp16", "tiles": "*i32", "waits": "*i64", "number": "i32", "counters": "*i64"}
    types |= {"base": "*i64", "ledger": "*i64", "polls": "i32", "N": "i32", "stride": "i32"}
    nvidia = target.startswith("sm")
    constants = {**sizes, "FENCE": nvidia, "BIAS": True}
    made = build(all_gather_matmul_kernel, descriptors | types, constants, target, ("N", "stride"), **options)
    multiplies(made, target)
    if nvidia:  # what a wait has seen come is not read by TMA before the fence
        fence = made.assembly.index("fence.proxy.async.global")
        assert made.assembly.index("ld.global.sys.acquire.b64") < fence < made.assembly.index("cp.async.bulk.tensor.2d")


@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_matmul_put(target: str, products: str) -> None:
    descriptors, sizes, options = blocks(target, products=products)
    types = {"inbox": f"*{products}", "inbox_bases": "*i64", "tiles": "*i32", "totals": "*i32", "number": "i32", "counters": "*i64"}
    types |= {
        "counter_bases": "*i64",
        "calls": "*i64",
        "tickets": "*i32",
        "ledger": "*i64",
        "rank": "i32",
        "polls": "i32",
        "N": "i32",
    }
    made = build(matmul_put_kernel, descriptors | types, {**sizes, "RANKS": 4}, target, ("N",), **options)
    multiplies(made, target)
    at = 0
    for step in NVIDIA.tell[:4] if target.startswith("sm") else AMD.tell[:6]:  # from the last store of a tile to the peer
        at = made.assembly.find(step, at) + 1
        assert at, f"no {step} where it should be"


def test_sum_in_rank_order(target: str) -> None:
    types = {"inbox": "*bf16", "bias": "*bf16", "out": "*bf16", "counters": "*i64", "calls": "*i64", "ledger": "*i64"}
    types |= {"size": "i64", "pitch": "i64", "N": "i32", "share": "fp32", "polls": "i32"}
    made = build(
        sum_in_rank_order_kernel, types, {"RANKS": 4, "BLOCK": 2048, "BIAS": False}, target, ("size", "pitch", "N"), num_warps=4
    )
    wide = max(loops(made.assembly), key=lambda loop: len(re.findall(r"ld\.global\.v4|global_load_dwordx4", loop)))
    assert len(re.findall(r"ld\.global\.v4|global_load_dwordx4", wide)) == 4 * 2048 // 8 // (4 * TARGETS[target].warp_size)
    assert made.spills == 0
