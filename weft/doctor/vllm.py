"""``weft doctor --vllm``: whether vLLM in this environment runs on weft, and if not, why."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import NamedTuple

import torch.distributed as dist
from rich.console import Console
from rich.markup import escape

from weft import installation
from weft.doctor.memory import MORE_SHARED_MEMORY
from weft.doctor.tables import table
from weft.host import placement
from weft.host.topology import listed, numbers
from weft.vllm import settings, surface
from weft.vllm.package import OTHER, installed

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SHARED_MEMORY = 512 << 20  # bytes that vLLM's queue of messages and weft's buffers may need
_PLUGINS, _BIND = "VLLM_PLUGINS", "VLLM_CPU_OMP_THREADS_BIND"  # vLLM's variables
_COMPANIONS = "torchvision", "torchaudio", "torchcodec"  # each build is for one version of torch


class Finding(NamedTuple):
    """What was examined, what is here, and the problem with it, or ""."""

    name: str
    here: str
    problem: str = ""


def diagnose(console: Console) -> bool:
    """Print the findings; returns whether vLLM runs on weft."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    found = [*findings()]
    shown = table("vLLM on weft", "here")
    for finding in found:
        shown.add_row(finding.name, escape(finding.here))
    console.print(shown)
    problems = [finding.problem for finding in found if finding.problem]
    for problem in problems:
        console.print(f"[bold red]wrong:[/] {escape(problem)}")
    if not problems:
        console.print("Nothing is wrong: vLLM's ranks run on weft.", style="green")
    return not problems


def findings() -> Iterator[Finding]:
    """All findings on this environment, as far as vLLM is there."""
    package = installed()
    if package is None:
        yield Finding(
            "vLLM",
            "not installed",
            f"there is no vLLM: {installation.command('vllm')} --extra-index-url {CPU_INDEX}",
        )
        return
    yield Finding("vLLM", f"{package.name} {package.version}")
    plugins = metadata.entry_points(group="vllm.general_plugins")
    yield plugin("weft" in plugins.names, os.environ)
    yield selected(os.environ)
    yield from companions()
    yield from platform(package)
    node_of = {cpu: core.node for core in placement.host_topology().cores for cpu in core.cpus}
    yield threads(os.environ, os.sched_getaffinity(0), len({*node_of.values()}))
    shared = os.statvfs("/dev/shm")
    yield shared_memory(shared.f_blocks * shared.f_frsize, shared.f_bavail * shared.f_frsize)


def plugin(found: bool, environ: Mapping[str, str]) -> Finding:
    """Whether weft's plug-in is installed, and selected by vLLM's list of plug-ins."""
    names = environ.get(_PLUGINS)
    if not found:
        problem = "weft is installed without its entry points: install it again"
        return Finding("plug-in", "not found", problem)
    if names is not None and "weft" not in names.split(","):
        problem = f"{_PLUGINS} leaves weft out: unset it, or add weft to its list"
        return Finding("plug-in", f"found, not selected: {_PLUGINS}={names}", problem)
    return Finding("plug-in", f"found, selected: {_PLUGINS}={names or 'unset'}")


def selected(environ: Mapping[str, str]) -> Finding:
    """What of vLLM is to run on weft."""
    variable = settings.VARIABLE
    try:
        value = settings.setting(environ.get(variable))
    except ValueError as error:
        return Finding(variable, environ[variable], str(error))
    if value == settings.OFF:
        return Finding(variable, value, f"{variable}={value} leaves all to vLLM: unset it")
    return Finding(variable, value)


def companions() -> Iterator[Finding]:
    """Whether libraries that vLLM's models import fit torch."""
    for name in _COMPANIONS:
        if find_spec(name) is None:
            yield Finding(name, "not installed")
            continue
        version = metadata.version(name)
        try:
            import_module(name)
        except Exception as error:
            torch_version = metadata.version("torch")
            yield Finding(
                name,
                version,
                f"{name} {version} does not fit torch {torch_version} ({error}): pip install "
                f"--force-reinstall --no-deps {name} --index-url {CPU_INDEX}, or pip uninstall "
                f"{name}, which models of text do not need",
            )
        else:
            yield Finding(name, f"{version}, fits torch")


def platform(package: metadata.Distribution) -> Iterator[Finding]:
    """Whether vLLM computes on CPUs, and has what the plug-in relies on."""
    try:
        from vllm.platforms import current_platform

        name = type(current_platform).__name__
        on_cpus = current_platform.is_cpu()
    except Exception as error:
        yield Finding("platform", "unknown", _not_imported(error))
        return
    if not on_cpus:
        yield Finding(
            "platform",
            name,
            f"{package.name} {package.version} does not run on CPUs here, and weft's plug-in is "
            f"for CPUs only: install a build for CPUs, {OTHER} or vllm with a version …+cpu",
        )
        return
    yield Finding("platform", name)
    yield needed(package)
    available = dist.is_backend_available("weft")
    yield Finding(
        "backend weft of torch.distributed",
        "available" if available else "not found",
        "" if available else "weft is installed without its entry points: install it again",
    )


def needed(package: metadata.Distribution) -> Finding:
    """Whether vLLM has what the plug-in relies on."""
    name = "what weft needs of vLLM"
    tested = f"weft is tested with vLLM {surface.VERSIONS}"
    try:
        lacks = surface.lacking()
    except Exception as error:  # of vLLM's imports, such as a torchvision that does not fit torch
        return Finding(name, "unknown", _not_imported(error))
    if lacks:
        problem = f"vLLM {package.version} does not fit the plug-in: {lacks}; {tested}"
        return Finding(name, lacks, problem)
    return Finding(name, f"there; {tested}")


def _not_imported(error: Exception) -> str:
    return f"vLLM cannot be imported: {type(error).__name__}: {error}"


def threads(environ: Mapping[str, str], allowed: Collection[int], nodes: int) -> Finding:
    """The threads of vLLM's ranks, and problems with the list of their cores."""
    value = environ.get(_BIND, "auto")
    cores = f"cores {listed(allowed)}"
    if value == "auto":
        here = f"{_BIND}=auto: ranks on separate NUMA nodes, {nodes} here, {cores}"
        return Finding(
            "threads", f"{here}; for more ranks give a list, such as {_example(allowed)}"
        )
    if value == "nobind":
        count = environ.get("OMP_NUM_THREADS")
        problem = (
            f"{_BIND}=nobind lets each rank compute on all {cores}: set OMP_NUM_THREADS, or give "
            f"each rank its cores, such as {_example(allowed)}"
        )
        here = f"{_BIND}=nobind, OMP_NUM_THREADS={count or 'unset'}, {cores}"
        return Finding("threads", here, "" if count else problem)
    here = f"{_BIND}={value}, {cores}"
    try:
        lists = [numbers(part) for part in value.split("|")]
    except ValueError:
        lists = [frozenset()]
    taken = [cpu for cpus in lists for cpu in cpus]
    wrong = ""
    if not all(lists):
        wrong = "is no list of cores for each rank"
    elif others := {*taken} - {*allowed}:
        wrong = f"has core(s) {listed(others)}, which this process may not use"
    elif twice := {cpu for cpu in taken if taken.count(cpu) > 1}:
        wrong = f"gives core(s) {listed(twice)} to several ranks"
    problem = f"{_BIND}={value} {wrong}: give cores of {listed(allowed)}, as in {_example(allowed)}"
    return Finding("threads", f"{here}, {len(lists)} rank(s)", wrong and problem)


def _example(allowed: Collection[int]) -> str:
    """A list that divides these cores between two ranks."""
    cores = sorted(allowed)
    half = len(cores) // 2
    return f'"{listed(cores[:half])}|{listed(cores[half:])}"' if half else f'"{cores[0]}"'


def shared_memory(size: int, free: int) -> Finding:
    """The shared memory of this host or container, in bytes."""
    here = f"/dev/shm has {size >> 20} MiB, {free >> 20} MiB of them free"
    problem = (
        f"{here}; ranks need {SHARED_MEMORY >> 20} MiB or more: give the container more "
        f"({MORE_SHARED_MEMORY}), or remove files there"
    )
    return Finding("shared memory", here, problem if free < SHARED_MEMORY else "")
