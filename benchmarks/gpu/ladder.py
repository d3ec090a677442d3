"""weft on one device that ranks share, which are threads of this process: rung by rung
(`rungs.py`), each in a world of its own.

    python benchmarks/gpu/ladder.py LOG.jsonl [--device cpu] [--limit SECONDS] [--only NAME ...]

A rung that hangs ends the process with the stacks of all its threads, and exit status 1; restarted
with the same log, the ladder continues after it. At the end: status 2 if any rung of the log did
not pass. On a CPU, where kernels are interpreted, rungs are small.
"""

import argparse
import faulthandler
import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

_GIVE_UP = {"cuda": 8.0, "cpu": 60.0}  # seconds of any wait of a rung


def write(log: Path, line: dict[str, Any]) -> None:
    """Append a line, which outlasts this process."""
    with log.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def states(log: Path) -> dict[str, str]:
    """The last state of each rung of the log: ok, FAILED, or begun, of one that hung."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {line["rung"]: line["state"] for line in map(json.loads, lines)}


def climb(rung: Any, device: str) -> None:
    """Run a rung in a world of its own."""
    import weft

    streams = device == "cpu"
    with weft.local_world(
        rung.ranks,
        device,
        timeout=_GIVE_UP[device],
        products=rung.products,
        streams=streams,
        device_options=rung.options,
    ) as local:
        local.run(lambda: rung.work(world=weft.init()))


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("log", type=Path)
    words.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    words.add_argument("--limit", type=float, default=25.0, help="seconds of a rung")
    words.add_argument("--only", nargs="+", metavar="NAME", help="of these rungs")
    words.add_argument("--prefix", default="", help="of the names in the log")
    given = words.parse_args()
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before kernels are imported
    from rungs import rungs

    every = {each.name: each for each in rungs(given.device == "cuda")}
    if unknown := {*(given.only or [])} - {*every}:
        words.error(f"there are no rungs {sorted(unknown)}: use {sorted(every)}")
    begun, done = time.perf_counter(), states(given.log)
    for plain in given.only or every:
        name = given.prefix + plain
        if name in done:
            continue
        write(given.log, {"rung": name, "state": "begun"})
        faulthandler.dump_traceback_later(given.limit, exit=True)
        start, state, error = time.perf_counter(), "ok", ""
        try:
            climb(every[plain], given.device)
        except BaseException as raised:
            state, error = "FAILED", f"{type(raised).__name__}: {raised}"[:500]
            traceback.print_exc()
        faulthandler.cancel_dump_traceback_later()
        took = round(time.perf_counter() - start, 2)
        write(given.log, {"rung": name, "state": state, "seconds": took, "error": error})
        shown = f"[{time.perf_counter() - begun:6.1f} s] {state:6} {took:6.2f} s  {name}"
        print(f"{shown}  {error[:300]}".rstrip(), flush=True)
    mine = {given.prefix + plain for plain in given.only or every}
    return 2 * any(state != "ok" for name, state in states(given.log).items() if name in mine)


if __name__ == "__main__":
    raise SystemExit(main())
