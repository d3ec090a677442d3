"""The making of a trial: fork the ranks, inject the fault, read the events they report, and check
their endings.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from support.hosts import Hosts
from support.storm.machine import busy_cores, children, main_thread_starved, starved
from support.storm.rank import HANGS, Part, ending
from support.storm.trial import RIGHT, Kind, Trial

# seconds within which survivors raise, counted from the time limit where nothing else shows the
# loss
SOON = 1.0
# seconds after which a compiling rank hangs; the waits of its compiler's processes are not counted
COMPILES = 120.0
# the event that a rank reports as a phase begins
_FIRST_EVENTS = {
    "init": "ready",
    "meeting": "meeting",
    "calls": "world",
    "close": "closing",
}
_CLONE_NEWPID = 0x20000000


class Rank:
    """One forked rank: the pipe of its events, as lines of JSON, and the pipe that lets it continue."""

    def __init__(
        self, trial: Trial, kind: Kind, rank: int, folder: str, network: str | None
    ) -> None:
        self.event_pipe, events_out = os.pipe()
        go_in, self.go_pipe = os.pipe()
        with _pid_namespace(kind.own_pids):
            self.pid = os.fork()
        if not self.pid:
            os.close(self.event_pipe)
            os.close(self.go_pipe)
            Part(trial, rank, folder, events_out, go_in).live(kind, network)
        os.close(events_out)
        os.close(go_in)
        self.status: int | None = None
        self.starved_at_end = 0.0  # the main thread
        self.events: list[dict[str, Any]] = []
        self.rest = b""

    def let_go_on(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.go_pipe, b".")

    def event(self, name: str) -> dict[str, Any] | None:
        return next((event for event in self.events if event["event"] == name), None)

    def ended(self) -> bool:
        return any(self.event(name) for name in ("over", "broken", "dead"))

    def listen(self) -> bool:
        """Read the events that the rank has reported; whether there were any."""
        found = os.read(self.event_pipe, 65536)
        *complete, self.rest = (self.rest + found).split(b"\n")
        self.events += [json.loads(line) for line in complete]
        return bool(found)

    def look(self) -> None:
        """Record the end of the process, if it has ended."""
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            while select.select([self.event_pipe], [], [], 0)[0] and self.listen():
                pass
            self.starved_at_end = main_thread_starved(self.pid)
            _, self.status = os.waitpid(self.pid, 0)
            self.events.append({"event": "dead", "when": time.monotonic()})

    def kill(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.event_pipe)
        os.close(self.go_pipe)


class Scene:
    """The running ranks of a trial; `waited` is the time that each had waited for a core when the
    fault occurred.
    """

    def __init__(self, trial: Trial, kind: Kind, folder: str, net: Hosts | None) -> None:
        self.trial, self.kind, self.net = trial, kind, net
        networks = [
            net.names[rank * 2 // trial.ranks] if net and trial.place == "hosts" else None
            for rank in range(trial.ranks)
        ]
        self.ranks = [
            Rank(trial, kind, rank, folder, network) for rank, network in enumerate(networks)
        ]
        self.victim = self.ranks[trial.victim]
        self.others = [each for each in self.ranks if each is not self.victim]
        self.waited: dict[int, float] = {}
        self.main_thread_waited = 0.0  # of the victim

    def until(self, condition: Callable[[], bool], limit: float = HANGS) -> bool:
        """Read events until a condition holds; False if it does not hold within `limit` seconds in
        which no rank waits for a core.
        """
        began, busy = time.monotonic(), {each.pid: starved(each.pid) for each in self.ranks}
        while not condition():
            living = [each for each in self.ranks if each.status is None]
            poll = select.poll()
            for each in living:
                poll.register(each.event_pipe, select.POLLIN)
            ready = [fd for fd, _ in poll.poll(5)]
            for each in living:
                if each.event_pipe in ready:
                    each.listen()
                each.look()
            if not self.waited and self.victim.event("fault"):
                self.note()
            took = time.monotonic() - began
            if (
                took > limit
                and took - sum(max(0.0, starved(each.pid) - busy[each.pid]) for each in living)
                > limit
            ):
                return False
        return True

    def note(self) -> None:
        """Record how long ranks have waited for a core so far."""
        self.waited = {each.pid: starved(each.pid) for each in self.ranks}
        if self.victim.status is None:
            self.main_thread_waited = main_thread_starved(self.victim.pid)

    def slack(self) -> float:
        """Seconds that ranks have waited for a core since `note`, also the victim while it ends."""
        overs = [(each.pid, over["starved"]) for each in self.ranks if (over := each.event("over"))]
        waited = [max(0.0, busy - self.waited[pid]) for pid, busy in overs if pid in self.waited]
        if self.waited and not self.victim.event("over"):
            waited.append(max(0.0, self.victim.starved_at_end - self.main_thread_waited))
        return sum(waited)

    def abort(self, ranks: list[Rank]) -> list[int]:
        """Abort hanging ranks, whose stacks faulthandler prints; their numbers."""
        for each in ranks:
            each.kill(signal.SIGABRT)
        return [self.ranks.index(each) for each in ranks]


class Outcome(NamedTuple):
    """The complaints about a trial, if any, and by how many seconds survivors were late."""

    wrong: list[str]
    delays: list[float]


def run(trial: Trial, kind: Kind, net: Hosts | None) -> Outcome:
    """Make a trial."""
    folder = tempfile.mkdtemp(prefix="weft-storm-")
    earlier = children()
    try:
        with busy_cores(trial.busy):
            scene = Scene(trial, kind, folder, net)
            try:
                wrong, fault_at = _played(scene)
            finally:
                for each in scene.ranks:
                    each.close()
        wrong += _left(scene, earlier)
        late = _delays(scene, fault_at)
        wrong += [
            complaint
            for rank, each in enumerate(scene.ranks)
            if (complaint := _judged(scene, rank, each))
        ]
        slack = scene.slack()
        wrong += [
            f"rank {rank} was {by:.2f} s late (ranks waited {slack:.2f} s for a core)"
            for rank, by in late
            if by > SOON + slack
        ]
        if wrong:
            output = {
                path.name: path.read_text(errors="replace").strip()
                for path in sorted(Path(folder).glob("output of *"))
            }
            wrong += [f"{name}:\n{text[-6000:]}" for name, text in output.items() if text]
        return Outcome(wrong, [by for _, by in late])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _played(scene: Scene) -> tuple[list[str], float]:
    """Let the ranks play their parts; the complaints about hanging ranks, and the time of the
    fault.
    """
    trial, kind, ranks, wrong, fault_at = scene.trial, scene.kind, scene.ranks, list[str](), 0.0
    if not scene.until(lambda: all(each.event("ready") or each.ended() for each in ranks)):
        return [f"ranks do not begin: {scene.abort(ranks)}"], 0.0
    for each in ranks:
        each.let_go_on()
    with contextlib.ExitStack() as struck:
        if kind.strike:
            sign = _FIRST_EVENTS[trial.phase]
            scene.until(
                lambda: all(each.event(sign) or each.ended() for each in ranks), trial.limit + HANGS
            )
            time.sleep(trial.delay)
            scene.note()
            fault_at = time.monotonic()
            struck.enter_context(kind.strike(scene))
        hangs = trial.limit + (COMPILES if trial.place == "compile" else HANGS)
        if not scene.until(lambda: all(each.ended() for each in scene.others), hangs):
            wrong.append(
                f"ranks {scene.abort([each for each in scene.others if not each.ended()])} hang"
            )
    if not wrong and not scene.until(scene.victim.ended):
        wrong.append(f"rank {scene.abort([scene.victim])[0]}, the victim, hangs")
    for each in ranks:
        each.let_go_on()
    if not scene.until(lambda: all(each.status is not None for each in ranks), 15.0):
        wrong.append(
            f"processes do not end: {scene.abort([each for each in ranks if each.status is None])}"
        )
        scene.until(lambda: all(each.status is not None for each in ranks), 5.0)
    if fault := scene.victim.event("fault"):
        fault_at = fault["when"]
    if kind.victim is None and not kind.hidden:  # noticed when the victim lacks something
        fault_at = max(
            fault_at,
            min(
                (line["when"] for line in scene.victim.events if line["event"] in ("over", "dead")),
                default=0.0,
            ),
        )
    return wrong, fault_at


def _left(scene: Scene, earlier: set[int]) -> list[str]:
    """A complaint about processes left behind, which are killed here; children that a rank has
    announced are no fault.
    """
    announced = sum(1 for each in scene.ranks for line in each.events if line["event"] == "child")
    deadline = time.monotonic() + 5
    while len(found := children() - earlier) > announced and time.monotonic() < deadline:
        time.sleep(0.01)
    names = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in found]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [f"processes are left: {names}"] if len(found) > announced else []


def _delays(scene: Scene, fault_at: float) -> list[tuple[int, float]]:
    """By how many seconds ranks that should raise an error were late."""
    # ranks are connected by a store alone
    unconnected = scene.trial.by == "group" and scene.trial.phase in (
        "init",
        "meeting",
    )
    hidden = scene.trial.limit if scene.kind.hidden or unconnected else 0.0
    judged = [
        each
        for each in (scene.others if scene.kind.hidden else scene.ranks)
        if _allowed(scene, each) is not None
    ]
    ends = [
        (scene.ranks.index(each), over)
        for each in judged
        if (over := each.event("over")) and over["kind"] != RIGHT
    ]
    return [(rank, over["when"] - fault_at - hidden) for rank, over in ends if fault_at]


def _allowed(scene: Scene, each: Rank) -> tuple[str, ...] | None:
    """The endings that are allowed for a rank; None if any is."""
    allowed = scene.kind.victim if each is scene.victim else scene.kind.others
    if allowed is None or allowed == (RIGHT,):
        return allowed
    if each is scene.victim:
        return (*allowed, RIGHT) if scene.trial.phase == "close" else allowed
    more = {
        "init": ("PeerLost", "PeerTimeout"),
        "meeting": ("PeerLost", "PeerTimeout"),
        "close": (RIGHT,),
        "calls": (),
    }
    return (*allowed, *more[scene.trial.phase])


def _judged(scene: Scene, rank: int, each: Rank) -> str:
    """The complaint about a rank's ending, empty if it is allowed."""
    allowed, over, left = _allowed(scene, each), each.event("over"), each.event("left")
    if allowed is None:
        return ""
    if over is None:
        broken, how = each.event("broken"), ending(each.status or 0)
        if how in allowed and not broken:
            return ""
        return f"rank {rank} ended with {how}, allowed was {' or '.join(allowed)}{': ' + broken['text'] if broken else ''}"
    output = f"{over['kind']}: {over['text']}\n{over['trace']}"
    # Of several waited calls one raises the cause, and others report that the world was closed by
    # it.
    cause = (
        re.match(r"this world is closed: (\w+): ", over["text"])
        if each is not scene.victim
        else None
    )
    if (cause[1] if cause else over["kind"]) not in allowed:
        return f"rank {rank} did not end with {' or '.join(allowed)}:  {output}"
    named = (
        over["kind"] == RIGHT
        or "MismatchError" in allowed
        or scene.trial.phase in ("init", "meeting")
        or each is scene.victim
    )
    if (
        scene.kind.named
        and not named
        and not re.search(rf"\brank {scene.trial.victim}\b", over["text"])
    ):
        return f"rank {rank} does not name rank {scene.trial.victim}: {output}"
    if each.status and ending(each.status) in allowed:
        return ""
    if left is None or each.status:
        broken = each.event("broken")
        return f"rank {rank} ended with {ending(each.status or 0)} after {output}{broken['text'] if broken else ''}"
    return f"rank {rank} keeps {left['kept']} after {output}" if left["kept"] else ""


@contextlib.contextmanager
def _pid_namespace(unshared: bool):
    """Fork in the block; if `unshared`, the child is the first process of a pid namespace of its
    own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        if unshared and libc.unshare(_CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), "there is no pid namespace")
        yield
    finally:
        if unshared:
            libc.setns(own, _CLONE_NEWPID)
        os.close(own)
