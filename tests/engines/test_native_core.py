"""Settings and constants of the native core."""

import os
import subprocess
import sys

import pytest

import weft._native as _native
from weft.schedules import thresholds

PROGRAM = """
import torch

import weft
import weft._native as _native


def same_bits():
    world = weft.init()
    rank = world.rank
    for numbers in (100, 3_000, 300_000, 3_000_000):  # float32, up to more than the caches hold
        for again in range(3):
            a = torch.randn(numbers, generator=torch.Generator().manual_seed(numbers + rank))
            parts = weft.all_gather(a).view(2, numbers)
            assert torch.equal(parts[rank], a) and not torch.equal(parts[0], parts[1])
            assert torch.equal(weft.all_reduce(a.clone()), parts[0] + parts[1])
            out = world.empty(numbers)
            weft.all_reduce(a, out=out)
            assert torch.equal(out, parts[0] + parts[1])
    return _native.stores()


if __name__ == "__main__":
    print(*weft.launch(same_bits, ranks=2))
"""


def run(path, program, stores):
    path.write_text(program)
    return subprocess.run(
        [sys.executable, path],
        env={**os.environ, "WEFT_STORES": stores},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(("asked", "stores"), [("", "adaptive"), ("cached", "cached")])
def test_the_kind_of_stores_is_chosen_by_a_variable(asked, stores, tmp_path):
    """Without torch, whose import takes long."""
    program = "import weft._native as native; print(native.stores())"
    assert run(tmp_path / "program.py", program, asked).stdout.split() == [stores]


@pytest.mark.slow
@pytest.mark.parametrize("stores", ["", "cached", "streaming"])
def test_results_do_not_depend_on_the_kind_of_stores(stores, tmp_path):
    done = run(tmp_path / "program.py", PROGRAM, stores)
    assert done.stdout.split() == 2 * [stores or "adaptive"], done.stderr


def test_plans_and_the_native_core_have_eager_buffers_of_one_size():
    assert _native.Executor.eager_bytes == thresholds.EAGER_BUFFER_BYTES
