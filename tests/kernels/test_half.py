"""Weft's own product of 16-bit numbers, against float64, and its promises about bits.

`native/tests/core.cpp` has the same kernel beside sums in the order that it promises.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft import _native
from weft.kernels import fastest, half
from weft.kernels.packed import pack
from weft_tools.bench.verification import compare, error_bound

pytestmark = pytest.mark.skipif(not half.COLUMNS, reason="this processor lacks the instructions")
HALVES = (torch.float16, torch.bfloat16)
LAYOUTS = {
    "plain": torch.clone,
    "transposed": lambda t: t.t().contiguous().t(),
    "gaps between rows": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "gaps between elements": lambda t: t.repeat_interleave(3, 0).repeat_interleave(2, 1)[::3, ::2],
}
"""Layouts of a matrix in memory."""


def product(x, b, bias=None, packed=False, out_dtype=torch.float32):
    out = torch.full((len(x), b.shape[1] + 2), 7, dtype=out_dtype)
    half.multiply(x, half.panels(b) if packed else b, out[:, :-2], bias, packed)
    assert (out[:, -2:] == 7).all()
    return out[:, :-2]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@given(
    rows=st.integers(0, 30),
    k=st.integers(0, 200),
    n=st.integers(0, 100),
    dtype=st.sampled_from(HALVES),
    wide=st.booleans(),
    x_layout=st.sampled_from([*LAYOUTS]),
    layout=st.sampled_from([*LAYOUTS]),
    bias_dtype=st.sampled_from([None, torch.float32, *HALVES]),
    seed=st.integers(0, 1 << 30),
)
def test_any_sizes_and_layouts(rows, k, n, dtype, wide, x_layout, layout, bias_dtype, seed):
    random = torch.Generator().manual_seed(seed)
    x, b = (torch.randn(*s, generator=random).to(dtype) for s in ((rows, k), (k, n)))
    bias = None if bias_dtype is None else torch.randn(n, generator=random).to(bias_dtype)
    out_dtype = torch.float32 if wide else dtype
    x_used, b_used = LAYOUTS[x_layout](x), LAYOUTS[layout](b)
    found = product(x_used, b_used, bias, out_dtype=out_dtype)
    more = torch.zeros(n).double() if bias is None else bias.double()
    exact = x.double() @ b.double() + more
    size = x.double().abs() @ b.double().abs() + more.abs()
    assert not compare(found, exact, error_bound(size, exact, k + 1, dtype, out_dtype)).wrong
    assert torch.equal(found, product(x_used, b_used, bias, packed=True, out_dtype=out_dtype))
    assert x_used.equal(x)
    assert b_used.equal(b)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_bits_of_a_row_do_not_depend_on_others(dtype):
    x, b = torch.randn(50, 300).to(dtype), torch.randn(300, 90).to(dtype)
    every = product(x, b, packed=True)
    for rows in (*range(1, 30), 49):
        for packed in (False, True):
            assert torch.equal(product(x[-rows:], b, packed=packed), every[-rows:]), rows


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 64, 700, 2500])
def test_bits_do_not_depend_on_threads(rows, dtype, threads):
    """Whether threads share the columns or, from some hundred rows on, the rows."""
    x, b = torch.randn(rows, 700).to(dtype), torch.randn(700, 400).to(dtype)
    wanted = None
    for count in (1, 2, 3, 7):
        threads(count)
        assert _native.team_size() == count
        for packed in (False, True):
            found = product(x, b, packed=packed)
            wanted = found if wanted is None else wanted
            assert torch.equal(found, wanted), (count, packed)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_of_16_bits(dtype):
    """Infinite and subnormal numbers, and what is none, in each factor and in the result."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    for packed in (False, True):
        for out_dtype in (dtype, torch.float32):
            for found in (
                product(numbers[:, None], one, packed=packed, out_dtype=out_dtype).flatten(),
                product(one, numbers[None], packed=packed, out_dtype=out_dtype).flatten(),
            ):
                expected = numbers.to(out_dtype)
                none = expected.isnan()
                assert torch.equal(found.isnan(), none)
                assert torch.equal(found[~none], expected[~none])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_results_are_rounded_to_even_once(dtype):
    """As torch rounds the same sums in float32: of ties, and beyond the largest number."""
    x = torch.tensor([[1.0, 2.0**-12], [1.5, -(2.0**-9)], [60000.0, 60000.0]]).to(dtype)
    b = torch.randn(2, 50).to(dtype)
    b[:, :3] = torch.tensor([[1.0, 1.0, 3e4], [1.0, 2.0, 3e4]]).to(dtype)
    assert torch.equal(product(x, b, out_dtype=dtype), product(x, b).to(dtype))


def test_a_negated_view_is_read_as_it_is():
    x, b = torch.randn(3, 5).bfloat16(), torch.randn(5, 4).bfloat16()
    for packed in (False, True):
        found = torch.empty(3, 4)
        form = half.panels(torch._neg_view(b)) if packed else torch._neg_view(b).resolve_neg()
        half.multiply(torch._neg_view(x), form, found, torch._neg_view(torch.ones(4)), packed)
        assert torch.equal(found, product(x, b) - 1)


def test_packed_weights_take_two_bytes_a_number():
    b = torch.randn(40, 3 * half.COLUMNS - 1).bfloat16()
    packed = pack(b)
    form = packed.form("native/float32")
    assert form.nbytes == 2 * 40 * 3 * half.COLUMNS
    assert packed.form("native/float32") is form


def test_tensors_that_it_cannot_multiply(tensor_access):
    x, b = torch.randn(3, 5).bfloat16(), torch.randn(5, 4).bfloat16()
    with pytest.raises(ValueError, match="a factor of a product is a matrix on the CPU"):
        half.multiply(x, b[0], torch.empty(3, 4), None, False)
    with pytest.raises(ValueError, match="rows of a product are contiguous"):
        half.multiply(x, b, torch.empty(4, 3).t(), None, False)


def test_it_is_no_candidate_where_it_cannot_run(monkeypatch):
    for dtype in HALVES:
        for out_dtype in (dtype, torch.float32):
            assert "native/float32" in fastest.candidates(dtype, out_dtype)
    for dtype in (torch.float32, torch.float64):
        assert "native/float32" not in fastest.candidates(dtype, dtype)
    monkeypatch.setattr(half, "COLUMNS", 0)
    for dtype in HALVES:
        assert "native/float32" not in fastest.candidates(dtype, dtype)
