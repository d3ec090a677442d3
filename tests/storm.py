"""A storm: ranks make random calls while one of them is lost, stopped, wrong or short of something at a random moment.

    python tests/storm.py --trials 2000          # or `make storm TRIALS=2000`
    python tests/storm.py --seed 17 --trials 1   # the trial of this seed once more

Ranks are forked from this process, which has imported torch. In each trial everything but the moment of a signal follows from its seed.
A trial is good if every survivor raises the right error in time, and leaves no thread, file, mapping or process behind. In time is
within a second, or a second after the time limit where nothing else tells, plus what the ranks had to wait for a core.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import random
import re
import resource
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
from support import random_calls
from support.belongings import belongings, kept
from support.hosts import WHY_NOT, Hosts, hosts

import weft
from weft.bench.progress import progress
from weft.world import world as worlds

LIMIT = 3.0  # seconds that a wait may take
PATIENT = 60.0  # the same where ranks compile
SOON = 1.0  # seconds in which survivors raise, or after the time limit where nothing shows that a peer is gone
HANGS = 30.0  # seconds after which a rank that is not through is one that hangs
COMPILES = 120.0  # the same where it may be compiling, whose helpers wait for a core unseen
LATE = ("stop", "cut")  # what nothing shows before the time limit
LACKS = ("memory", "files")  # which a rank may do without
BY_PARENT = ("kill", *LATE)
FAULTS = ("kill", "kill", "stop", "raise", "exit", "leave", "mismatch", "memory", "files")
_CLONE_NEWNET = 0x40000000


class Trial(NamedTuple):
    """What happens, all of which follows from the seed."""

    seed: int
    place: str  # shared memory, hosts or compile
    ranks: int
    fault: str
    victim: int
    phase: str  # init, calls or close
    call: int  # at which the victim itself does it
    delay: float  # seconds from the beginning of the phase until it is done to the victim

    @property
    def limit(self) -> float:
        return PATIENT if self.place == "compile" or self.seed < 0 else LIMIT

    def __str__(self) -> str:
        when = f"{1e3 * self.delay:.1f} ms into {self.phase}" if self.fault in BY_PARENT else f"at call {self.call}"
        return f"seed {self.seed}: {self.fault} of rank {self.victim} of {self.ranks} ({self.place}), {when}"


def trial_of(seed: int, places: tuple[str, ...]) -> Trial:
    """The trial of a seed."""
    draw = random.Random(seed)
    place = draw.choice(places)
    ranks = {"hosts": draw.choice((2, 4)), "compile": 2, "shared": draw.choice((2, 2, 3))}[place]
    fault = draw.choice((*FAULTS, "cut") if place == "hosts" else FAULTS)
    if place == "compile" and fault in LATE:
        fault = "kill"
    phase = draw.choice(("init", "calls", "calls", "calls", "close")) if fault in ("kill", "stop") else "calls"
    phase = "calls" if (place, phase) == ("compile", "init") else phase
    delay = draw.uniform(0, {"init": 0.04, "calls": 0.15, "close": 0.01}[phase]) * (4 if place == "hosts" else 1)
    return Trial(seed, place, ranks, fault, draw.randrange(ranks), phase, draw.randrange(12), delay)


Call = Callable[[worlds.World], Any]


def calls(seed: int, place: str, gradients: bool = True) -> Iterator[Call]:
    """Calls of every public kind for ever, the same on all ranks."""
    draw = random.Random(seed + 1)
    torch.manual_seed(seed)
    grown = 8192
    kinds: list[Callable[[], Call]] = [*KINDS, *([_one_sided] if place != "hosts" else []), *([_gradients] if gradients else [])]
    while True:
        if place == "compile" and draw.random() < 0.3:
            yield compiled
            continue
        if draw.random() < 0.15:  # more rows than any call before: the workspace grows
            grown = grown * 3 // 2
            yield lambda world, rows=grown: weft.all_gather_matmul(torch.ones(rows, 16), torch.eye(16), algorithm="push")
            continue
        yield draw.choice(kinds)(draw)


def _gather_matmul(draw):
    algorithm, rows = draw.choice(("auto", "push", "ring", "sequential")), draw.choice((2, 48))
    return lambda world: weft.all_gather_matmul(torch.randn(rows, 8), torch.eye(8), algorithm=algorithm, chunk_rows=7)


def _matmul_scatter(draw):
    algorithm, rows = draw.choice(("auto", "push", "ring", "sequential")), draw.choice((4, 60))
    return lambda world: weft.matmul_reduce_scatter(torch.randn(rows * 3, 8), torch.eye(8), algorithm=algorithm)


def _matmul_reduce(draw):
    algorithm, rows = draw.choice(("auto", "two_shot", "sequential")), draw.choice((1, 50))
    return lambda world: weft.matmul_all_reduce(torch.randn(rows, 8), torch.eye(8), algorithm=algorithm)


def _collective(draw):
    rows, name = draw.choice((12, 1200)), draw.choice(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"))
    background = draw.random() < 0.4

    def call(world):
        if background:
            return [handle.wait() for handle in [getattr(weft, f"{name}_async")(torch.ones(rows, 5)) for _ in range(3)]]
        return getattr(weft, name)(torch.ones(rows, 5))

    return call


def _broadcast(draw):
    rows, source = draw.choice((1, 3000)), draw.randrange(2)
    return lambda world: weft.broadcast(torch.ones(rows, 3), source % world.ranks)


def _gradients(draw):
    def call(world):
        a, b = torch.ones(6 * world.ranks, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
        weft.matmul_reduce_scatter(weft.all_gather_matmul(a, b).relu(), b.t()).sum().backward()

    return call


def _barrier(draw):
    return lambda world: weft.barrier()


def _empty(draw):
    size = draw.choice((1, 100_000))
    return lambda world: weft.all_reduce(world.empty(size).fill_(1.0))


def _one_sided(draw):
    background = draw.random() < 0.5

    def call(world):
        """Each rank puts to the next, which waits for it and takes the same from it."""
        to, there = (world.rank + 1) % world.ranks, world.empty(500)
        signals = world.signals(2)
        if background:
            weft.put_async(there, torch.ones(500), to).wait()
            weft.notify(signals, 0, to)
        else:
            weft.put_notify(there, torch.ones(500), signals, 0, to)
        weft.wait(signals, 0, ">=", 1)
        weft.get(torch.empty(500), there, to)
        weft.barrier()

    return call


def _checked(draw):
    """A few calls of any kind, some in the background, which must give what they should."""
    seed = draw.randrange(1 << 30)
    return lambda world: random_calls.check(world, seed, 4)


KINDS = [_gather_matmul, _matmul_scatter, _matmul_reduce, _collective, _checked, _broadcast, _barrier, _empty]


def _layer(a, b):
    return weft.matmul_reduce_scatter(weft.all_gather_matmul(a, b).relu(), b.t()).square()


def compiled(world):
    a, b = torch.ones(4, 6, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    torch.compile(_layer, fullgraph=True)(a, b).sum().backward()


def warm() -> None:
    """Use here what ranks will use, so that none of them comes late for having to load it; no thread of it may be there at a fork."""
    torch.set_num_threads(1)
    before = os.listdir("/proc/self/task")
    with weft.init() as world:
        for call in itertools.islice(calls(0, "shared", gradients=False), 80):
            call(world)
    worlds._default = world = call = None  # type: ignore[assignment]
    gc.collect()
    assert os.listdir("/proc/self/task") == before, threading.enumerate()


class Rank:
    """One forked rank: what it is told, and what it says, in lines of JSON."""

    def __init__(self, trial: Trial, rank: int, folder: str, namespace: str | None) -> None:
        said, self.mouth = os.pipe()
        self.ear, told = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(said)
            os.close(told)
            self._live(trial, rank, folder, namespace)
        os.close(self.mouth)
        os.close(self.ear)
        self.said, self.told, self.status, self.lines, self.rest = said, told, None, [], b""

    def tell(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.told, b".")

    def heard(self, what: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if line["what"] == what), None)

    def listen(self) -> None:
        *whole, self.rest = (self.rest + os.read(self.said, 65536)).split(b"\n")
        self.lines += [json.loads(line) for line in whole]

    def close(self) -> None:
        os.close(self.said)
        os.close(self.told)

    def _say(self, what: str, **more: Any) -> None:
        os.write(self.mouth, json.dumps({"what": what, "when": time.monotonic(), **more}).encode() + b"\n")

    def _live(self, trial: Trial, rank: int, folder: str, namespace: str | None) -> None:
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if trial.fault != "memory" or rank != trial.victim:  # which may end in any way
                faulthandler.enable()  # which says where a rank that hangs is aborted
            if namespace:
                with open(f"/run/netns/{namespace}") as file:
                    assert not ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET)
                os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            before = belongings()
            store = dist.FileStore(f"{folder}/{trial.seed}", trial.ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.ranks, timeout=timedelta(seconds=HANGS))
            self._say("ready")
            os.read(self.ear, 1)
            self._work(trial, rank)
            os.read(self.ear, 1)  # all are through; what comes now is nobody's loss
            worlds._default = None
            dist.destroy_process_group()
            del store
            self._say("left", kept=kept(before, trial.place == "compile"))
            status = 0
        except BaseException:
            self._say("broken", text=traceback.format_exc())
        finally:
            os._exit(status)

    def _work(self, trial: Trial, rank: int) -> None:
        error: BaseException | None = None
        limits = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            with weft.init(timeout=trial.limit) as world:
                if trial.place == "compile":
                    compiled(world)  # that some ranks compile for longer than others is no lateness
                self._say("world")
                for number, call in enumerate(calls(trial.seed, trial.place)):
                    if number == (3 if trial.phase == "close" else trial.call + 20 if trial.fault in LACKS else -1):
                        break
                    if rank == trial.victim and number == trial.call and trial.fault not in BY_PARENT:
                        call = self._wrong(trial.fault, world, call)
                        if call is None:
                            return
                    call(world)
                self._say("closing")
        except BaseException as caught:
            error = caught
        resource.setrlimit(resource.RLIMIT_AS, limits[0])
        resource.setrlimit(resource.RLIMIT_NOFILE, limits[1])
        text = "" if error is None else str(error)
        trace = "" if error is None else "".join(traceback.format_exception(error))
        busy = starved(os.getpid())
        self._say("over", starved=busy, kind=type(error).__name__, weft=isinstance(error, weft.WeftError), text=text, trace=trace)

    def _wrong(self, fault: str, world: worlds.World, call: Call) -> Call | None:
        """What the victim calls instead; None if it is through."""
        self._say("fault")
        if fault == "exit":
            os._exit(3)
        if fault == "raise":
            raise ValueError("a storm")
        if fault == "leave":
            world.close()
            self._say("over", starved=0.0, kind="NoneType", weft=False, text="", trace="")
            return None
        if fault == "mismatch":
            return lambda world: weft.all_gather(torch.ones(world.rank + 7, 3, dtype=torch.float64), algorithm="push")
        if fault == "memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (1 << 20), -1))
        if fault == "files":
            os.close(free := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return call


def starved(pid: int) -> float:
    """Seconds for which the threads of a process have waited for a core: on a busy machine nobody is to blame for these."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[1])
    return total / 1e9


class Outcome(NamedTuple):
    """What became of a trial: what is wrong with it, if anything, and by how many seconds survivors were late."""

    wrong: list[str]
    delays: list[float]


def run(trial: Trial, folder: str, net: Hosts | None) -> Outcome:
    """Make a trial."""
    names = [net.names[rank * 2 // trial.ranks] if net and trial.place == "hosts" else None for rank in range(trial.ranks)]
    ranks = [Rank(trial, rank, folder, names[rank]) for rank in range(trial.ranks)]
    victim = ranks[trial.victim]
    survivors = [each for each in ranks if each is not victim or trial.fault in ("cut", "mismatch")]
    waited: dict[int, float] = {}  # how long each rank had waited for a core when it happened

    def until(condition: Callable[[], bool], limit: float = HANGS) -> bool:
        began, busy = time.monotonic(), {each.pid: starved(each.pid) for each in ranks}
        while not condition():
            living = [each for each in ranks if each.status is None]
            poll = select.poll()
            for each in living:
                poll.register(each.said, select.POLLIN)
            ready = [fd for fd, _ in poll.poll(5)]
            for each in living:
                if each.said in ready:
                    each.listen()
                pid, status = os.waitpid(each.pid, os.WNOHANG)
                if pid:
                    while (
                        select.select([each.said], [], [], 0)[0]
                        and (size := len(each.lines), each.listen())
                        and len(each.lines) > size
                    ):
                        pass
                    each.status = status
                    each.lines.append({"what": "dead", "when": time.monotonic()})
            if not waited and victim.heard("fault"):
                waited.update({each.pid: starved(each.pid) for each in living})
            took = time.monotonic() - began
            if took > limit and took - sum(max(0.0, starved(each.pid) - busy[each.pid]) for each in living) > limit:
                return False
        return True

    wrong: list[str] = []
    begun = 0.0
    try:
        if not until(lambda: all(each.heard("ready") for each in ranks)):
            return Outcome([f"ranks do not begin: {[each.lines for each in ranks]}"], [])
        for each in ranks:
            each.tell()
        if trial.fault in BY_PARENT:
            sign = {"init": "ready", "calls": "world", "close": "closing"}[trial.phase]
            until(lambda: all(each.heard(sign) or each.heard("over") for each in ranks), trial.limit + HANGS)
            time.sleep(trial.delay)
            waited.update({each.pid: starved(each.pid) for each in ranks})
            begun = time.monotonic()
            if trial.fault == "cut":
                assert net is not None
                net.cut_off(1)
            else:
                os.kill(victim.pid, signal.SIGKILL if trial.fault == "kill" else signal.SIGSTOP)
        ended = lambda each: each.heard("over") or each.heard("broken") or each.heard("dead")  # noqa: E731
        hangs = COMPILES if trial.place == "compile" else HANGS
        if not until(lambda: all(ended(each) for each in survivors), trial.limit + hangs):
            stuck = [ranks.index(each) for each in survivors if not ended(each)]
            wrong.append(f"ranks {stuck} hang")
            for at in stuck:
                os.kill(ranks[at].pid, signal.SIGABRT)  # which faulthandler shows
        if trial.fault == "stop":
            os.kill(victim.pid, signal.SIGCONT)
        if trial.fault == "cut" and net:
            net.reconnect(1)
        if not wrong and not until(lambda: ended(victim)):
            wrong.append(f"rank {trial.victim}, the victim, hangs")
        for each in ranks:
            each.tell()
        if not until(lambda: all(each.status is not None for each in ranks), 15.0):
            wrong.append(f"processes are left: {[ranks.index(each) for each in ranks if each.status is None]}")
            for each in ranks:
                if each.status is None:
                    os.kill(each.pid, signal.SIGABRT)
            until(lambda: all(each.status is not None for each in ranks), 5.0)
    finally:
        for each in ranks:
            if each.status is None:
                os.kill(each.pid, signal.SIGKILL)
                os.waitpid(each.pid, 0)
            each.close()
    if fault := victim.heard("fault"):
        begun = fault["when"]
    if trial.fault in LACKS:  # noticed when the victim lacks something
        begun = max(begun, min(line["when"] for line in victim.lines if line["what"] in ("over", "dead")))
    delays = []
    slack = sum(
        max(0.0, over["starved"] - waited[each.pid]) for each in ranks if (over := each.heard("over")) and each.pid in waited
    )
    for rank, each in enumerate(ranks):
        if each not in survivors and trial.fault not in ("leave", "raise", *LACKS):
            continue
        over, left = each.heard("over"), each.heard("left")
        if each in survivors or trial.fault == "leave":
            if over is None or left is None:
                wrong.append(f"rank {rank} ended with {each.status}: {[line for line in each.lines if line['what'] == 'broken']}")
                continue
            if left["kept"]:
                wrong.append(f"rank {rank} keeps {left['kept']}")
        if each in survivors and over is not None:
            complaint = judge(trial, over)
            if complaint:
                wrong.append(f"rank {rank} {complaint}: {over['kind']}: {over['text']}\n{over['trace']}")
            late = over["when"] - begun - (trial.limit if trial.fault in LATE else 0.0)
            if over["kind"] != "NoneType":
                delays.append(late)
                if late > SOON + slack:
                    wrong.append(f"rank {rank} was {late:.2f} s late (ranks waited {slack:.2f} s for a core): {over['text']}")
    return Outcome(wrong, delays)


def judge(trial: Trial, over: dict[str, Any]) -> str:
    """What is wrong with how a survivor's calls ended."""
    kind, named = over["kind"], re.search(rf"\brank {trial.victim}\b", over["text"])
    if kind == "NoneType" and (trial.phase == "close" or trial.fault in LACKS):
        return ""
    if not over["weft"]:
        return "raised what is no WeftError"
    if trial.phase == "init":
        expected = {"PeerLost", "PeerTimeout"}
    elif trial.fault in LATE:
        return "" if kind in ("PeerTimeout", "PeerLost") else "raised something else than PeerTimeout"
    elif trial.fault in LACKS:
        expected = {"PeerLost", "SymmetricMemoryError"}
    elif trial.fault == "mismatch":
        expected = {"MismatchError"}
    else:
        expected = {"PeerLost"}
    if kind not in expected:
        return f"raised something else than {' or '.join(sorted(expected))}"
    return "" if named or trial.phase == "init" or kind == "MismatchError" else f"does not name rank {trial.victim}"


def storm(seeds: range, places: tuple[str, ...], shown: bool = True) -> tuple[dict[str, list[float]], list[str]]:
    """Make the trials of these seeds: delays by fault and place, and all that is wrong, with the seeds."""
    delays: dict[str, list[float]] = defaultdict(list)
    bad: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for name, value in (("TORCHINDUCTOR_CACHE_DIR", folder), ("TORCHINDUCTOR_COMPILE_THREADS", "1"), ("WEFT_CACHE", folder)):
            os.environ.setdefault(name, value)
        warm()
        net = stack.enter_context(hosts(2, gbps=10)) if "hosts" in places else None
        for place, ranks in (("shared", 2), *((("compile", 2),) if "compile" in places else ())):
            # How to multiply is measured once, and what is compiled is found in the cache from then on.
            run(Trial(-ranks, place, ranks, "leave", 0, "calls", 60, 0.0), folder, None)
        step = stack.enter_context(progress("trials", len(seeds), shown=shown))
        for seed in seeds:
            trial = trial_of(seed, places)
            outcome = run(trial, folder, net)
            delays[f"{trial.fault}, {trial.place}" + (" (init)" if trial.phase == "init" else "")] += outcome.delays
            if outcome.wrong:
                bad.append("\n".join([str(trial), *outcome.wrong]))
                print(bad[-1], flush=True)
            step()
    if net and any(Path(f"/run/netns/{name}").exists() for name in [net.hub, *net.names]):
        bad.append("network namespaces are left")
    return delays, bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, help="of the first trial; a random one if not given")
    parser.add_argument("--places", default="shared,shared,shared,hosts,hosts,compile", help="where ranks are, drawn by chance")
    options = parser.parse_args()
    places = tuple(options.places.split(","))
    if WHY_NOT and "hosts" in places:
        print(f"no hosts: {WHY_NOT}")
        places = tuple(place for place in places if place != "hosts")
    first = random.randrange(1_000_000) if options.seed is None else options.seed
    begun = time.monotonic()
    delays, bad = storm(range(first, first + options.trials), places)
    for kind, late in sorted(delays.items()):
        if late:
            print(f"{kind:30} {len(late):6} survivors, the last {max(late):6.3f} s late")
    print(f"{options.trials} trials from seed {first} on in {time.monotonic() - begun:.0f} s, {len(bad)} failures")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
