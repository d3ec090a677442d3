"""Products on this GPU: weft's persistent kernel compared with `torch.mm`, and fused operators of
ranks that are threads and share the GPU. Writes JSON.
"""

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.measure.versions import versions
from weft_bench.gpu import hardware, shared
from weft_bench.gpu.rates import product_rates
from weft_bench.harness import utc

SHAPES = [
    (8192, 8192, 8192),
    (4096, 10240, 5120),  # 1024 rows of each of 4 ranks, as `published.steps` reads that system
    (2048, 2048, 1024),
]

LENGTHS = {2: 8192, 4: 8192, 8: 4096}
"""M, K and N of fused operators by ranks: exact results of more do not fit beside the operands."""


def outcome(step: Callable[[], Any]) -> Any:
    """The result of a step, or its error as a text: the other steps are still to be measured."""
    try:
        return step()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def failed(found: Any) -> bool:
    """Whether the result of a step is an error, or has wrong elements."""
    rows = found if isinstance(found, list) else [found]
    return any("error" in row or any(row["wrong"].values()) for row in rows)


def main(file: Path) -> bool:
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.bfloat16
    steps: dict[str, Callable[[], Any]] = {
        "products": partial(product_rates, SHAPES, dtype, 3, 20, device),
        **{
            f"{ranks} ranks, {how}": partial(shared.fused, ranks, how, (length,) * 3, dtype)
            for ranks, length in LENGTHS.items()
            for how in ("torch", "triton")
        },
    }
    about = {"date": utc(), "machine": hardware(), "versions": versions("cuda")}
    result: dict[str, Any] = {}
    for name, step in steps.items():
        result[name] = outcome(step)
        file.write_text(json.dumps(about | result, indent=1))  # survives a later crash
    return any(map(failed, result.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) / "products.json"))
