"""The results of `check.sh` in a folder as a page of tables; missing results are listed."""

import json
import sys
from pathlib import Path
from typing import Any


def load(folder: Path, name: str) -> dict[str, Any] | None:
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def main(folder: Path) -> None:
    print("# GPU check\n")
    names = "from-host", "all-gather", "p2p", "products"
    host, gathers, copies, products = found = [load(folder, name) for name in names]
    for name, result in zip(names, found, strict=True):
        if not result:
            print(f"- {name}: no result; see {name}.log")
    if host:
        times = ", ".join(f"{name} {time['median']:.3f}" for name, time in host["times_ms"].items())
        print(
            f"\nPeers in host memory on {host['machine']['gpu']}: {times} ms; limit_ratio "
            f"{host['limit_ratio']:.3f}, ",
            end="",
        )
        print(f"by the persistent kernel {host['limit_ratio_triton']:.3f}, ", end="")
        print(f"speedup {host['speedup']:.2f}, {'verified' if host['verified'] else 'WRONG'}")
    if processes := load(folder, "processes"):
        times = processes["times_ms"] | processes["baselines_ms"]
        print("\nTwo processes on one GPU, 8192 x 8192 x 8192: ", end="")
        print(", ".join(f"{name} {time['median']:.3f} ms" for name, time in times.items()))
    for result in filter(None, (gathers, copies)):
        print(
            "\n| bytes | operation | implementation | SMs | us | GB/s | wrong "
            "|\n|---|---|---|---|---|---|---|"
        )
        for row in result["rows"]:
            labels = row["size_bytes"], row["operation"], row["implementation"]
            print(
                f"| {' | '.join(map(str, labels))} | {row.get('comm_sms') or '-'} | "
                f"{row['time_us']['median']:.1f} | {row['algbw_gbps']:.1f} | {row['wrong']} |"
            )
    if products:
        rates = products.get("products")
        if isinstance(rates, list):
            print(
                "\n| product | kernel TFLOP/s | torch.mm TFLOP/s | ratio | wrong "
                "|\n|---|---|---|---|---|"
            )
            for row in rates:
                shape = "x".join(str(row["shape"][name]) for name in "mkn")
                print(
                    f"| {shape} | {row['kernel_tflops']:.0f} | {row['torch_mm_tflops']:.0f} | "
                    f"{row['ratio']:.3f} | {sum(row['wrong'].values())} |"
                )
        worlds = [
            found for found in products.values() if isinstance(found, dict) and "times_ms" in found
        ]
        views = [*dict.fromkeys(view for world in worlds for view in world["times_ms"])]
        if worlds:
            print(
                "\n| 8192 cubed, ms | "
                + " | ".join(f"{world['ranks']} {world['products']}" for world in worlds)
                + " |"
            )
            print("|---" * (len(worlds) + 1) + "|")
            for view in views:
                cells = [
                    f"{world['times_ms'][view]:.3f}" if view in world["times_ms"] else "-"
                    for world in worlds
                ]
                print(f"| {view} | " + " | ".join(cells) + " |")
        for name, found in products.items():
            if isinstance(found, dict) and "error" in found:
                print(f"\n- {name}: {found['error']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
