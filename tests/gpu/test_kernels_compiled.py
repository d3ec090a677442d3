"""Every kernel compiled for NVIDIA's and AMD's GPUs without one, and properties of the assembly."""

import os
import re
from collections import Counter
from typing import NamedTuple

import pytest

pytest.importorskip("triton", "3.6")
from support.compiled import SHARED, TARGETS, Compiled, build

from weft.gpu.kernels.all_gather import KERNELS, VECTOR, Access, tile_layout
from weft.gpu.kernels.all_gather_matmul import all_gather_matmul_kernel, sizes
from weft.gpu.kernels.clock import stamp_kernel
from weft.gpu.kernels.copy_rows import TILE, copy_vectors_kernel, copy_words_kernel
from weft.gpu.kernels.signals import compare_kernel, raise_kernel
from weft.gpu.kernels.stream_signals import wait_kernel
from weft.gpu.kernels.sum_in_rank_order import sum_in_rank_order_kernel
from weft.plan import Launch
from weft.schedules.device_options import TILES, Tile

QUICK = ("sm_90",)
"""The target of the fast tests; the slow ones compile for all."""
pytestmark = pytest.mark.parametrize(
    "target",
    [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in TARGETS],
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))


GATHER = {
    "bases": "*i64",
    "counters": "*i64",
    "counter_bases": "*i64",
    "base": "*i64",
    "tickets": "*i32",
    "timeout_record": "*i64",
    **dict.fromkeys(("size", "place", "row", "shard_stride", "gathered_stride"), "i32"),
    **dict.fromkeys(("opened", "awaited", "count", "arrived"), "i32"),
    **dict.fromkeys(("idle", "rank"), "i32"),
    "limit": "i64",
}


def loops(assembly: str) -> list[str]:
    """The bodies of innermost loops: from a label to a jump back to it, without another such label
    in between.
    """
    lines, found, labels = assembly.splitlines(), [], {}
    for at, line in enumerate(lines):
        if label := re.match(r"([$.]L\w+):", line):
            labels[label.group(1)] = at
        jump = re.search(r"(?:\bbra(?:\.uni)?|s_cbranch_\w+|s_branch)\s+([$.]L\w+)", line)
        if jump and jump.group(1) in labels:
            found.append("\n".join(lines[labels[jump.group(1)] : at]))
    return found


class Patterns(NamedTuple):
    """Regular expressions of instructions in the assembly of a vendor's GPUs."""

    load: dict[int, str]  # by the bytes of an access, as the next
    store: dict[int, str]
    any_load: str
    any_store: str
    poll: str
    acquire: str
    barrier: str
    notify: list[str]


NVIDIA = Patterns(
    load={16: r"ld\.global\.v4\.b32", 8: r"ld\.global\.b64", 1: r"ld\.global\.b8"},
    store={16: r"st\.global\.v4\.b32", 8: r"st\.global\.b64", 1: r"st\.global\.b8"},
    any_load=r"\bld\.\S*global",
    any_store=r"\bst\.\S*global",
    poll=r"ld\.global\.sys\.relaxed\.b64",
    acquire=r"ld\.global\.sys\.acquire\.b64",
    barrier=r"bar\.sync",
    notify=[
        r"bar\.sync",
        r"atom\.global\.gpu\.acq_rel\.add",
        r"bar\.sync",
        r"(?:atom|red)\.global\.sys\.release\.add\.u64",
        r"ld\.global\.sys\.acquire\.b64",
        r"bar\.sync",
    ],
)
WRITTEN_BACK = r"buffer_wbl2 sc0 sc1\n\s+s_waitcnt vmcnt\(0\)"
"""By each warp before the barrier: Triton 3.6 compiles a release to ``buffer_wbl2`` alone, directly
followed by the atomic, which does not wait for it.
"""
AMD = Patterns(
    load={16: "global_load_dwordx4", 8: "global_load_dwordx2", 1: "global_load_ubyte"},
    store={16: "global_store_dwordx4", 8: "global_store_dwordx2", 1: "global_store_byte"},
    any_load=r"(?:global|flat|buffer)_load\w*",
    any_store=r"(?:global|flat|buffer)_store\w*",
    poll=r"global_(?:load_dwordx2|atomic_add_x2) .* sc0 sc1\n",  # by Triton 3.6, and by 3.9
    acquire="buffer_inv sc0 sc1",
    barrier="s_barrier",
    notify=[
        WRITTEN_BACK,
        "s_barrier",
        "buffer_wbl2 sc1",
        "global_atomic_add v",
        WRITTEN_BACK,
        "s_barrier",
        "buffer_wbl2 sc0 sc1",
        "global_atomic_add_x2",
        "buffer_inv sc0 sc1",
    ],
)


def assert_in_order(steps: list[str], assembly: str) -> None:
    """Find instructions of these patterns in this order."""
    at = 0
    for step in steps:
        found = re.compile(step).search(assembly, at)
        assert found, f"no {step} where it should be"
        at = found.end()


def gather(target: str, access: Access, launch: Launch) -> Compiled:
    """The all-gather of 8 ranks by these accesses."""
    _, tile, warps, gluon = launch
    word = f"*i{8 * access.width // access.words}"
    return build(
        KERNELS[gluon, access.width == VECTOR],
        {"shard": word, "segment": word, **GATHER},
        {
            "RANKS": 8,
            "TILE": tile // VECTOR * access.words,
            "WORDS": access.words,
            "ROWS": access.rows,
            "LONG": False,
            "LAYOUT": tile_layout(access, TARGETS[target].warp_size, warps) if gluon else None,
        },
        target,
        unaligned=() if access.width == VECTOR else ("shard", "segment"),
        num_warps=warps,
    )


@pytest.mark.slow
@pytest.mark.parametrize("warps", [8, 32])
def test_the_largest_tile_of_an_all_gather_fits_in_the_registers(target: str, warps: int) -> None:
    if warps * TARGETS[target].warp_size > 1024:
        pytest.skip("more threads than a program may have")
    for rows in (False, True):
        launch = Launch(tile_bytes=1 << 16, warps=warps)
        assert gather(target, Access(VECTOR, rows), launch).spills == 0


DEFAULT_TILE = Launch().tile_bytes


@pytest.mark.parametrize(
    ("access", "gluon", "tile"),
    [
        (Access(VECTOR, rows=False), False, DEFAULT_TILE),
        pytest.param(Access(VECTOR, rows=False), True, DEFAULT_TILE, marks=pytest.mark.slow),
        pytest.param(Access(VECTOR, rows=True), False, DEFAULT_TILE, marks=pytest.mark.slow),
        (Access(VECTOR, rows=True), True, DEFAULT_TILE),
        (Access(VECTOR, rows=False), True, DEFAULT_TILE // 4),
        (Access(VECTOR, rows=False), True, DEFAULT_TILE // 2),
        (Access(8, rows=False), True, DEFAULT_TILE),
        (Access(1, rows=True), False, DEFAULT_TILE),
    ],
    ids=str,
)
def test_all_gather(target: str, access: Access, gluon: bool, tile: int) -> None:
    """In the loop over tiles all accesses have the same width: one load and a store for each rank
    of each of a thread's vectors, all loads before the first store. Only rows that are not
    contiguous need divisions, of 32 bits.

    After the loop synchronize all threads, then all programs, then the peers; and a wait reads
    memory in every poll.
    """
    launch = Launch(gluon=gluon, tile_bytes=tile)
    vectors = launch.tile_bytes // VECTOR
    made = gather(target, access, launch)
    patterns, every = NVIDIA if target.startswith("sm") else AMD, loops(made.assembly)
    load, store = patterns.load[access.width], patterns.store[access.width]
    per_thread = vectors // (launch.warps * TARGETS[target].warp_size)
    tiles = [loop for loop in every if len(re.findall(store, loop)) >= 8 * per_thread]
    body = min(tiles, key=len)
    for pattern, number in (
        (load, per_thread),
        (patterns.any_load, per_thread),
        (store, 8 * per_thread),
        (patterns.any_store, 8 * per_thread),
    ):
        assert len(re.findall(pattern, body)) == number, pattern
    assert [*re.finditer(load, body)][-1].start() < re.search(store, body).start()
    # by a reciprocal that is computed before the loop, on AMD's
    assert (made.count(r"div\.s32|v_rcp_iflag_f32") > 0) == access.rows
    assert made.count(r"(?:div|rem)\.s64|v_rcp_f32") == 0
    assert any(re.search(patterns.poll, loop) for loop in every)
    assert_in_order(patterns.notify, made.assembly[made.assembly.index(body) + len(body) :])
    assert made.spills == 0


WIDTHS = {
    "b8": 1, "b16": 2, "b32": 4, "b64": 8, "v2.b32": 8, "v4.b32": 16,  # NVIDIA's
    "short": 2, "short_d16_hi": 2, "dword": 4, "dwordx2": 8, "dwordx4": 16,  # AMD's
}  # fmt: skip
"""Bytes of stores by their names in the assembly."""


def stores(made: Compiled) -> Counter[int]:
    """The number of stores to global memory in a kernel by their bytes."""
    names = re.findall(r"\bst\.global\.(\S+)|global_store_(\w+)", made.assembly)
    return Counter(WIDTHS[one or other] for one, other in names)


def multiplies(made: Compiled, target: str) -> None:
    """Tiles are multiplied by matrix instructions, read by TMA if the GPU has it, and kept in
    registers.
    """
    instruction = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(target, "v_mfma_f32_")
    assert any(instruction in loop for loop in loops(made.assembly))
    assert made.count(r"cp\.async\.bulk\.tensor\.2d") > 0 or not target.startswith("sm")
    assert made.spills == 0
    assert made.shared <= SHARED[target]


TYPES = {
    "out_bases": "*i64",
    "tiles": "*i32",
    "waits": "*i64",
    "notifies": "*i32",
    "tickets": "*i32",
    "times": "*i64",
    "counters": "*i64",
    "counter_bases": "*i64",
    "base": "*i64",
    "timeout_record": "*i64",
    **dict.fromkeys(("first", "number", "links", "rank", "N", "stride"), "i32"),
    "limit": "i64",
}


BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def product(
    target: str,
    factor: str,
    out: str,
    tile: Tile | None = None,
    wide: bool = True,
    own_tile: Tile | None = None,
    **flags: bool,
) -> Compiled:
    """The product kernel with the sizes of its users, for factors and results of these dtypes;
    `wide`: rows of the result begin and end at multiples of 16 bytes. Its stores are checked.
    """
    nvidia = target.startswith("sm")
    of_any = sizes(tile, not nvidia, factor == "fp32")
    own = sizes(own_tile or tile, not nvidia, factor == "fp32")
    m, n, k, _, stages, sliced = of_any
    warps = max(of_any.warps, own.warps)

    def factors(m: int, n: int) -> tuple[str, str]:
        weight = f"{n},{k}" if flags.get("TRANSPOSED") else f"{k},{n}"
        return f"tensordesc<{factor}[{m},{k}]>", f"tensordesc<{factor}[{weight}]>"

    types = {
        **dict(zip(("own", "own_weight"), factors(own.m, own.n), strict=True)),
        **dict(zip(("x", "weight"), factors(m, n), strict=True)),
        "bias": f"*{out}",
        "out": f"*{out}",
        **TYPES,
    }
    flags = dict.fromkeys(("PUTS", "NOTIFIES", "TRANSPOSED", "BIAS"), False) | flags
    constants = {
        "K": 4096,
        "SOURCES": 2,
        "TRACE": False,
        "VECTOR": 16 // BYTES[out] if wide else 1,
        "SLICED": sliced,
        "OWN_M": own.m,
        "OWN_N": own.n,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "FENCE": nvidia,
        **flags,
    }
    options = {"num_warps": warps, "num_stages": stages}
    unaligned = ("bias", "out")
    made = build(all_gather_matmul_kernel, types, constants, target, (), unaligned, **options)
    # AMD's compiler leaves elements in the threads that have computed them, so that some of its
    # stores have 8 bytes; as have those of a timeout.
    elements = own.m * own.n + (constants["SOURCES"] - 1) * m * n
    found, per_thread = stores(made), elements // (warps * TARGETS[target].warp_size)
    if not wide:
        assert found[BYTES[out]] == per_thread
    elif nvidia:
        assert found[16] == per_thread * BYTES[out] // 16
    assert not wide or {*found} <= {8, 16}
    return made


def clock(target: str) -> str:
    """What reads the clock in the assembly."""
    return "%globaltimer" if target.startswith("sm") else "s_memrealtime"


@pytest.mark.parametrize(
    ("tile", "own_tile"), [((64, 128), (128, 128)), ((128, 128), (64, 64))], ids=str
)
def test_own_rows_have_tiles_of_their_own(target: str, tile: Tile, own_tile: Tile) -> None:
    for transposed in (False, True):
        made = product(target, "bf16", "bf16", tile, own_tile=own_tile, TRANSPOSED=transposed)
        multiplies(made, target)


@pytest.mark.parametrize("transposed", [False, True])
def test_all_gather_matmul(target: str, transposed: bool) -> None:
    made = product(target, "fp16", "fp16", TRANSPOSED=transposed, BIAS=True)
    multiplies(made, target)
    assert made.assembly.count(clock(target)) == 3 * 2, "by the wait before tiles of each source"
    # rows that a wait has seen arrive are not read by TMA before the fence
    if target.startswith("sm"):
        fence = made.assembly.index("fence.proxy.async.global")
        assert (
            made.assembly.index("ld.global.sys.acquire.b64")
            < fence
            < made.assembly.index("cp.async.bulk.tensor.2d")
        )


@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_rows_of_a_result_may_begin_anywhere(target: str, out: str) -> None:
    """Then elements are stored one by one, from registers too."""
    multiplies(product(target, "bf16", out, wide=False, BIAS=True), target)


@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_products_are_put(target: str, products: str) -> None:
    made = product(target, "bf16", products, SOURCES=1, PUTS=True, NOTIFIES=True)
    multiplies(made, target)
    # from the last store of a tile to the notify of the peer
    assert_in_order(NVIDIA.notify[:4] if target.startswith("sm") else AMD.notify[:8], made.assembly)


def test_a_traced_product_reads_the_clock_of_the_gpu(target: str) -> None:
    """Three times for each tile, besides the reads of waits."""
    made = product(target, "fp16", "fp16", TRACE=True)
    multiplies(made, target)
    assert made.assembly.count(clock(target)) == (3 + 3) * 2, "for tiles of each source"


def test_products_of_float32(target: str) -> None:
    made = product(target, "fp32", "fp32")
    assert made.spills == 0
    assert made.shared <= SHARED[target]


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "out"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")])
@pytest.mark.parametrize("tile", TILES)
def test_every_tile(target: str, tile: Tile, factor: str, out: str) -> None:
    """Each tile that the options accept compiles without spills, and fits in shared memory."""
    wide = factor == "fp32"
    try:
        sizes(tile, not target.startswith("sm"), wide)
    except ValueError:
        pytest.skip("rejected here")
    for flags in (
        {"BIAS": True},
        {"BIAS": True, "wide": False},
        {"TRANSPOSED": True},
        {"SOURCES": 1, "PUTS": True, "NOTIFIES": True},
    ):
        made = product(target, factor, out, tile, **flags)
        if wide:
            assert made.spills == 0
            assert made.shared <= SHARED[target]
        else:
            multiplies(made, target)


def test_sum_in_rank_order(target: str) -> None:
    types = {"parts": "*bf16", "steps": "*i64", "out": "*bf16", "size": "i32", "idle": "i32"}
    constants = {"PARTS": 4, "BLOCK": 2048, "AVERAGE": True}
    made = build(sum_in_rank_order_kernel, types, constants, target, ("size",), num_warps=4)
    wide = max(
        loops(made.assembly),
        key=lambda loop: len(re.findall(r"ld\.global\.v4|global_load_dwordx4", loop)),
    )
    assert len(re.findall(r"ld\.global\.v4|global_load_dwordx4", wide)) == 4 * 2048 // 8 // (
        4 * TARGETS[target].warp_size
    )
    assert made.spills == 0


SIZES = dict.fromkeys(("units", "size", "dst_stride", "src_stride"), "i64")


def test_copies_of_vectors(target: str) -> None:
    """Rows with gaps and without move 16 bytes at a time, and all of a tile are loaded before the
    first is stored.
    """
    types = {"dst": "*i32", "src": "*i32", **SIZES}
    made = build(copy_vectors_kernel, types, {"WORDS": 4, "TILE": TILE}, target, num_warps=8)
    patterns = NVIDIA if target.startswith("sm") else AMD
    per_thread = TILE // 8 // TARGETS[target].warp_size
    for wide, every in (
        (patterns.load[16], patterns.any_load),
        (patterns.store[16], patterns.any_store),
    ):
        assert made.count(wide) == made.count(every) == 2 * per_thread, every
    order = re.findall(f"{patterns.load[16]}|{patterns.store[16]}", made.assembly)
    loaded, stored = [order[0]] * per_thread, [order[-1]] * per_thread
    assert order == (loaded + stored) * 2
    assert made.spills == 0


@pytest.mark.parametrize("word", ["i8", "i16", "i32", "i64"])
def test_copies_of_words(target: str, word: str) -> None:
    types = {"dst": f"*{word}", "src": f"*{word}", **SIZES}
    made = build(copy_words_kernel, types, {"WORDS": 1, "TILE": TILE}, target, num_warps=8)
    assert made.spills == 0


SELECTION = dict.fromkeys(("start", "count", "step"), "i32")


def test_signals_are_raised(target: str) -> None:
    """After a barrier, by releases that all GPUs and the host see."""
    others = {"rank": "i32", "peer": "i32", "value": "i64", "replaces": "i32"}
    types = {"counters": "*i64", "bases": "*i64", **SELECTION, **others}
    made = build(raise_kernel, types, {}, target, num_warps=1)
    if target.startswith("sm"):
        raised = r"(?:atom|red)\S*\.sys\S*\.release\.(?:add|exch)|(?:atom|red)\S*release\.sys"
        assert_in_order([raised], made.assembly)
    else:
        before, *raised = re.split(r"global_atomic_(?:add|swap)_x2", made.assembly)
        assert len(raised) == 2
        assert_in_order([WRITTEN_BACK], before)
    assert made.spills == 0


def test_a_wait_polls_without_order_and_acquires_once(target: str) -> None:
    """Polls read memory that the whole system shares, time limits the clock; what follows the wait
    follows an acquire that follows the last poll.
    """
    types = {"counters": "*i64", "index": "i32", "base": "*i64", "count": "i32"}
    types |= {"timeout_record": "*i64", "limit": "i64"}
    patterns = NVIDIA if target.startswith("sm") else AMD
    for warps in (1, 8):  # of one warp the compiler leaves out barriers that the GPU does not need
        made = build(wait_kernel, types, {}, target, num_warps=warps)
        polling = [loop for loop in loops(made.assembly) if re.search(patterns.poll, loop)]
        assert not any(re.search(patterns.acquire, loop) for loop in polling)
        assert any(clock(target) in loop for loop in polling)
        after = max(made.assembly.index(loop) + len(loop) for loop in polling)
        barrier = [patterns.barrier] if warps > 1 else []
        assert_in_order([patterns.acquire, *barrier], made.assembly[after:])
        assert made.spills == 0


def test_signals_are_waited_for(target: str) -> None:
    """Each poll reads memory, and one that satisfies a comparison, of unsigned numbers, is followed
    by an acquire.
    """
    others = {"comparison": "i32", "value": "i64", "first": "i32", "limit": "i64"}
    types = {"counters": "*i64", "timeout_record": "*i64", **SELECTION, **others}
    made = build(compare_kernel, types, {}, target, num_warps=1)
    patterns = NVIDIA if target.startswith("sm") else AMD
    polling = [loop for loop in loops(made.assembly) if re.search(patterns.poll, loop)]
    assert_in_order([patterns.poll, patterns.acquire], polling[0])
    assert any(clock(target) in loop for loop in polling)
    assert made.count(r"set\S*\.(?:[gl][te]|hi|lo)\.u64|v_cmp_\w+_u64|s_cmp_\w+_u64") > 0
    assert made.spills == 0


def test_a_stamp_is_one_read_of_the_clock_and_one_store(target):
    patterns = NVIDIA if target.startswith("sm") else AMD
    made = build(stamp_kernel, {"times": "*i64", "index": "i32"}, {}, target, num_warps=1)
    assert made.assembly.count(clock(target)) == 1
    assert made.count(patterns.any_store) == 1
