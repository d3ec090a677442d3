"""The script of ranks on several hosts: it runs the named checks of `on_hosts`, and writes their
results to a folder.

    torchrun … host_ranks.py operators,traffic FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import weft
from support.on_hosts.commands import benches, doctor, doctor_by_ucx
from support.on_hosts.losses import (
    behind_a_firewall,
    cut_off,
    full_socket,
    gives_up,
    halfway,
    has_a_child,
    killed,
    leaves,
    long_linger,
    mismatch,
    transports_differ,
)
from support.on_hosts.onesided import dies_while_called, one_sided
from support.on_hosts.results import (
    calls_at_random,
    experts_of_hosts,
    many_shapes,
    operators,
    refusals,
    sums_to_the_bit,
)
from support.on_hosts.traffic import traces, traffic
from support.on_hosts.wires import cut_for_ever, few_calls, goes_on

IN_A_WORLD = (
    operators,
    calls_at_random,
    experts_of_hosts,
    sums_to_the_bit,
    many_shapes,
    refusals,
    traffic,
    traces,
    one_sided,
    few_calls,
    has_a_child,
)
WITHOUT_A_WORLD = (
    mismatch,
    gives_up,
    doctor,
    doctor_by_ucx,
    leaves,
    transports_differ,
)
WITH_A_FOLDER = (
    behind_a_firewall,
    benches,
    cut_off,
    full_socket,
    halfway,
    killed,
    dies_while_called,
    goes_on,
    cut_for_ever,
)
CHECKS = {check.__name__: check for check in (*IN_A_WORLD, *WITHOUT_A_WORLD, *WITH_A_FOLDER)}


def result(check, folder):
    """The result of a check on this rank."""
    if check in WITH_A_FOLDER:
        return check(folder)
    if check in WITHOUT_A_WORLD:
        return check()
    with long_linger(), weft.init(timeout=20) as world:
        return check(world)


def main():
    torch.set_num_threads(1)
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    for name in names:
        found = result(CHECKS[name], folder)
        (folder / f"{name}{os.environ['RANK']}").write_text(json.dumps(found))
    if {"killed", "dies_while_called", "cut_for_ever", "behind_a_firewall"} & {
        *names
    }:  # agents would wait minutes for ranks that succeed after others failed
        os._exit(1)


if __name__ == "__main__":
    main()
