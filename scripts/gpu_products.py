"""Products on this GPU: weft's persistent kernel beside `torch.mm`, and fused operators of ranks that share it. Writes JSON."""

import json
import statistics
import sys
from pathlib import Path

import torch

import weft
from weft.bench import gpu_processes
from weft.bench.gpu import hardware, milliseconds, versions
from weft.bench.gpu_products import product_rates
from weft.launcher import launch

SHAPES = [(8192, 8192, 8192), (4096, 10240, 5120), (2048, 2048, 1024)]


def fused(ranks: int) -> dict[str, object]:
    """All-gather + matmul of 8192 x 8192 x 8192 bfloat16 in a local world, beside gathering first and one product."""

    def measure() -> dict[str, list[float]]:
        world = weft.init()
        rows = 8192 // world.ranks
        a = torch.randn(rows, 8192, device=world.device).bfloat16()
        b = torch.randn(8192, 8192 // world.ranks, device=world.device).bfloat16()
        out = torch.empty(8192, b.shape[1], device=world.device, dtype=a.dtype)
        gathered = torch.empty(8192, 8192, device=world.device, dtype=a.dtype)
        found = {}
        for algorithm in ("pull", "direct"):
            found[algorithm] = milliseconds(lambda way=algorithm: weft.all_gather_matmul(a, b, out=out, algorithm=way), 2, 10)
        found["sequential"] = milliseconds(lambda: torch.mm(weft.all_gather(a, out=gathered), b, out=out), 2, 10)
        found["compute"] = milliseconds(lambda: torch.mm(gathered, b, out=out), 2, 10)
        return found

    with weft.local_world(ranks, "cuda") as local:
        every = local.run(measure)
    medians = {
        view: statistics.median(max(times) for times in zip(*(one[view] for one in every), strict=True)) for view in every[0]
    }
    return {"ranks": ranks, "times_ms": medians}


if __name__ == "__main__":
    result = {
        "machine": hardware(),
        "versions": versions(),
        "products": product_rates(SHAPES, torch.bfloat16, 3, 20),
        "processes": launch(gpu_processes.fused, 2, 8192, 8192, 8192, torch.bfloat16, 2, 10, threads=1)[0],
        "local_worlds": [fused(ranks) for ranks in (2, 4, 8)],
    }
    (Path(sys.argv[1]) / "products.json").write_text(json.dumps(result, indent=1))
    sys.exit(any(row["wrong"] for row in result["products"]))
