"""Rows that travel compressed between hosts, here hosts of one process over the loopback."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.over_hosts import FUSED

import weft
from weft.kernels.compression import DTYPES, rounded
from weft.plan import Copy
from weft.plan.compression import BLOCK, compressed
from weft.plan.messages import lower_to_messages

PLACES = [(0, 1), (0, 0, 1), (0, 1, 2)]
places = pytest.mark.parametrize("hosts", PLACES, ids=["01", "001", "012"])
HALF_OF_A_STEP = 1 / 128  # of the largest number of a block


def on(hosts, call):
    with weft.local_world(len(hosts), hosts=hosts, timeout=20) as local:
        return local.run(call)


def rows_of(rank, count, columns, dtype):
    own = torch.Generator().manual_seed(rank)  # ranks are threads
    powers = torch.randint(-9, 6, (count, columns), generator=own)
    return torch.ldexp(torch.randn(count, columns, generator=own), powers).to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@places
@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16", "float32"])
def test_every_algorithm_gathers_rows_of_other_hosts_rounded_once(hosts, dtype):
    """A product by the identity has the numbers of the gathered rows."""
    ranks = len(hosts)

    def call():
        here = hosts[weft.init().rank]
        for counts, columns in (([70] * ranks, 64), ([3, 0, 41][:ranks], 33), ([1] * ranks, 1)):
            every = [rows_of(r, n, columns, dtype) for r, n in enumerate(counts)]
            exact = torch.cat(
                [x if h == here else rounded(x) for x, h in zip(every, hosts, strict=True)]
            )
            for algorithm in ("push", "ring", "sequential", "auto"):
                made, kept = weft.all_gather_matmul(
                    every[weft.init().rank],
                    torch.eye(columns, dtype=dtype),
                    compress="int8",
                    algorithm=algorithm,
                    shard_rows=counts,
                    return_gathered=True,
                )
                assert torch.equal(kept, exact), algorithm
                assert torch.equal(made, exact), algorithm

    on(hosts, call)


@places
def test_sums_of_other_hosts_arrive_rounded(hosts):
    ranks, columns = len(hosts), 40

    def call():
        world = weft.init()
        every = [rows_of(r, 6 * ranks, columns, torch.float32) for r in range(ranks)]
        here, own = hosts[world.rank], slice(6 * world.rank, 6 * world.rank + 6)
        exact = torch.zeros(6, columns)
        for host in dict.fromkeys(hosts):
            terms = [x[own] for x, h in zip(every, hosts, strict=True) if h == host]
            if host == here:
                for term in terms:
                    exact = exact + term
            else:
                exact = exact + rounded(sum(terms[1:], terms[0]))
        for algorithm in ("push", "sequential"):
            made = weft.matmul_reduce_scatter(
                every[world.rank], torch.eye(columns), compress="int8", algorithm=algorithm
            )
            assert torch.equal(made, exact), algorithm
        ring = weft.matmul_reduce_scatter(
            every[world.rank], torch.eye(columns), compress="int8", algorithm="ring"
        )
        # a running sum passes at most twice as many links as there are hosts
        largest = sum(x[own].abs() for x in every).amax(1, keepdim=True)
        steps = 2 * len({*hosts}) * HALF_OF_A_STEP
        assert ((ring - sum(x[own] for x in every)).abs() <= steps * largest).all()

    on(hosts, call)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70),
)
def test_a_rounded_number_is_near_and_is_rounded_once(dtype, numbers):
    x = torch.tensor([numbers]).to(dtype)
    x = torch.where(x.isfinite(), x, 1.0).to(dtype)
    once = rounded(x)
    assert torch.equal(rounded(once), once)
    for block, near in zip(x.split(BLOCK, 1), once.split(BLOCK, 1), strict=True):
        bound = max(block.abs().max().double() * HALF_OF_A_STEP, 2**-127)
        assert (near.double() - block.double()).abs().max() <= bound


def test_extreme_numbers_travel_as_the_reference_rounds_them():
    """The largest numbers, subnormal ones, halves of a step, infinities, NaNs and zeros."""

    def call():
        rank = weft.init().rank
        for dtype in DTYPES:
            of = torch.finfo(dtype)
            rows = torch.zeros(8, 70, dtype=dtype)
            rows[0] = torch.tensor([of.max, -of.max, of.max / 2, 1.0, 0.0] * 14).to(dtype)
            rows[1] = torch.tensor([of.tiny, -of.smallest_normal, 0, of.eps, 1.0] * 14).to(dtype)
            rows[2, ::3] = of.smallest_normal / 2
            rows[3] = torch.arange(70) + 0.5
            rows[4, 5], rows[4, 40] = torch.inf, 2.0
            rows[5, 69] = torch.nan
            rows[6] = -0.0
            rows[7] = 127.75
            _, kept = weft.all_gather_matmul(
                rows, torch.zeros(70, 1, dtype=dtype), compress="int8", return_gathered=True
            )
            arrived, exact = kept.view(2, 8, 70)[1 - rank], rounded(rows)
            assert torch.equal(arrived.isnan(), exact.isnan())
            assert torch.equal(arrived.nan_to_num(), exact.nan_to_num())
            assert exact[4, :32].isnan().all()
            assert exact[4, 32:].isfinite().all()

    on((0, 1), call)


@pytest.mark.parametrize("name", [n for n in FUSED if not n.startswith("matmul_all_reduce")])
@places
def test_plans_are_proved_and_executed_by_the_reference(name, hosts):
    plan = compressed(FUSED[name](hosts, 2), hosts, "int8")
    lowered = lower_to_messages(plan, hosts)
    weft.verify(lowered)
    between = [i for _, i in lowered.instructions() if isinstance(i, Copy)]
    assert {i.compress for i in between if hosts[i.src.rank] != hosts[i.dst.rank]} == {"int8"}
    assert {i.compress for i in between if hosts[i.src.rank] == hosts[i.dst.rank]} <= {""}


def test_explain_names_the_compression_between_hosts():
    def call():
        return weft.explain(torch.ones(64, 4), torch.eye(4), compress="int8")

    assert all("rows per transfer, as int8 between hosts: " in text for text in on((0, 1), call))
    assert all("int8" not in text for text in on((0, 0), call))


def test_ranks_of_one_host_exchange_rows_as_they_are():
    def call():
        a = torch.randn(4, 40)
        b = torch.randn(40, 8)
        plain, same = weft.all_gather_matmul(a, b), weft.all_gather_matmul(a, b, compress="int8")
        assert torch.equal(plain, same)

    with weft.local_world(2) as local:
        local.run(call)


def test_gradients_travel_compressed_too():
    def call():
        rank = weft.init().rank
        a = rows_of(rank, 4, 64, torch.float32).requires_grad_()
        b = torch.eye(64).requires_grad_()
        weft.all_gather_matmul(a, b, compress="int8").backward(rows_of(9 + rank, 8, 64, a.dtype))
        own, other = (
            rows_of(9 + r, 8, 64, a.dtype)[4 * rank : 4 * rank + 4] for r in (rank, 1 - rank)
        )
        assert torch.equal(a.grad, own + rounded(other))

    on((0, 1), call)


def test_compressed_calls_of_some_ranks_are_another_call():
    def call():
        world = weft.init()
        how = "int8" if world.rank else None
        with pytest.raises(weft.MismatchError, match="all_gather_matmul"):
            weft.all_gather_matmul(torch.ones(4, 4), torch.eye(4), compress=how)

    on((0, 1), call)


def test_what_cannot_be_compressed_is_refused():
    with weft.local_world(2) as local:

        def call():
            a, b = torch.ones(4, 4), torch.eye(4)
            with pytest.raises(ValueError, match="no compression 'int4'; choose int8"):
                weft.all_gather_matmul(a, b, compress="int4")
            with pytest.raises(TypeError, match="these are float64: omit compress"):
                weft.matmul_reduce_scatter(a.double(), b.double(), compress="int8")

        local.run(call)
