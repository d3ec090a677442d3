"""Real hosts for tests: network namespaces that a bridge joins, each with an address and a shaped
link of its own.

Ranks are started by torchrun, one agent per host, by mpiexec, or as forks of one process, which is
faster. All namespaces and processes are gone at the end of the ``with`` block.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

FIRST, PORT = "10.77.0.1", 29400  # the address and port of the rendezvous
WHY_NOT = (
    "network namespaces need root"
    if os.geteuid()
    else "network namespaces need iproute2 (ip, tc)"
    if not (shutil.which("ip") and shutil.which("tc"))
    else ""
)
needs_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
_TIME = ["unshare", "--time", "true"]  # fails where the kernel or util-linux is too old
AHEAD = (
    0
    if WHY_NOT
    or not shutil.which("unshare")
    or subprocess.run(_TIME, capture_output=True).returncode
    else 1000
)
"""Seconds by which the monotonic clock of each host is ahead of the one before, where there are
time namespaces.
"""
_numbers = itertools.count()  # several sets of hosts may exist at a time


class Hosts:
    """`count` namespaces on one bridge, which has a namespace of its own; host i has the address
    10.77.0.i+1. Its processes have the variables `environment` besides.
    """

    environment: Mapping[str, str] = {}

    def __init__(self, count: int, gbps: float | None = None) -> None:
        prefix = f"weft{os.getpid()}n{next(_numbers)}"
        self.hub, self.names = f"{prefix}hub", [f"{prefix}h{i}" for i in range(count)]
        self.running: list[tuple[subprocess.Popen[str], IO[str]]] = []
        for name in [self.hub, *self.names]:
            ip("netns", "add", name)
        ip("-n", self.hub, "link", "add", "hub", "type", "bridge")
        ip("-n", self.hub, "link", "set", "hub", "up")
        for i, name in enumerate(self.names):
            self.join(i, name)
            ip("-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        if gbps:
            self.shape(gbps)

    def join(self, host: int, name: str) -> None:
        """Make the interface of a host, and its port of the bridge."""
        ip(
            "-n",
            self.hub,
            "link",
            "add",
            f"port{host}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            name,
        )
        ip("-n", self.hub, "link", "set", f"port{host}", "master", "hub", "up")

    def name_itself(self, host: str, address: str | None) -> None:
        """Give the name of this machine an address on a host, or none."""
        files = Path("/etc/netns") / host  # `ip netns exec` puts them into /etc
        files.mkdir(parents=True, exist_ok=True)
        entry = f"{address} {socket.gethostname()}\n" if address else ""
        (files / "hosts").write_text(f"127.0.0.1 localhost\n{entry}")

    def shape(self, gbps: float) -> None:
        """Limit the bandwidth of every host, in both directions, to `gbps`."""
        # bytes of a burst: packets are larger than on a wire before their segmentation
        burst = max(72 << 10, int(gbps * 1e9 / 8 / 4000))
        for i, name in enumerate(self.names):
            for place, device in ((name, "eth0"), (self.hub, f"port{i}")):
                limit = ["rate", f"{gbps}gbit", "burst", str(burst), "latency", "50ms"]
                command(
                    ["tc", "-n", place, "qdisc", "replace", "dev", device, "root", "tbf", *limit]
                )

    def cut_off(self, host: int) -> None:
        """Take the host's interface down."""
        ip("-n", self.hub, "link", "set", f"port{host}", "down")

    def refuse(self, how: str) -> None:
        """Let a firewall on every host do so with what it sends to the others: drop it, or reject it,
        as `how` says in the words of nft.
        """
        for name in self.names:
            chain = "type filter hook output priority 0; oifname eth0 meta l4proto tcp " + how
            table = f"table ip weft {{ chain out {{ {chain}; }}; }}"
            command(["ip", "netns", "exec", name, "nft", table])

    def allow(self) -> None:
        """Take the firewall of `refuse` away."""
        for name in self.names:
            command(["ip", "netns", "exec", name, "nft", "delete table ip weft"], check=False)

    def reconnect(self, host: int) -> None:
        ip("-n", self.hub, "link", "set", f"port{host}", "up")

    def start(
        self, script: Path, ranks: int, *arguments: object, python: str = sys.executable
    ) -> None:
        """Start `ranks` ranks on each host by torchrun of `python`, each bound to a core if the
        machine has enough; all clocks differ.
        """
        cores = sorted(os.sched_getaffinity(0))
        for i, name in enumerate(self.names):
            pin = ["taskset", "-c", str(cores[i % len(cores)])] if ranks == 1 else []
            clock = ["unshare", "--time", "--monotonic", str(i * AHEAD)] if AHEAD else []
            torchrun = [
                python,
                "-m",
                "torch.distributed.run",
                f"--nnodes={len(self.names)}",
                f"--node-rank={i}",
            ]
            torchrun += [
                f"--nproc-per-node={ranks}",
                f"--master-addr={FIRST}",
                f"--master-port={PORT}",
                "--monitor-interval=0.05",
            ]
            words = [
                "ip",
                "netns",
                "exec",
                name,
                *clock,
                *pin,
                *torchrun,
                str(script),
                *map(str, arguments),
            ]
            self._begin(words, os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"})

    def start_forked(
        self, *arguments: object, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a rank of `host_ranks` on each host, forked by one process that has imported their
        modules.
        """
        self._begin(
            [sys.executable, "-m", "support.forked", *self.names, "--", *map(str, arguments)],
            os.environ | (environment or {}),
        )

    def start_by_mpi(self, mpiexec: str, folder: Path, script: Path, *arguments: object) -> None:
        """Start a rank on each host by Hydra's mpiexec on the first; a script in place of ssh
        starts its proxies on the other hosts.
        """
        agent, addresses = folder / "agent", [f"10.77.0.{i + 1}" for i in range(len(self.names))]
        cases = [
            f'{at}) exec ip netns exec {name} sh -c "$*" ;;'
            for at, name in zip(addresses, self.names, strict=True)
        ]
        # Hydra calls it with -x, the host and the command
        agent.write_text(
            "\n".join(
                ["#!/bin/sh", "shift", "host=$1", "shift", "case $host in", *cases, "esac", ""]
            )
        )
        agent.chmod(0o755)
        launcher = [
            "-launcher",
            "ssh",
            "-launcher-exec",
            str(agent),
            "-iface",
            "eth0",
            "-hosts",
            ",".join(addresses),
            "-ppn",
            "1",
        ]
        variables = {
            "MASTER_ADDR": addresses[0],
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        launcher += [word for name, value in variables.items() for word in ("-genv", name, value)]
        ranks = [
            *launcher,
            "-n",
            str(len(addresses)),
            sys.executable,
            str(script),
            *map(str, arguments),
        ]
        self._begin(["ip", "netns", "exec", self.names[0], mpiexec, *ranks], dict(os.environ))

    def _begin(self, words: Sequence[str], environment: dict[str, str]) -> None:
        out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        agent = subprocess.Popen(
            words,
            stdout=out,
            stderr=out,
            text=True,
            env=environment | self.environment | {"PYTHONFAULTHANDLER": "1"},
            start_new_session=True,
        )
        self.running.append((agent, out))

    def wait_for(self, folder: Path, name: str, limit: float = 60.0) -> None:
        """Wait until the rank of each host has written its file of this name and its number, or an
        agent has ended, whose output says why.
        """
        files = [folder / f"{name}{rank}" for rank in range(len(self.names))]
        deadline = time.monotonic() + limit
        while missing := [file.name for file in files if not file.exists()]:
            if any(agent.poll() is not None for agent, _ in self.running):
                return
            if time.monotonic() > deadline:
                self.finish(limit=0)
                raise AssertionError(f"no {', '.join(missing)} after {limit:.0f} s")
            time.sleep(0.01)

    def finish(self, limit: float = 90.0) -> list[tuple[int, str]]:
        """Wait for all agents; their exit codes and output, with the stacks of ranks that did not
        end.
        """
        deadline, ended = time.monotonic() + limit, []
        for agent, out in self.running:
            try:
                agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGABRT)  # Python's fault handler prints the stacks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(10)
                kill(agent)
            out.seek(0)
            ended.append((agent.returncode, out.read()))
            out.close()
            # pytest shows the complete text of a test that fails
            print(f"an agent ended with {ended[-1][0]}:\n{ended[-1][1]}")
        self.running.clear()
        return ended

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes on the hosts."""
        for name in [*self.names, self.hub]:
            for pid in command(["ip", "netns", "pids", name], check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)

    def close(self) -> None:
        for agent, _ in self.running:
            kill(agent)
        self._signal(signal.SIGKILL)
        for name in [*self.names, self.hub]:
            ip("netns", "delete", name, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@contextlib.contextmanager
def hosts(
    count: int, gbps: float | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Hosts]:
    """Hosts that exist until the end of the block."""
    made = Hosts.__new__(Hosts)
    made.environment = environment or {}
    try:
        made.__init__(count, gbps)  # type: ignore[misc]
        yield made
    finally:
        made.close()


def kill(agent: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()


def ip(*words: str, check: bool = True) -> None:
    command(["ip", *words], check)


def command(words: Sequence[str], check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stderr}"
    return done.stdout
