"""The variables by which launchers describe a job to its ranks, as torch's own."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping

from weft.errors import WeftError

_JOB = "WEFT_JOB"  # the variable with the job in which this process was started


def translated(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process; if so torch's variables are set. Raises `WeftError`
    if one is missing.
    """
    variables = launcher_variables(environment)
    if variables is None:
        return False
    if variables["MASTER_ADDR"] == "localhost" and _several_hosts(variables):
        raise WeftError(
            "mpirun has started ranks on several hosts without the address of rank 0: set "
            "MASTER_ADDR on all ranks to the address of its host (mpirun -x MASTER_ADDR=node0 "
            "with Open MPI, mpiexec -genv MASTER_ADDR node0 with MPICH)"
        )
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return True


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The variables of torch's ``env://`` initialisation, translated from those of torchrun,
    mpirun or srun; None without a launcher.

    mpirun and SLURM do not give the address of rank 0. Unless ``MASTER_ADDR`` is set it is the
    first host of a SLURM step and this host otherwise; unless ``MASTER_PORT`` is set the port is a
    hash of the job's name, which all its ranks have. MPICH names no job: if it has started ranks on
    several hosts the port is torch's default, 29500.

    Raises `WeftError` for variables that no launcher sets.
    """
    sources = {
        "RANK": ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
        "WORLD_SIZE": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
        "LOCAL_RANK": (
            "LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "MPI_LOCALRANKID",
            "SLURM_LOCALID",
        ),
        "LOCAL_WORLD_SIZE": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    }
    found = {
        name: [environment[key] for key in keys if key in environment]
        for name, keys in sources.items()
    }
    variables = {name: values[0] for name, values in found.items() if values}
    if not {"RANK", "WORLD_SIZE"} <= {*variables}:
        for name, other in ("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK"):
            if name in environment:
                raise WeftError(
                    f"{name} is set, but {other} is not: set both on every rank, as torchrun and "
                    "weft run do, or neither"
                )
        return None
    _check_ranks(variables)
    if here := _tasks_of_step(environment, variables):
        variables.setdefault("LOCAL_WORLD_SIZE", here)
    # MPICH names no job, but its ranks on a host have one parent. srun may set PMI_RANK too.
    mpich = "PMI_RANK" in environment and (
        "SLURM_STEP_ID" not in environment or "MPI_LOCALNRANKS" in environment
    )
    if mpich and _several_hosts(variables):
        name = ""
        port = 29500
    else:
        name = _job_of_launcher(environment, mpich)
        port = 20000 + zlib.crc32(name.encode()) % 12000
    if "RANK" not in environment and name:
        variables[_JOB] = name
    first = _first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))
    variables["MASTER_ADDR"] = environment.get("MASTER_ADDR", first)
    variables["MASTER_PORT"] = given = environment.get("MASTER_PORT", str(port))
    if not (given.isdecimal() and int(given) < 1 << 16):
        raise WeftError(f"MASTER_PORT must be a port from 0 to 65535; got {given!r}")
    return variables


def _check_ranks(variables: Mapping[str, str]) -> None:
    """Raise `WeftError` unless RANK and WORLD_SIZE are numbers, and the rank one of the job's."""
    for name in ("RANK", "WORLD_SIZE"):
        if not variables[name].isdecimal():
            raise WeftError(f"{name} must be a number; got {variables[name]!r}")
    rank, ranks = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    if rank >= ranks:
        raise WeftError(
            f"RANK is {rank}, but WORLD_SIZE is {ranks}: ranks are counted from 0, so the last is "
            f"{ranks - 1}"
        )


def _job_of_launcher(environment: Mapping[str, str], mpich: bool) -> str:
    """A name for the job of a launcher, different from all others on this host."""
    if not mpich and "PMIX_NAMESPACE" in environment:
        return environment["PMIX_NAMESPACE"]
    if not mpich and "SLURM_JOB_ID" in environment:
        return f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '')}"
    return f"process {os.getppid()}"


def job() -> str:
    """The name of this process's job, equal on all its ranks; empty if the launcher gave none."""
    return os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get(_JOB, "")


def _tasks_of_step(environment: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """The number of ranks on this host, by SLURM's list 4(x2),3 of those on each, if the ranks are
    the tasks of a step of SLURM; else "".
    """
    if variables["WORLD_SIZE"] != environment.get("SLURM_STEP_NUM_TASKS"):
        return ""
    counts = [
        count
        for count, hosts in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        for _ in range(int(hosts or 1))
    ]
    here = int(environment.get("SLURM_NODEID", 0))
    return counts[here] if here < len(counts) else ""


def _first_host(nodes: str) -> str:
    """The first of SLURM's list of hosts: a01-ib of a[01-03,7]-ib,b."""
    first = re.findall(r"(?:\[[^\]]*\]|[^,\[])*", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _several_hosts(variables: Mapping[str, str]) -> bool:
    """Whether ranks are on other hosts too, by the launcher's variables."""
    return int(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])) < int(
        variables["WORLD_SIZE"]
    )
