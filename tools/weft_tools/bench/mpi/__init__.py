"""An MPI baseline's processes, driven by weft's rank 0: started once, and asleep between requests.

Each MPI comes from the Python package index with mpi4py, in its own environment, since the MPIs
clash; ``make baselines`` makes the environments.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DIRECTORY = Path(".baselines")
MPIS = ("openmpi", "mpich", "intel-mpi")
_START = 60.0  # seconds
_ANSWER = 600.0
_LAUNCHERS = (
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "MPI_",
    "HYDRA_",
    "HYDI_",
    "I_MPI_",
    "SLURM_",
    "PYTHONPATH",
)


def environment(mpi: str) -> Path:
    """The folder of an MPI's Python environment, below the working directory."""
    return DIRECTORY / mpi


def _variables(mpi: str) -> dict[str, str]:
    """The environment variables of one MPI's processes alone: other MPIs would load Intel's library
    by them.
    """
    if mpi == "openmpi":
        return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if mpi == "intel-mpi":
        root = str(environment(mpi).absolute())
        variables = {"FABRICS": "shm", "PIN": "0", "HYDRA_BOOTSTRAP": "fork", "ROOT": root}
        return {f"I_MPI_{name}": value for name, value in variables.items()} | {
            "LD_LIBRARY_PATH": f"{root}/lib"
        }
    return {}


class MpiRanks:
    """Processes of an MPI, each of which answers the requests of `ask`, until `close`; `version` is
    the MPI's name and version.

    `cores` are the cores of each rank, equal to the cores of weft's rank of the same number, so
    that the comparison is fair.
    """

    def __init__(self, mpi: str, cores: Sequence[frozenset[int]]) -> None:
        self.mpi = mpi
        ranks = len(cores)
        everywhere = frozenset[int]().union(*cores)
        # mpiexec must not take itself for a process of weft's launcher
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)
        }
        variables |= _variables(mpi)
        # Numpy requests huge pages by default, torch only by a variable: both must use the same
        # kind of memory.
        variables["NUMPY_MADVISE_HUGEPAGE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "0")
        placing = (
            ["--bind-to", "none", *(["--oversubscribe"] if ranks > len(everywhere) else [])]
            if mpi == "openmpi"
            else []
        )
        programs = environment(mpi).absolute() / "bin"
        script = Path(__file__).with_name("program.py")
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
            path = f"{directory}/socket"
            listener.bind(path)
            listener.listen(ranks)
            listener.settimeout(0.1)
            program = [
                f"{programs}/python",
                str(script),
                path,
                json.dumps([sorted(own) for own in cores]),
            ]
            mine = os.sched_getaffinity(0)
            # mpiexec inherits the affinity; this rank may be bound to a core
            os.sched_setaffinity(0, everywhere)
            try:
                self.process = subprocess.Popen(
                    [f"{programs}/mpiexec", "-n", str(ranks), *placing, *program],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=self.errors,
                    stderr=self.errors,
                )
            finally:
                os.sched_setaffinity(0, mine)
            self.ranks = [self._accept(listener) for _ in range(ranks)]
        self.version = str(self._answers()[0])

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """Have all ranks execute a command, and return their answers."""
        try:
            for rank in self.ranks:
                rank.send((name, arguments))
        except OSError:
            raise self._failure("have ended") from None
        return self._answers()

    def close(self) -> None:
        """End the processes."""
        for rank in self.ranks:
            rank.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()

    def _accept(self, listener: socket.socket) -> Connection:
        deadline = time.monotonic() + _START
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            return Connection(connection.detach())
        raise self._failure("did not start")

    def _answers(self) -> list[Any]:
        with suppress(OSError, EOFError):
            if all(rank.poll(_ANSWER) for rank in self.ranks):
                return [rank.recv() for rank in self.ranks]
        raise self._failure("did not answer")

    def _failure(self, failure: str) -> RuntimeError:
        self.process.kill()
        self.process.wait()
        self.errors.seek(0)
        return RuntimeError(
            f"the ranks of {self.mpi} {failure}: {self.errors.read()[-2000:].strip()}"
        )
