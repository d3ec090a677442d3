"""Engines of vLLM in processes of their own, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_ENDING = 60.0  # seconds
BIN = ROOT / ".clients/vllm/bin"
needs_vllm = pytest.mark.skipif(
    not (BIN / "python").exists(), reason="vLLM is not installed: `make vllm` installs it"
)


class Engine:
    """A program of vLLM and all processes that it starts, which form a session; `text` is what they
    have printed so far.
    """

    def __init__(self, words: Sequence[object], variables: dict[str, str]) -> None:
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_PLUGINS": "weft",
        }
        self.text = ""
        self.process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | variables,
            start_new_session=True,
        )

    def until(self, mark: str) -> str:
        """Wait for a line with this mark, and return what follows it."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.text += line
            if mark in line:
                return line.partition(mark)[2]
        raise AssertionError(f"vLLM ended without {mark!r}:\n{self.text}")

    def tokens(self) -> list[int]:
        found: list[int] = json.loads(self.until("tokens:"))
        return found

    def end(self) -> float:
        """Wait for the end of all its processes; the seconds until then."""
        began = time.monotonic()
        assert self.process.stdout
        self.text += self.process.stdout.read()  # the last of them closes it, and ends soon
        self.process.wait()
        while self.processes() and time.monotonic() < began + _ENDING:
            time.sleep(0.01)
        print(self.text)  # pytest shows it of a test that fails
        return time.monotonic() - began

    def processes(self) -> dict[int, str]:
        """The names of its processes that are not zombies, by their ids."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    found[int(folder.name)] = (folder / "cmdline").read_text().strip("\0")
        return found

    def kill_worker(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the worker of a rank."""
        (pid,) = (
            pid for pid, name in self.processes().items() if re.search(rf"Worker_TP{rank}\b", name)
        )
        os.kill(pid, number)

    def resume(self) -> None:
        """Let processes that are stopped continue."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def shared_memory(self) -> set[Path]:
        """The files in /dev/shm that its processes have mapped."""
        found = set[Path]()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                found |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, re.M)}
        return {path for path in found if path.exists()}

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


@contextlib.contextmanager
def engine(words: Sequence[object], **variables: str) -> Iterator[Engine]:
    """An engine whose processes are gone at the end of the block."""
    started = Engine(words, variables)
    try:
        yield started
    finally:
        started.close()


def llm(folder: Path, *end: str, **options: Any) -> list[object]:
    """The command of `vllm_engine` with these options of `vllm.LLM`."""
    script = Path(__file__).with_name("vllm_engine.py")
    return [BIN / "python", script, folder, json.dumps(options), *end]
