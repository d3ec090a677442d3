"""Engines that stand still until they are asked: each its own group of processes, stopped by a
signal while another is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

_END = 60.0
"""Seconds for an engine to end by itself, before its processes are killed."""
_SHOWN = 3000  # characters of the log of an engine that has failed


class Answer(NamedTuple):
    """What a process of `weft_tools.bench.vllm.process` answers, each a list by prompts."""

    tokens: list[list[int]]
    seconds: list[list[float]]
    top: list[list[list[int]]]


class Engine:
    """An engine that is being started with arguments of `vllm.LLM` and variables of the
    environment; `log` is the file for all that its processes print.
    """

    def __init__(self, arguments: Mapping[str, Any], variables: Mapping[str, str], log: Path):
        self._log = log
        with log.open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weft_tools.bench.vllm.process"],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                # In this session, so that the kernel ends the group if this process is killed.
                process_group=0,
            )
        self._send(arguments)

    def wait(self) -> None:
        """Wait until the engine has started. Raises `RuntimeError` if it has ended instead."""
        self._receive()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, top: int = 0) -> Answer:
        """Serve prompts together: `tokens` tokens for each, and the `top` likeliest of each. Raises
        `RuntimeError` if the engine has ended.
        """
        self._send({"prompts": prompts, "tokens": tokens, "top": top})
        return Answer(**self._receive())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the stopped engine run during the ``with`` block."""
        os.killpg(self._process.pid, signal.SIGCONT)
        yield
        self.stop()

    def stop(self) -> None:
        """Stop all processes of the engine until it is `running`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def dismiss(self) -> None:
        """Let the engine, which may be stopped, end by itself."""
        assert self._process.stdin
        with suppress(ProcessLookupError, BrokenPipeError):
            os.killpg(self._process.pid, signal.SIGCONT)
            self._process.stdin.close()

    def end(self) -> None:
        """Wait for the end of a dismissed engine, and kill what is left of it then."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, request: Any) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self) -> Any:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise self._ended()

    def _ended(self) -> RuntimeError:
        """The error of an engine that has ended, with the end of its log."""
        return RuntimeError(f"an engine ended:\n{self._log.read_text()[-_SHOWN:]}")
