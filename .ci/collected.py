"""Collect the tests in several processes with different hashes and addresses, and fail if the lists
differ.

pytest-xdist gives up when its workers collect different lists, such as tests made from a set, whose
order depends on hashes and on addresses. So these processes differ in the seed of hashes, in the
addresses of objects, and in whether bytecode is cached.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A few more objects of every small size at the start change the addresses of later objects.
COLLECT = """
import sys, pytest
ballast = [[object()] * size for size in range(1, 64) for _ in range(int(sys.argv[1]))]
options = ["--collect-only", "--override-ini=addopts=", "-q", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, "--numprocesses=0"]))
"""


def collected(seed: int, caches: str | None = None) -> list[str]:
    """The names of all tests, in order, as found by a new process; `caches` is a folder for
    bytecode, or None.
    """
    environment = (
        os.environ
        | {"PYTHONHASHSEED": str(seed)}
        | ({"PYTHONPYCACHEPREFIX": caches} if caches else {})
    )
    command = [sys.executable, "-c", COLLECT, str(seed)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line]


def main() -> None:
    with tempfile.TemporaryDirectory() as caches, ThreadPoolExecutor(2) as pool:
        cold = pool.submit(collected, 1, caches)
        others = [pool.submit(collected, seed) for seed in (2, 3)]
        cold.result()
        others.append(pool.submit(collected, 4, caches))  # warm by now
        first, *lists = (each.result() for each in (cold, *others))
    for other in lists:
        if other != first:
            sys.exit(
                "processes collect different lists of tests:\n"
                + "\n".join(difflib.unified_diff(first, other, lineterm="", n=1))
            )
    print(f"{len(first)} tests, the same list {1 + len(lists)} times")


if __name__ == "__main__":
    main()
