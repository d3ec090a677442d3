"""Synthetic sysfs trees of other machines, made from the numbering of hardware threads of real
ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

from weft.host.topology import numbers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MACHINES = tomllib.loads((Path(__file__).parents[1] / "world/machines.toml").read_text())


def recorded(name: str, folder: Path) -> Path:
    """The sysfs of a machine of ``machines.toml``, in a folder."""
    machine = MACHINES[name]
    cpus = sorted(set().union(*map(numbers, machine["packages"])))
    system = folder / "devices/system"
    files = {
        system / "cpu/online": f"0-{cpus[-1]}",
        system / "node/online": f"0-{len(machine['nodes']) - 1}",
    }
    files[system / "node/has_memory"] = f"0-{len(machine['nodes']) - 1}"
    files |= {
        system / f"node/node{node}/cpulist": cpulist
        for node, cpulist in enumerate(machine["nodes"])
    }
    if "atoms" in machine:
        files[folder / "devices/cpu_atom/cpus"] = machine["atoms"]
    for cpu in cpus:
        about = system / f"cpu/cpu{cpu}"
        files[about / "topology/thread_siblings_list"] = _siblings(cpu, machine)
        files[about / "topology/physical_package_id"] = _holding(cpu, machine["packages"])[0]
        for index, shared in (0, str(cpu)), (3, _holding(cpu, machine["caches"])[1]):
            files[about / f"cache/index{index}/level"] = str(max(1, index))
            files[about / f"cache/index{index}/shared_cpu_list"] = shared
        for several, (first, second, *sharing) in machine.get("data", {}).items():
            if cpu in numbers(several):
                shared = (
                    f"{cpu - cpu % sharing[0]}-{cpu - cpu % sharing[0] + sharing[0] - 1}"
                    if sharing
                    else _siblings(cpu, machine)
                )
                own = (
                    (0, 1, "Data", first),
                    (1, 1, "Instruction", 2 * first),
                    (2, 2, "Unified", second),
                )
                for index, level, kind, size in own:
                    about_cache = {"level": level, "type": kind, "size": f"{size}K"}
                    about_cache["shared_cpu_list"] = (
                        shared if level == 2 else _siblings(cpu, machine)
                    )
                    files |= {
                        about / f"cache/index{index}/{name}": str(value)
                        for name, value in about_cache.items()
                    }
        for several, capacity in machine.get("capacities", {}).items():
            if cpu in numbers(several):
                files[about / "cpu_capacity"] = str(capacity)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


def _siblings(cpu: int, machine: dict) -> str:
    if "siblings" in machine:
        first = cpu % machine["siblings"]
        return f"{first},{first + machine['siblings']}"
    if cpu in numbers(machine.get("pairs", "")):
        return f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"
    return str(cpu)


def _holding(cpu: int, several: list[str]) -> tuple[str, str]:
    """The index of the list that has a hardware thread, and the list."""
    return next((str(at), cpus) for at, cpus in enumerate(several) if cpu in numbers(cpus))
