"""Weights that are no tensors: functions, and int8 with scales, in every fused operator."""

import itertools

import pytest
import torch
from support.ranks import on_ranks

import weft
from weft.engines.reference import Call, run
from weft.kernels.int8 import _EXACT, INT8_PRODUCT, Int8Weight, exact_sums, quantized
from weft.plan import Buffer, Compute, Copy, Notify, Plan, Region, Signal, Wait
from weft.plan.values import Applied, Term

ALGORITHMS = {
    "all_gather_matmul": ("direct", "push", "pull", "ring", "sequential", "auto"),
    "matmul_reduce_scatter": ("direct", "push", "put", "ring", "sequential", "auto"),
    "matmul_all_reduce": ("one_shot", "two_shot", "push", "put", "ring", "sequential", "auto"),
}
ROWS, K, N = 96, 24, 10


def whole_numbers(seed, *shape, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=random).to(dtype)


def expected(name, world, inputs, weights):
    if name == "all_gather_matmul":
        return torch.cat(inputs) @ weights[world.rank]
    total = sum(a @ b for a, b in zip(inputs, weights, strict=True))
    if name == "matmul_all_reduce":
        return total
    return total.chunk(world.ranks)[world.rank]


def functions(world, dtype):
    """Every operator and algorithm multiplies by a function, in parts of a multiple of rows."""
    inputs = [whole_numbers(r, ROWS, K, dtype=dtype) for r in range(world.ranks)]
    weights = [whole_numbers(10 + r, K, N, dtype=dtype) for r in range(world.ranks)]
    bias, parts = torch.arange(N, dtype=dtype), []

    def product(rows, out):
        assert rows.shape[1] == K
        assert out.shape == (len(rows), N)
        parts.append(len(rows))
        out.copy_(rows @ weights[world.rank])

    b = weft.weight(product, (K, N), dtype, rows_multiple=16)
    for name, algorithms in ALGORITHMS.items():
        operator, wanted = getattr(weft, name), expected(name, world, inputs, weights)
        for algorithm in algorithms:
            for _ in range(3):
                parts.clear()
                got = operator(inputs[world.rank], b, bias=bias, algorithm=algorithm, chunk_rows=8)
                assert torch.equal(got, wanted + bias), (name, algorithm)
                assert all(part % 16 == 0 for part in parts), (name, algorithm, parts)
    assert "b is a function" in weft.explain(inputs[0], b)


@pytest.mark.data
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_functions_are_weights(dtype):
    on_ranks(functions, 2, dtype)


def several(world):
    """Functions, tensors and packed weights in one call share its gather."""
    inputs = [whole_numbers(r, 8, K) for r in range(world.ranks)]
    tensors = [whole_numbers(20 + i, K, N + i) for i in range(3)]
    function = weft.weight(
        lambda rows, out: out.copy_(rows @ tensors[0]), tensors[0].shape, torch.float32
    )
    for _ in range(3):
        results = weft.all_gather_matmul(
            inputs[world.rank], [function, tensors[1], weft.pack(tensors[2])]
        )
        for got, b in zip(results, tensors, strict=True):
            assert torch.equal(got, torch.cat(inputs) @ b)
    columns = torch.cat(inputs, 1)[:, : 2 * K]
    wide = whole_numbers(30, 2 * K, N)
    b = weft.weight(lambda rows, out: out.copy_(rows @ wide), (2 * K, N), torch.float32)
    assert torch.equal(weft.all_gather_matmul(inputs[world.rank], b, dim=1), columns @ wide)


def test_several_kinds_of_weights_in_one_call():
    on_ranks(several, 2)


def int8(world, dtype):
    """Operators multiply by int8 weights with the bits of the same product on one process."""
    random = torch.Generator().manual_seed(5)
    inputs = [torch.randn(ROWS, K, generator=random).to(dtype) for _ in range(world.ranks)]
    weights = [torch.randn(K, N, generator=random).to(dtype) for _ in range(world.ranks)]
    b = weft.quantize(weights[world.rank])
    whole, wanted = torch.cat(inputs), torch.empty(world.ranks * ROWS, N, dtype=dtype)
    b.multiply([whole], wanted, None, len(whole))
    for algorithm in ALGORITHMS["all_gather_matmul"]:
        for _ in range(2):
            got = weft.all_gather_matmul(inputs[world.rank], b, algorithm=algorithm)
            assert torch.equal(got, wanted), algorithm
    exact = whole.double() @ weights[world.rank].double()
    assert (wanted - exact).norm() < 0.02 * exact.norm()
    first, *others = [
        weft.matmul_all_reduce(inputs[world.rank], b, algorithm=algorithm)
        for algorithm in ALGORITHMS["matmul_all_reduce"]
    ]
    assert all(torch.equal(first, other) for other in others)
    total = sum(a.double() @ w.double() for a, w in zip(inputs, weights, strict=True))
    assert (first - total).norm() < 0.02 * total.norm()
    assert torch.equal(torch.cat(inputs), whole), "inputs are only read"
    with pytest.raises(ValueError, match="the weights of one call have one kernel"):
        weft.all_gather_matmul(inputs[world.rank], [b, weights[0]])


@pytest.mark.data
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_weights(dtype):
    on_ranks(int8, 2, dtype)


def own_schedule():
    """Rank 1 gets rank 0's rows and multiplies them by its int8 weight."""
    ready = Signal("ready", 0)
    there = Region(1, "inbox", 0, 1)
    return Plan(
        "get_and_multiply",
        "own",
        {
            "a": Buffer.of("input", ((0,), ())),
            "inbox": Buffer.of("workspace", ((), (0,))),
            "out": Buffer.of("output", ((), (0,))),
        },
        (
            {
                "compute": (
                    Wait(Signal("free", 1), 0),
                    Copy(Region(0, "a", 0, 1), there),
                    Notify(1, ready),
                )
            },
            {
                "compute": (
                    Wait(ready, 1),
                    Compute(INT8_PRODUCT, (there,), Region(1, "out", 0, 1), "w"),
                    Notify(0, Signal("free", 1)),
                )
            },
        ),
        {Region(1, "out", 0, 1): (Applied("int8_product", ((Term(0, "a", 0),),), (1, "w")),)},
        (1,),
    )


def test_a_kernel_of_its_own_in_a_schedule():
    """The proof knows the int8 product by its value, the reference engine by its plainest form."""
    plan = own_schedule()
    weft.verify(plan)
    random = torch.Generator().manual_seed(3)
    a = torch.randn(1, K, generator=random)
    b = weft.quantize(torch.randn(K, N, generator=random))
    ((_, outputs),) = run(Call(plan, [{"a": a}, {"a": a[:0]}], [{}, {"w": b}]))
    wanted = torch.empty(1, N)
    b.multiply([a], wanted, None, 1)
    assert torch.allclose(outputs["out"], wanted, rtol=1e-6, atol=1e-6)


def test_quantized_rows():
    rows = torch.tensor([[0.0, 0.0], [1.0, -2.0], [1e-30, 1e30], [float("nan"), 1.0]])
    numbers, scales = quantized(rows)
    assert numbers[:3].tolist() == [[0, 0], [64, -127], [0, 127]]
    assert scales[0] == torch.finfo(torch.float32).smallest_normal
    assert scales[3].isnan()
    b = weft.quantize(torch.eye(2))
    out = torch.empty(4, 2)
    b.multiply([rows], out, None, 4)
    assert torch.allclose(out[:3], rows[:3], rtol=1 / 127, atol=2 / 127)
    assert out[3].isnan().all(), "what is no number stays none"
    assert isinstance(weft.quantize(torch.ones(0, 3)), Int8Weight)


def strides_of(matrix):
    """The matrix with every kind of strides that its dimensions of size 1 may have."""
    for whole in (matrix.contiguous(), matrix.t().contiguous().t()):
        choices = [
            [stride] if size > 1 else [1, 2, 1000]
            for size, stride in zip(whole.shape, whole.stride(), strict=True)
        ]
        for strides in itertools.product(*choices):
            yield whole.as_strided(whole.shape, strides)


@pytest.mark.parametrize(
    ("rows", "k", "n"), [(3, 1, 4), (1, 1, 4), (3, 1, 1), (1, 5, 4), (3, 5, 1), (1, 5, 1)]
)
def test_int8_weights_with_dimensions_of_size_1(rows, k, n):
    """Each number is the largest of its row and column, so nothing is rounded."""
    x = torch.arange(1.0, rows + 1)[:, None] * torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0])[:k]
    b = torch.arange(1.0, n + 1) * torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0])[:k, None]
    for given, weight in itertools.product(strides_of(x), strides_of(b)):
        out = torch.full((rows, n), torch.nan)
        weft.quantize(weight).multiply([given], out, None, rows)
        torch.testing.assert_close(out, x @ b)


def test_sums_of_one_column_more_than_int32_has_sums_for():
    numbers = torch.full((2, _EXACT + 1), 127, dtype=torch.int8)
    for rows in (numbers, numbers[:1]):
        for b in (numbers.t(), numbers.t().contiguous(), numbers[:1].t()):
            assert (exact_sums(rows, b) == 127**2 * (_EXACT + 1)).all()


def refusals(world):
    a = torch.ones(4, K)
    b = weft.weight(lambda rows, out: out.zero_(), (K, N), torch.float32)
    with pytest.raises(ValueError, match=r"has no gradient and cannot be compiled: call under"):
        weft.all_gather_matmul(a.requires_grad_(), b)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"for this call b must be a tensor"):
            weft.matmul_reduce_scatter(a, b, dim=1)
        with pytest.raises(ValueError, match=r"a has 24 columns and b 25 rows"):
            weft.all_gather_matmul(a, weft.weight(print, (25, 2), torch.float32))
        with pytest.raises(TypeError, match=r"a is float32 and b bfloat16"):
            weft.all_gather_matmul(a, weft.weight(print, (K, 2), torch.bfloat16))
        weft.all_gather_matmul(a, b)
        different = weft.weight(
            lambda rows, out: out.zero_(), (K, N), torch.float32, rows_multiple=1 + world.rank
        )
        with pytest.raises(weft.MismatchError):
            weft.all_gather_matmul(a, different, algorithm="push")


def test_calls_that_cannot_be():
    on_ranks(refusals, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3, (2, 2), torch.float32), TypeError, "product must be a function"),
        ((print, (2,), torch.float32), ValueError, r"shape must be \(K, N\)"),
        ((print, (2, 2), torch.int8), TypeError, "dtype must be float16"),
    ],
)
def test_weights_that_cannot_be(arguments, error, text):
    with pytest.raises(error, match=text):
        weft.weight(*arguments)
    with pytest.raises(ValueError, match="rows_multiple must be at least 1"):
        weft.weight(print, (2, 2), torch.float32, rows_multiple=0)
    with pytest.raises(ValueError, match="a weight to quantize, must be a CPU tensor"):
        weft.quantize(torch.ones(3))
