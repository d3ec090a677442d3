"""Start ranks on this host that outlive each other, for programs that recover by `World.shrink`.

torch's elastic agent ends all of its ranks with the first that fails. Here the launcher serves the
store of the rendezvous, so it outlives every rank, and waits until all have ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from torch._C._distributed_c10d import TCPStore

_LOOK = 0.02  # seconds between looks at the ranks
_ENDING = 10.0  # seconds that ranks have to end after a signal


def run(ranks: int, command: Sequence[str]) -> int:
    """Run a command as `ranks` ranks. The exit code is 0 if the rank that ends last does so with 0,
    and otherwise that of the rank that failed first; 128 and the number of the signal if one ended
    it, or this process.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(ranks):
            variables = os.environ | _variables(rank, ranks, store.port)
            processes.append(subprocess.Popen(command, env=variables))
        codes = _ended(processes, stopped)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped:
        print(f"weft run: stopped by {signal.Signals(stopped[0]).name}", file=sys.stderr)
        return 128 + stopped[0]
    failed = [code for code in codes if code]
    return _status(failed[0]) if codes[-1] else 0


def _ended(processes: Sequence[subprocess.Popen[bytes]], stopped: list[int]) -> list[int]:
    """The exit codes of all processes, in the order in which they end; a signal that this process
    gets is passed on to them, and they are waited for only a while longer.
    """
    codes = list[int]()
    running = [*processes]
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        if stopped and deadline == float("inf"):
            deadline = time.monotonic() + _ENDING
            for process in running:
                process.send_signal(signal.SIGTERM)
        for process in [each for each in running if each.poll() is not None]:
            running.remove(process)
            codes.append(process.returncode)
            if process.returncode and not stopped:
                rank = processes.index(process)
                how = how_ended(process.returncode)
                left = f"; {len(running)} left" if running else ""
                print(f"weft run: rank {rank} (pid {process.pid}) {how}{left}", file=sys.stderr)
        time.sleep(_LOOK)
    return codes


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables of a rank, as torchrun sets them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"weft {os.getpid()}",
    }


def how_ended(code: int) -> str:
    """A phrase for how a process ended, by its exit code: below 0 that of a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"was ended by signal {-code}"


def _status(code: int) -> int:
    return code if code > 0 else 128 - code
