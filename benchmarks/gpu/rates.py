"""The product kernel of weft beside `torch.mm` on this GPU: shapes, tiles and stages of its
pipeline, verified and timed.

    python benchmarks/gpu/rates.py OUT.json quick|full

Exit status: 1 if a product failed or is wrong, 3 without a GPU; the others are measured
nevertheless.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from weft.gpu.kernels import all_gather_matmul as kernels
from weft.gpu.kernels.all_gather_matmul import Blocks
from weft.measure.versions import versions
from weft_tools.bench.gpu import hardware
from weft_tools.bench.gpu.rates import Product, rates
from weft_tools.bench.harness import utc
from weft_tools.events import milliseconds

DTYPE = torch.bfloat16
LARGE = 8192, 8192, 8192  # m, k, n
SHAPES = [
    LARGE,
    (4096, 10240, 5120),  # 1024 rows of each of 4 ranks, as `published.steps` reads that system
    (2048, 2048, 1024),
]
TILES = {  # besides the kernel's own
    LARGE: [Blocks(128, 256, 64, 8, 3), Blocks(128, 256, 64, 8, 4), Blocks(256, 128, 64, 8, 3)],
    SHAPES[2]: [Blocks(128, 128, 64, 8, 3), Blocks(64, 128, 64, 4, 4)],
}
MORE = [
    Blocks(128, 128, 64, 8, 3),
    Blocks(128, 128, 64, 4, 4),
    Blocks(128, 256, 32, 8, 6),
    Blocks(128, 256, 128, 8, 2),
    Blocks(256, 128, 64, 8, 4),
    Blocks(64, 256, 64, 4, 4),
]
Case = tuple[tuple[int, int, int], "Blocks | None"]


def cases(how: str) -> list[Case]:
    """The shapes and tiles, None for the kernel's own: first those of each shape."""
    found: list[Case] = [(shape, None) for shape in SHAPES]
    found += [(shape, tile) for shape, tiles in TILES.items() for tile in tiles]
    if how == "full":
        found += [(shape, tile) for shape in SHAPES[:2] for tile in MORE]
    return found


@contextmanager
def tiled(tile: Blocks | None) -> Iterator[list[Blocks]]:
    """Product kernels that are made inside have this tile, whichever they would choose for None;
    yields the tiles that they have.
    """
    own, chosen = kernels.blocks, list[Blocks]()

    def sizes(*arguments: Any) -> Blocks:
        chosen.append(tile or own(*arguments))
        return chosen[-1]

    kernels.blocks = sizes
    try:
        yield chosen
    finally:
        kernels.blocks = own


def compiled(before: Sequence[Any]) -> dict[str, int]:
    """The resources of the product kernels that were compiled since there were those `before`."""
    new = [each for each in variants() if each not in before]
    return {
        "registers": max((each.n_regs for each in new), default=0),
        "spills": max((each.n_spills for each in new), default=0),
        "shared": max((each.metadata.shared for each in new), default=0),
    }


def variants() -> list[Any]:
    """The product kernels that were compiled in this process."""
    caches: Any = kernels.all_gather_matmul_kernel.device_caches
    return [kernel for device in [*caches] for kernel in caches[device][0].values()]


def main(file: Path, how: str) -> int:
    if not torch.cuda.is_available():
        print("rates.py: torch finds no GPU here; nothing was measured", file=sys.stderr)
        return 3
    device, begun, right = torch.device("cuda", torch.cuda.current_device()), time.time(), True
    found: dict[str, Any] = {"date": utc(), "machine": hardware(), "versions": versions("cuda")}
    found["products"] = []
    for shape, tile in cases(how):
        row: dict[str, Any] = {"shape": dict(zip("mkn", shape, strict=True)), "tile": tile}
        try:
            before = variants()
            with tiled(tile) as chosen:
                subject = Product(*shape, DTYPE, device)
            row["tile"] = chosen[-1]
            row |= rates(subject, 3, 12, milliseconds) | compiled(before)
            right &= not any(row["wrong"].values())
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            right = False
        found["products"].append(row)
        file.write_text(json.dumps(found, indent=1))  # survives a later crash
        shown = {name: row.get(name) for name in ("tile", "kernel_tflops", "ratio", "wrong")}
        print(f"[{time.time() - begun:5.1f} s] {shape}: {shown}", flush=True)
    return not right


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2]))
