"""Numbers that the code states in two places, in Python and C++, agree."""

import re
from pathlib import Path

from weft import checks
from weft.engines.engine import OUTSTANDING
from weft.kernels import methods
from weft.ops import fused
from weft.schedules import thresholds
from weft.world import signals, values

ROOT = Path(__file__).parent.parent
NATIVE = ROOT / "native"


def native(path, name):
    """The number of a constant of the core."""
    [value] = re.findall(rf"\b{name} = ([^;,]+)[;,]", (NATIVE / path).read_text())
    return eval(re.sub(r"\w+\{(.+?)\}", r"\1", value).replace("'", ""))


def test_an_eager_buffer_has_the_size_of_the_core():
    assert native("execute/program.hpp", "kEager") == thresholds.EAGER_BUFFER_BYTES


def test_a_time_limit_is_one_that_the_core_can_wait():
    assert native("kernels/clock.hpp", "kLongestWait") == checks.LONGEST


def test_a_rank_may_be_as_many_calls_ahead_as_peers_can_read():
    """A peer may have as many outstanding (H3)."""
    assert native("memory/calls.hpp", "kHeaders") >= 2 * OUTSTANDING


def test_a_piece_of_a_text_of_all_ranks_fits_into_an_event():
    longest = native("memory/mesh.cpp", "kLongestEvent")
    assert values._PIECE + len(values._CALL) + 2 <= longest
    assert f"? {longest >> 10} << 10 : 512" in (NATIVE / "hosts/transport.hpp").read_text()


def test_blocks_have_the_bits_of_all_rows_from_one_number_of_rows_on():
    assert fused.SAME_BITS == methods._LEAST


def test_a_counter_has_a_cache_line():
    # as text: Triton's kernels are imported only after their tests have chosen its interpreter
    kernels = (ROOT / "weft/gpu/kernels/symmetric.py").read_text()
    [words] = re.findall(r"^COUNTER = (\d+)$", kernels, re.MULTILINE)
    assert 8 * int(words) == signals.COUNTER_BYTES
    counter = (NATIVE / "memory/signals.hpp").read_text()
    assert f"struct alignas({signals.COUNTER_BYTES}) Counter" in counter
