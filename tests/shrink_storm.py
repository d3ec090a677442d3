"""A storm of losses: ranks in random calls are killed at random moments, the others shrink the
world, and replacements join.

    python tests/shrink_storm.py --rounds 300              # four ranks on this host
    python tests/shrink_storm.py --rounds 300 --hosts      # on two hosts: network namespaces
    python tests/shrink_storm.py --rounds 1 --seed 17      # one round; its seed decides all but time

Each round kills one rank, two at once, or a second one shortly after the first, so that it dies
while the others shrink; of each host one rank lives. Every rank checks every result. Reported is the time from the last SIGKILL
of a round to the next right result of each survivor, and from the fork of the replacements to the
next right result of all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from support.hosts import Hosts, hosts

import weft
from weft.world import init_by_store
from weft.world.registry import make_default

_HANGS = 30.0  # seconds without a report after which a rank hangs
_TIMEOUT = 20.0  # seconds of every wait of the ranks


class Rank:
    """A forked rank, and what it reports: lines of JSON."""

    def __init__(self, network: str | None, run: Any) -> None:
        self.reports, out = os.pipe()
        self.commands_in, self.commands = os.pipe()
        self.network = network
        self.rest = b""
        self.ended = False
        self.pid = os.fork()
        if self.pid:
            os.close(out)
            os.close(self.commands_in)
            return
        code = 1
        try:
            os.close(self.reports)
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR1)
            if network:
                with open(f"/run/netns/{network}") as file:
                    assert not ctypes.CDLL(None).setns(file.fileno(), 0)
            live(run(), out, self.commands_in)
            code = 0
        except BaseException as error:
            tell(out, event="wrong", text=f"{type(error).__name__}: {error}")
            raise
        finally:
            os._exit(code)

    def read(self) -> list[dict[str, Any]]:
        found = os.read(self.reports, 1 << 20)
        if not found:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.ended = True
            return [{"event": "wrong", "text": f"process {self.pid} ended with {status}"}]
        *lines, self.rest = (self.rest + found).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.reports)
        os.close(self.commands)


def tell(out: int, **report: Any) -> None:
    os.write(
        out, json.dumps(report | {"when": time.monotonic(), "pid": os.getpid()}).encode() + b"\n"
    )


def check(world: weft.World, number: int) -> None:
    """Make one of several calls, and check its result."""
    ranks = world.ranks
    own = torch.full((8, 16), float(world.rank + 1))
    of_all = [torch.full((8, 16), float(rank + 1)) for rank in range(ranks)]
    match number % 5:
        case 0:
            assert torch.equal(weft.all_reduce(own, world=world), sum(of_all[1:], of_all[0]))
        case 1:
            assert torch.equal(weft.all_gather(own, world=world), torch.cat(of_all))
        case 2:
            weight = torch.ones(16, 4)
            found = weft.all_gather_matmul(own, weight, world=world)
            assert torch.equal(found, torch.cat(of_all) @ weight)
        case 3:
            weight = torch.ones(16, 4)
            found = weft.matmul_all_reduce(own, weight, world=world)
            assert torch.equal(found, sum(of_all[1:], of_all[0]) @ weight)
        case 4:
            handle = weft.all_reduce_async(own, world=world)
            torch.ones(64, 64) @ torch.ones(64, 64)  # outside of calls
            assert torch.equal(handle.wait(), sum(of_all[1:], of_all[0]))


def live(world: weft.World, out: int, commands: int) -> None:
    """Make calls; shrink the world after each loss, and let others join when told to."""
    number = 0
    check(world, 0)
    tell(out, event="right", ranks=world.ranks)
    while True:
        try:
            check(world, number)
            number += 1
            # all ranks learn of a command in the same call
            told = len(os.read(commands, 1)) if select.select([commands], [], [], 0)[0] else 0
            joiners = int(weft.all_reduce(torch.tensor(told), op="max", world=world))
            if joiners:
                lost = int.from_bytes(os.read(commands, 1), "little") if told else 0
                lost = int(weft.all_reduce(torch.tensor(lost), op="max", world=world))
                if lost == 255:
                    world.close()
                    return
                world = world.grow(lost)
                number = 0
                check(world, number)
                tell(out, event="right", ranks=world.ranks)
        except weft.WeftError:
            before = world
            while True:
                try:
                    world = before.shrink()
                    check(world, 0)
                    break
                except weft.PeerLost:  # another one, meanwhile
                    before = world
            number = 0
            tell(
                out,
                event="right",
                ranks=world.ranks,
                rank=world.rank,
                invitation=world.invitation() if world.rank == 0 else "",
            )


class Storm:
    def __init__(self, ranks: int, net: Hosts | None) -> None:
        self.net = net
        self.count = ranks
        self.wrong: list[str] = []
        self.shrinks: list[float] = []
        self.rejoins: list[float] = []
        networks = [net.names[rank * 2 // ranks] if net else None for rank in range(ranks)]
        folder = os.environ["WEFT_CACHE"]
        self.ranks = [
            Rank(network, lambda rank=rank: first_world(rank, ranks, folder))
            for rank, network in enumerate(networks)
        ]

    def until_right(self, ranks: int, of: list[Rank]) -> list[dict[str, Any]]:
        """The reports of right results in a world of so many ranks; none if there is a fault."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _HANGS
        while len(found) < len(of):
            ready, _, _ = select.select([each.reports for each in of], [], [], 1.0)
            for each in [each for each in of if each.reports in ready]:
                for report in each.read():
                    if report["event"] == "wrong":
                        self.wrong.append(report["text"])
                        return []
                    if report["ranks"] == ranks:
                        found[each.pid] = report
            if time.monotonic() > deadline:
                late = [each.pid for each in of if each.pid not in found]
                for pid in late:
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(1)
                self.wrong.append(f"ranks {late} hang, others {found}")
                return []
        return [*found.values()]

    def round(self, seed: int) -> bool:
        """Kill and replace; whether all was right."""
        chance = random.Random(seed)
        time.sleep(chance.uniform(0.0, 0.02))
        kind = chance.choice(["one", "one", "both", "after"]) if self.count > 2 else "one"
        victims = chance.sample(self.ranks, 1 if kind == "one" else 2)
        while self.net and {each.network for each in self.ranks if each not in victims} < {
            each.network for each in self.ranks
        }:  # of a host that is lost as a whole nobody knows, and half of the ranks would wait
            victims = chance.sample(self.ranks, len(victims))
        for number, each in enumerate(victims):
            if number and kind == "after":
                time.sleep(chance.uniform(0.0, 0.06))
            os.kill(each.pid, signal.SIGKILL)
        killed = time.monotonic()
        left = [each for each in self.ranks if each not in victims]
        reports = self.until_right(len(left), left)
        if not reports:
            return False
        self.shrinks += [report["when"] - killed for report in reports]
        text = next(report["invitation"] for report in reports if report["rank"] == 0)
        for each in victims:
            each.end()
        forked = time.monotonic()
        new = [Rank(each.network, lambda: weft.join(text, timeout=_TIMEOUT)) for each in victims]
        self.ranks = left + new
        os.write(left[0].commands, bytes([1, len(new)]))
        reports = self.until_right(self.count, self.ranks)
        if reports:
            self.rejoins.append(max(report["when"] for report in reports) - forked)
        return bool(reports)

    def close(self) -> None:
        for each in self.ranks:
            each.end()


def first_world(rank: int, ranks: int, folder: str) -> weft.World:
    world = init_by_store(torch.distributed.FileStore(f"{folder}/store", -1), rank, ranks, _TIMEOUT)
    make_default(world)
    return world


@contextlib.contextmanager
def cache() -> Iterator[None]:
    """A cache directory for this storm, and one process that has measured products."""
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="weft-shrink-storm-")
    try:
        os.environ |= {"WEFT_CACHE": folder, "GLOO_SOCKET_IFNAME": "eth0"}
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", action="store_true", help="on two hosts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cache())
        net = stack.enter_context(hosts(2)) if options.hosts else None
        with weft.init() as world:
            for number in range(10):
                check(world, number)
        weft.world.registry.default = world = None
        gc.collect()
        storm = Storm(options.ranks, net)
        stack.callback(storm.close)
        rounds = 0
        if storm.until_right(options.ranks, storm.ranks):
            for seed in range(options.seed, options.seed + options.rounds):
                rounds += 1
                if not storm.round(seed):
                    print(f"round {seed}: {storm.wrong}", flush=True)
                    break
        files = [len(os.listdir(f"/proc/{each.pid}/fd")) for each in storm.ranks if not each.ended]
        threads = [
            len(os.listdir(f"/proc/{each.pid}/task")) for each in storm.ranks if not each.ended
        ]
    for what, times in (("shrink", storm.shrinks), ("rejoin", storm.rejoins)):
        if times:
            print(
                f"{what}: median {1e3 * median(times):.1f} ms, longest {1e3 * max(times):.1f} ms, "
                f"{len(times)} times"
            )
    print(f"{rounds} rounds, files {files}, threads {threads}, {len(storm.wrong)} failures")
    sys.exit(bool(storm.wrong) or rounds < options.rounds)


if __name__ == "__main__":
    main()
