"""How the storm makes a trial: it forks the ranks, strikes, listens to what they say, and judges
how they end.
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
from support.storm.machine import children, neighbours, starved
from support.storm.rank import HANGS, Part, ending
from support.storm.trial import RIGHT, Kind, Trial

# seconds in which survivors raise, or after the time limit where nothing shows that a peer is gone
SOON = 1.0
# seconds after which a rank hangs where it may be compiling, whose helpers wait for a core unseen
COMPILES = 120.0
_SIGNS = {
    "init": "ready",
    "meeting": "meeting",
    "calls": "world",
    "close": "closing",
}  # what ranks say as a phase begins
_CLONE_NEWPID = 0x20000000


class Rank:
    """One forked rank: what it is told, and what it says, in lines of JSON."""

    def __init__(
        self, trial: Trial, kind: Kind, rank: int, folder: str, network: str | None
    ) -> None:
        self.said, mouth = os.pipe()
        ear, self.told = os.pipe()
        with _pid_namespace(kind.apart):
            self.pid = os.fork()
        if not self.pid:
            os.close(self.said)
            os.close(self.told)
            Part(trial, rank, folder, mouth, ear).live(kind, network)
        os.close(mouth)
        os.close(ear)
        self.status: int | None = None
        self.lines: list[dict[str, Any]] = []
        self.rest = b""

    def tell(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.told, b".")

    def heard(self, what: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if line["what"] == what), None)

    def ended(self) -> bool:
        return any(self.heard(what) for what in ("over", "broken", "dead"))

    def listen(self) -> bool:
        """Take note of what it has said; whether that was anything."""
        found = os.read(self.said, 65536)
        *whole, self.rest = (self.rest + found).split(b"\n")
        self.lines += [json.loads(line) for line in whole]
        return bool(found)

    def look(self) -> None:
        """Take note of its end."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            while select.select([self.said], [], [], 0)[0] and self.listen():
                pass
            self.status = status
            self.lines.append({"what": "dead", "when": time.monotonic()})

    def kill(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.said)
        os.close(self.told)


class Scene:
    """The ranks of a trial, which runs. Attributes: `waited` (how long each had waited for a core
    when it went wrong).
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

    def until(self, condition: Callable[[], bool], limit: float = HANGS) -> bool:
        """Listen until something is so; False if it is not within a time, in which nobody waits for
        a core.
        """
        began, busy = time.monotonic(), {each.pid: starved(each.pid) for each in self.ranks}
        while not condition():
            living = [each for each in self.ranks if each.status is None]
            poll = select.poll()
            for each in living:
                poll.register(each.said, select.POLLIN)
            ready = [fd for fd, _ in poll.poll(5)]
            for each in living:
                if each.said in ready:
                    each.listen()
                each.look()
            if not self.waited and self.victim.heard("fault"):
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
        """Note how long ranks have waited for a core so far."""
        self.waited = {each.pid: starved(each.pid) for each in self.ranks}

    def slack(self) -> float:
        """How long they have waited for one since."""
        overs = [(each.pid, over["starved"]) for each in self.ranks if (over := each.heard("over"))]
        return sum(max(0.0, busy - self.waited[pid]) for pid, busy in overs if pid in self.waited)

    def abort(self, ranks: list[Rank]) -> list[int]:
        """Abort ranks that hang, which faulthandler shows; their numbers."""
        for each in ranks:
            each.kill(signal.SIGABRT)
        return [self.ranks.index(each) for each in ranks]


class Outcome(NamedTuple):
    """What became of a trial: what is wrong with it, if anything, and by how many seconds survivors
    were late.
    """

    wrong: list[str]
    delays: list[float]


def run(trial: Trial, kind: Kind, net: Hosts | None) -> Outcome:
    """Make a trial."""
    folder = tempfile.mkdtemp(prefix="weft-storm-")
    known = children()
    try:
        with neighbours(trial.busy):
            scene = Scene(trial, kind, folder, net)
            try:
                wrong, begun = _played(scene)
            finally:
                for each in scene.ranks:
                    each.close()
        wrong += _left(scene, known)
        late = _delays(scene, begun)
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
            said = {
                path.name: path.read_text(errors="replace").strip()
                for path in sorted(Path(folder).glob("said by *"))
            }
            wrong += [f"{name}:\n{text[-6000:]}" for name, text in said.items() if text]
        return Outcome(wrong, [by for _, by in late])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _played(scene: Scene) -> tuple[list[str], float]:
    """Let ranks play their parts: what hangs, and when it went wrong."""
    trial, kind, ranks, wrong, begun = scene.trial, scene.kind, scene.ranks, list[str](), 0.0
    if not scene.until(lambda: all(each.heard("ready") or each.ended() for each in ranks)):
        return [f"ranks do not begin: {scene.abort(ranks)}"], 0.0
    for each in ranks:
        each.tell()
    with contextlib.ExitStack() as struck:
        if kind.strike:
            sign = _SIGNS[trial.phase]
            scene.until(
                lambda: all(each.heard(sign) or each.ended() for each in ranks), trial.limit + HANGS
            )
            time.sleep(trial.delay)
            scene.note()
            begun = time.monotonic()
            struck.enter_context(kind.strike(scene))
        hangs = trial.limit + (COMPILES if trial.place == "compile" else HANGS)
        if not scene.until(lambda: all(each.ended() for each in scene.others), hangs):
            wrong.append(
                f"ranks {scene.abort([each for each in scene.others if not each.ended()])} hang"
            )
    if not wrong and not scene.until(scene.victim.ended):
        wrong.append(f"rank {scene.abort([scene.victim])[0]}, the victim, hangs")
    for each in ranks:
        each.tell()
    if not scene.until(lambda: all(each.status is not None for each in ranks), 15.0):
        wrong.append(
            f"processes do not end: {scene.abort([each for each in ranks if each.status is None])}"
        )
        scene.until(lambda: all(each.status is not None for each in ranks), 5.0)
    if fault := scene.victim.heard("fault"):
        begun = fault["when"]
    if kind.victim is None and not kind.hidden:  # noticed when the victim lacks something
        begun = max(
            begun,
            min(
                (line["when"] for line in scene.victim.lines if line["what"] in ("over", "dead")),
                default=0.0,
            ),
        )
    return wrong, begun


def _left(scene: Scene, known: set[int]) -> list[str]:
    """The processes that are left behind, which end here; those of which a rank has said that they
    live on are none.
    """
    told = sum(1 for each in scene.ranks for line in each.lines if line["what"] == "child")
    deadline = time.monotonic() + 5
    while len(found := children() - known) > told and time.monotonic() < deadline:
        time.sleep(0.01)
    names = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in found]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [f"processes are left: {names}"] if len(found) > told else []


def _delays(scene: Scene, begun: float) -> list[tuple[int, float]]:
    """By how many seconds ranks that are owed an error were late with it."""
    unconnected = scene.trial.by == "group" and scene.trial.phase in (
        "init",
        "meeting",
    )  # ranks that share a store and no more
    hidden = scene.trial.limit if scene.kind.hidden or unconnected else 0.0
    judged = [
        each
        for each in (scene.others if scene.kind.hidden else scene.ranks)
        if _owed(scene, each) is not None
    ]
    ends = [
        (scene.ranks.index(each), over)
        for each in judged
        if (over := each.heard("over")) and over["kind"] != RIGHT
    ]
    return [(rank, over["when"] - begun - hidden) for rank, over in ends if begun]


def _owed(scene: Scene, each: Rank) -> tuple[str, ...] | None:
    """The endings that a rank is owed; None if that is any."""
    owed = scene.kind.victim if each is scene.victim else scene.kind.others
    if owed is None or owed == (RIGHT,):
        return owed
    if each is scene.victim:
        return (*owed, RIGHT) if scene.trial.phase == "close" else owed
    more = {
        "init": ("PeerLost", "PeerTimeout"),
        "meeting": ("PeerLost", "PeerTimeout"),
        "close": (RIGHT,),
        "calls": (),
    }
    return (*owed, *more[scene.trial.phase])


def _judged(scene: Scene, rank: int, each: Rank) -> str:
    """What is wrong with how a rank ended."""
    owed, over, left = _owed(scene, each), each.heard("over"), each.heard("left")
    if owed is None:
        return ""
    if over is None:
        broken, how = each.heard("broken"), ending(each.status or 0)
        if how in owed and not broken:
            return ""
        return f"rank {rank} ended with {how}, owed was {' or '.join(owed)}{': ' + broken['text'] if broken else ''}"
    said = f"{over['kind']}: {over['text']}\n{over['trace']}"
    # Of calls that are waited for in any order one says what went wrong, and others that the world
    # is closed by that.
    cause = (
        re.match(r"this world is closed: (\w+): ", over["text"])
        if each is not scene.victim
        else None
    )
    if (cause[1] if cause else over["kind"]) not in owed:
        return f"rank {rank} ended with what it is not owed, {' or '.join(owed)}: {said}"
    named = (
        over["kind"] == RIGHT
        or "MismatchError" in owed
        or scene.trial.phase in ("init", "meeting")
        or each is scene.victim
    )
    if (
        scene.kind.named
        and not named
        and not re.search(rf"\brank {scene.trial.victim}\b", over["text"])
    ):
        return f"rank {rank} does not name rank {scene.trial.victim}: {said}"
    if each.status and ending(each.status) in owed:
        return ""
    if left is None or each.status:
        broken = each.heard("broken")
        return f"rank {rank} ended with {ending(each.status or 0)} after {said}{broken['text'] if broken else ''}"
    return f"rank {rank} keeps {left['kept']} after {said}" if left["kept"] else ""


@contextlib.contextmanager
def _pid_namespace(apart: bool):
    """Let the process that is forked in the block be the first of a pid namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        if apart and libc.unshare(_CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), "there is no pid namespace")
        yield
    finally:
        if apart:
            libc.setns(own, _CLONE_NEWPID)
        os.close(own)
