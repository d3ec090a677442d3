"""A storm: ranks make random calls while a fault occurs at a random moment.

    python tests/storm.py --trials 2000            # or `make storm TRIALS=2000`
    python tests/storm.py --kind kill,fork --trials 50    # only these kinds; `--kind list` lists all
    python tests/storm.py --kind fork --seed 17 --trials 1 --places shared    # repeat one trial

Ranks are forked from this process, which has imported torch. Everything in a trial but the moment
of a signal follows from its seed. A trial passes if all calls before the fault give the right
results, every rank ends as allowed (most survivors with an error that names the rank at fault) in
time, and no thread, file, mapping or process is left behind. In time is within a second, counted
from the time limit where only that shows the fault, plus the time that ranks waited for a core.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._dynamo
from rich.console import Console
from rich.table import Table
from support.hosts import WHY_NOT, hosts
from support.storm.calls import calls
from support.storm.judge import Outcome, run
from support.storm.kinds import KINDS
from support.storm.losses import but, leaves
from support.storm.trial import PLACES, RIGHT, Kind, Trial, trial_of

import weft
from weft.measure.progress import progress
from weft.process_group import compiled
from weft.world import registry

_PR_SET_CHILD_SUBREAPER = 36


def warm() -> None:
    """Use everything that ranks will use, so that no rank is late for having to import it; the
    threads of this use must have ended before a fork.
    """
    torch.set_num_threads(1)
    before = os.listdir("/proc/self/task")
    with weft.init() as world:
        for call in itertools.islice(calls(0, "shared", gradients=False), 80):
            call(world)
    compiled.backend()
    registry.default = world = call = None  # type: ignore[assignment]
    gc.collect()
    assert os.listdir("/proc/self/task") == before, threading.enumerate()


def storm(
    seeds: range, kinds: Sequence[str], places: tuple[str, ...], shown: bool = True
) -> dict[str, list[tuple[Trial, Outcome]]]:
    """Run the trials of these seeds, each of a kind chosen by its seed; their outcomes by kind."""
    found: dict[str, list[tuple[Trial, Outcome]]] = defaultdict(list)
    # no `TemporaryDirectory`, which a forked rank would remove at its end
    folder = tempfile.mkdtemp(prefix="weft-storm-cache-")
    try:
        for name, value in (
            ("TORCHINDUCTOR_CACHE_DIR", folder),
            ("TORCHINDUCTOR_COMPILE_THREADS", "1"),
            ("WEFT_CACHE", folder),
        ):
            os.environ.setdefault(name, value)
        warm()
        with contextlib.ExitStack() as stack:
            net = (
                stack.enter_context(hosts(2, gbps=10))
                if any("hosts" in KINDS[kind].places for kind in kinds) and "hosts" in places
                else None
            )
            for place, ranks in (
                ("shared", 2),
                *((("compile", 2),) if "compile" in places else ()),
            ):
                # Products are measured once here; later compilations find their code in the cache.
                rehearsal = Trial(
                    -ranks, "rehearsal", place, ranks, "world", 0, "calls", 60, 0.0, False
                )
                run(rehearsal, Kind(but(leaves), ("PeerLost",), (RIGHT,)), None)
            step = stack.enter_context(progress("trials", len(seeds), shown=shown))
            for seed in seeds:
                name = random.Random(seed).choice(kinds)
                trial = trial_of(seed, name, KINDS[name], places)
                outcome = run(trial, KINDS[name], net)
                found[name].append((trial, outcome))
                if outcome.wrong:
                    print("\n".join([str(trial), *outcome.wrong]), flush=True)
                step()
        if net and (
            left := [name for name in [net.hub, *net.names] if Path(f"/run/netns/{name}").exists()]
        ):
            sys.exit(f"network namespaces are left: {left}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def table(found: dict[str, list[tuple[Trial, Outcome]]]) -> Table:
    """The number of trials of each kind, the latest survivor, and the commands that repeat failed
    trials.
    """
    shown = Table("kind", "trials", "failed", "last survivor (s late)", "again: make storm …")
    for name in (name for name in KINDS if name in found):
        made = found[name]
        delays = [by for _, outcome in made for by in outcome.delays]
        failed = [trial for trial, outcome in made if outcome.wrong]
        seeds = "\n".join(trial.again for trial in failed[:5]) + ("\n…" if failed[5:] else "")
        shown.add_row(
            name,
            str(len(made)),
            str(len(failed) or ""),
            f"{max(delays):.3f}" if delays else "",
            seeds,
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, help="of the first trial; a random one if not given")
    parser.add_argument(
        "--kind",
        default=",".join(KINDS),
        help="kinds of trials, drawn by chance: all if not given; `list` names them",
    )
    parser.add_argument(
        "--places", default=",".join(PLACES), help="where ranks are, drawn by chance"
    )
    options = parser.parse_args()
    places, kinds = tuple(options.places.split(",")), options.kind.split(",")
    if kinds == ["list"]:
        print("\n".join(KINDS))
        return
    if unknown := {*kinds} - {*KINDS}:
        parser.error(
            f"no kinds of trials are {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}"
        )
    if WHY_NOT and "hosts" in places:
        print(f"no hosts: {WHY_NOT}")
        places = tuple(place for place in places if place != "hosts")
    for name in [*kinds]:
        if why := KINDS[name].why_not() or (
            "" if {*places} & {*KINDS[name].places} else f"not in {', '.join(sorted({*places}))}"
        ):
            print(f"no trials of {name}: {why}")
            kinds.remove(name)
    if not kinds:
        sys.exit("no trials are left")
    first = random.randrange(1_000_000) if options.seed is None else options.seed
    # processes left behind by ranks become children of this process
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    started = time.monotonic()
    found = storm(range(first, first + options.trials), kinds, places)
    failures = sum(bool(outcome.wrong) for made in found.values() for _, outcome in made)
    Console(width=None if sys.stdout.isatty() else 160).print(table(found))
    print(
        f"{options.trials} trials from seed {first} on in {time.monotonic() - started:.0f} s, "
        f"{failures} failures"
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
