"""The local product: every method against float64; and the choice of the fastest, with a clock
of the test's own.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weft.kernels import fastest, half, methods, products, weights
from weft.kernels.packed import pack
from weft_tools.bench.verification import compare, error_bound

ROWS = (0, 1, 7, 1025)  # ragged beyond the blocks in which oneDNN multiplies
SHAPES = ((37, 29), (5, 1), (1, 6), (0, 3))  # (K, N) of weights
DTYPES = [
    *((dtype, dtype) for dtype in weights.DTYPES),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]
METHODS = ("mm", "mm/float32", "onednn", "onednn/float32", "native/float32")
LAYOUTS = {
    "plain": torch.clone,
    "transposed": lambda t: t.t().contiguous().t(),
    "gaps between rows": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "gaps between elements": lambda t: t.repeat_interleave(3, 0).repeat_interleave(2, 1)[::3, ::2],
}
"""Layouts of a matrix in memory."""


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_computes_the_product(method, dtype, out_dtype, layout, packed, monkeypatch):
    if method not in fastest.candidates(dtype, out_dtype):
        return  # not a candidate for these dtypes
    monkeypatch.setattr(fastest, "method", lambda *_: method)
    random, biased = (
        torch.Generator().manual_seed(len(method)),
        itertools.cycle([False, True, True]),
    )
    for (k, n), rows, x_layout in itertools.product(SHAPES, ROWS, ("plain", "transposed")):
        x, b, bias = (
            torch.randn(*shape, generator=random).to(dtype) for shape in ((rows, k), (k, n), (n,))
        )
        bias, x_in_layout, weight = (
            bias if next(biased) else None,
            LAYOUTS[x_layout](x),
            LAYOUTS[layout](b),
        )
        used, whole = (
            pack(weight) if packed else weight,
            torch.full((rows, n + 3), math.nan, dtype=out_dtype),
        )
        try:
            products.multiply(x_in_layout, used, whole[:, :n], bias)
        except RuntimeError as error:
            if method == "onednn" and dtype in (torch.float16, torch.bfloat16):
                # such a method is never the fastest
                pytest.skip(f"this processor cannot: {error}")
            raise
        more = torch.zeros(n).double() if bias is None else bias.double()
        exact, size = (
            x.double() @ b.double() + more,
            x.double().abs() @ b.double().abs() + more.abs(),
        )
        found = compare(whole[:, :n], exact, error_bound(size, exact, k + 1, dtype, out_dtype))
        assert not found.wrong, (k, n, rows, x_layout, found)
        assert whole[:, n:].isnan().all()
        assert x_in_layout.equal(x)
        assert weight.equal(b)


def test_every_method_can_be_the_fastest():
    possible = {*METHODS} if half.COLUMNS else {*METHODS} - {"native/float32"}
    assert {method for pair in DTYPES for method in fastest.candidates(*pair)} == possible


def test_rows_and_the_size_of_the_weight_select_the_method(monkeypatch):
    table = {
        size: {str(rows): f"{size}, {rows} rows" for rows in cases}
        for size, cases in fastest.CASES.items()
    }
    monkeypatch.setattr(fastest, "_table", lambda *_: {"plain": table})
    # the original caches its result
    monkeypatch.setattr(fastest, "_method", fastest._method.__wrapped__)

    def found(elements, *numbers):
        return [
            fastest.method(torch.float32, torch.float32, "plain", rows, elements)
            for rows in numbers
        ]

    assert found(1 << 20, 1, 7, 8, 511, 512, 9999) == [
        f"large, {rows} rows" for rows in (1, 2, 8, 64, 512, 512)
    ]
    assert found(fastest.TINY, 1, 7, 8, 9999) == [f"tiny, {rows} rows" for rows in (1, 1, 8, 64)]
    assert found(fastest.SMALL, 1, 7, 8, 9999) == [f"small, {rows} rows" for rows in (1, 1, 8, 64)]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the returned work advances; the test passes the seconds of each run."""
    now = [0.0]
    monkeypatch.setattr(fastest, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def taking(seconds):
        runs = iter(seconds)

        def work():
            now[0] += next(runs, seconds[-1])

        return work

    return taking


def test_the_first_run_is_not_timed(clock):
    works = {"mm": clock([2.0]), "onednn": clock([500.0, 3.0, 1.0, 3.0])}
    assert fastest.least_times(works) == {"mm": 2.0, "onednn": 1.0}


def test_a_method_that_fails_is_never_chosen(clock):
    def fails():
        raise RuntimeError("no kernel for this")

    assert fastest.least_times({"mm": clock([2.0]), "onednn": fails}) == {
        "mm": 2.0,
        "onednn": math.inf,
    }


def test_another_method_must_be_clearly_faster():
    cases = [("small", 1), ("large", 8), ("large", 64)]
    times = [{"mm": 1.0, "onednn": 0.99}, {"mm": 1.0, "onednn": 0.5}, {"mm": 1.0}]
    seconds = dict(zip(cases, times, strict=True))
    expected = dict(zip(cases, ("mm", "onednn", "mm"), strict=True))
    assert fastest._fastest(seconds, packed=True) == expected
    assert fastest._fastest(seconds, packed=False) == expected


@pytest.mark.parametrize("small", [False, True])
def test_blocks_cover_all_rows_in_few_sizes(small):
    sizes = set()
    for rows in range(1, 2500):
        blocks = methods._blocks(rows, small)
        assert [row for block in blocks for row in range(rows)[block]] == [*range(rows)]
        heights = [block.stop - block.start for block in blocks]
        assert max(heights) <= methods._BLOCK
        assert len(heights) == 1 or min(heights) >= methods._LEAST or not small
        sizes |= {*heights}
    assert len(sizes) <= 132 if small else len(sizes) == methods._BLOCK


@pytest.mark.parametrize(("k", "exact_from"), [(200, 129), (512, 129), (2048, 65)])
def test_products_of_few_rows_share_few_kernels(k, exact_from, monkeypatch):
    """Each number of rows has a kernel, so few rows are padded; more, of which a product takes
    longer than making a kernel, are not.
    """
    made, kernel = [], methods._kernel
    monkeypatch.setattr(
        methods, "_kernel", lambda x, w, bias: (made.append(len(x)), kernel(x, w, bias))[1]
    )
    monkeypatch.setattr(methods, "_MAKING", {4: 1 << 26})
    monkeypatch.setattr(fastest, "method", lambda *_: "onednn")
    b = torch.randn(k, 512)
    for rows in (3, 9, 17, 24, 33, 64, 65, 127, 128):
        x, out = torch.randn(rows, k), torch.empty(rows, 512)
        products.multiply(x, b, out)
        assert torch.allclose(out, x @ b, atol=1e-2)
        if rows >= exact_from:
            assert made[-1] == rows
        assert rows <= made[-1] <= rows + max(1, rows // 8)
    assert len({methods.kernel_rows(rows, k * 512, 4) for rows in range(1, exact_from)}) <= 33
    assert made[:4] == [4, 10, 18, 24]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_bits_do_not_depend_on_padding(dtype, packed, monkeypatch):
    """Each row of a padded product has the bits that it has beside any other rows."""
    # without instructions for it oneDNN has no product of bfloat16, and weft does not select one
    itself = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    monkeypatch.setattr(fastest, "method", lambda *_: "onednn" if itself else "onednn/float32")
    k, n = 1024, 256
    b, x = torch.randn(k, n).to(dtype), torch.randn(128, k).to(dtype)
    weight = pack(b) if packed else b
    for rows in (3, 5, 17, 33, 65, 127):
        few = torch.empty(rows, n, dtype=dtype)
        products.multiply(x[:rows], weight, few)
        height = methods.kernel_rows(rows, k * n, dtype.itemsize if itself else 4)
        assert height > rows
        for fill in (1e4, float("nan")):
            beside = torch.full((height, k), fill, dtype=dtype)
            beside[:rows] = x[:rows]
            many = torch.empty(height, n, dtype=dtype)
            products.multiply(beside, weight, many)
            assert torch.equal(many[:rows], few)


def add_uncounted(w, *at):
    w.data[at] += 1.0


CHANGES = {
    "a write": lambda w: w.detach().mul_(2),
    "other data": lambda w: setattr(w, "data", w.data + 1),
    "equal data elsewhere": lambda w: setattr(w, "data", w.data.clone()),
    "another dtype": lambda w: nn.ParameterList([w]).to(torch.float64),
    "no memory": lambda w: w.untyped_storage().resize_(0),
    "an uncounted write to all": lambda w: add_uncounted(w, ...),
    "an uncounted write to a part": lambda w: add_uncounted(
        w, slice(len(w) // 4, len(w) // 2), slice(w.shape[1] // 3)
    ),
}
VIEWS = {
    "itself": lambda w: w,
    "its transpose": torch.t,
    "a part of it": lambda w: w[:, : w.shape[1] // 2],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_packed_weight_detects_changes_of_its_tensor(view, change, tensor_access):
    """Also of a view, such as the transposed weight of a linear layer."""
    for shape in ((256, 96), (5, 7)):
        weight = nn.Parameter(torch.randn(shape))
        packed = pack(view(weight))
        packed.check_unchanged()
        change(weight)
        with pytest.raises(ValueError, match="changed after it was packed"):
            packed.check_unchanged()
