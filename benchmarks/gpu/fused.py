"""Fused operators of ranks that are threads and share the GPU, by torch and by triton: 2 and 4
ranks at 8192 cubed, 8 ranks at 4096 cubed.

    python benchmarks/gpu/fused.py OUT.json RANKS,...

Exit status: 1 if an operator failed or has wrong elements, 3 without a GPU; the others are measured
nevertheless.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weft.measure.versions import versions
from weft_tools.bench.gpu import hardware, shared
from weft_tools.bench.harness import utc

LENGTHS = {2: 8192, 4: 8192, 8: 4096}
"""M, K and N by ranks: the exact results of more do not fit beside the operands."""


def main(file: Path, numbers: Sequence[int]) -> int:
    """Measure worlds of these numbers of ranks."""
    if not torch.cuda.is_available():
        print("fused.py: torch finds no GPU here; nothing was measured", file=sys.stderr)
        return 3
    found: dict[str, Any] = {"date": utc(), "machine": hardware(), "versions": versions("cuda")}
    found["worlds"], right = [], True
    for ranks in numbers:
        for products in ("torch", "triton"):
            world: dict[str, Any] = {"ranks": ranks, "products": products}
            torch.cuda.reset_peak_memory_stats()
            try:
                world |= shared.fused(ranks, products, (LENGTHS[ranks],) * 3, torch.bfloat16)
                right &= not any(world["wrong"].values())
            except Exception as error:
                traceback.print_exc()
                world["error"] = f"{type(error).__name__}: {error}"[:400]
                right = False
            world["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
            torch.cuda.empty_cache()
            found["worlds"].append(world)
            file.write_text(json.dumps(found, indent=1))  # survives a later crash
            print(f"{ranks} ranks, {products}: {world.get('times_ms', world)}", flush=True)
    return not right


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), [int(each) for each in sys.argv[2].split(",")]))
