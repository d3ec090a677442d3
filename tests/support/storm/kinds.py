"""All kinds of trials, by name."""

from __future__ import annotations

from support.storm import forks, interrupts, losses, outstanding, rendezvous, threads
from support.storm.trial import RIGHT, Kind

ANYWHERE = ("shared", "hosts", "compile")
ONE_HOST_OR_TWO = ("shared", "hosts")
EITHER = ("world", "world", "group")
MOSTLY_CALLS = ("init", "calls", "calls", "calls", "close")

LOST = ("PeerLost",)
LATE = ("PeerTimeout", "PeerLost")
LACKING = ("PeerLost", "SymmetricMemoryError", RIGHT)
MISMATCH = ("MismatchError",)
# the errors of weft that a rank at fault may see
ERRORS = (
    "WeftError",
    "PeerLost",
    "PeerTimeout",
    "MismatchError",
)
REFUSED = (*ERRORS, "DistNetworkError", "DistStoreError", "DistBackendError")

KINDS: dict[str, Kind] = {
    # Ranks that are lost, late, wrong or short of something
    "kill": Kind(
        losses.calling, LOST, ("signal 9",), losses.killed, ANYWHERE, MOSTLY_CALLS, EITHER
    ),
    "stop": Kind(
        losses.calling,
        LATE,
        None,
        losses.stopped,
        ONE_HOST_OR_TWO,
        MOSTLY_CALLS,
        EITHER,
        hidden=True,
        named=False,
    ),
    "stop-copies": Kind(
        losses.stopping_amid_copies, LATE, LATE, losses.stopped, hidden=True, named=False
    ),
    "pause": Kind(losses.calling_on, strike=losses.paused, places=ONE_HOST_OR_TWO, by=EITHER),
    "cut": Kind(losses.calling, LATE, LATE, losses.cut_off, ("hosts",), hidden=True, named=False),
    "raise": Kind(losses.but(losses.raises), LOST, ("ValueError",), None, ANYWHERE, by=EITHER),
    "exit": Kind(losses.but(losses.exits), LOST, ("exit 3",), None, ANYWHERE, by=EITHER),
    "leave": Kind(losses.but(losses.leaves), LOST, (RIGHT,), None, ANYWHERE, by=EITHER),
    "mismatch": Kind(losses.but(losses.mismatches), MISMATCH, MISMATCH, None, ANYWHERE),
    "memory": Kind(
        losses.but(losses.lacks_memory, losses.AFTER), LACKING, None, None, ANYWHERE, by=EITHER
    ),
    "files": Kind(
        losses.but(losses.lacks_files, losses.AFTER), LACKING, None, None, ANYWHERE, by=EITHER
    ),
    "memory-then": Kind(
        losses.calling_on,
        LACKING,
        None,
        losses.without_memory,
        ONE_HOST_OR_TWO,
        ("init", "calls"),
        EITHER,
    ),
    "files-then": Kind(
        losses.calling_on,
        LACKING,
        None,
        losses.without_files,
        ONE_HOST_OR_TWO,
        ("init", "calls"),
        EITHER,
    ),
    "threads-lack": Kind(losses.lacks_threads, LACKING, None),
    # Hundreds of asynchronous calls
    "outstanding": Kind(outstanding.hundreds, places=ONE_HOST_OR_TWO),
    "outstanding-large": Kind(outstanding.hundreds_of_large),
    "outstanding-mismatch": Kind(outstanding.hundreds_but_one, MISMATCH, MISMATCH),
    "outstanding-works": Kind(outstanding.hundreds_of_works, by=("group",)),
    "outstanding-drop": Kind(outstanding.dropped, LOST),
    "outstanding-exit": Kind(outstanding.left_by_exit, LOST, ("exit 5",), by=EITHER),
    # Ranks that fork
    "fork": Kind(forks.forking, by=EITHER),
    "fork-beside": Kind(forks.forking_during_calls, by=EITHER),
    "fork-pool": Kind(forks.pooling, by=EITHER),
    "fork-all": Kind(forks.all_forking, by=EITHER),
    "fork-outlives": Kind(forks.outlived, LOST, ("signal 9",), losses.killed, by=EITHER),
    # Several threads of a rank
    "threads-share": Kind(threads.sharing, (RIGHT, *ERRORS), (RIGHT, *ERRORS), named=False),
    "threads-group": Kind(threads.sharing_a_group, by=("group",)),
    "threads-apart": Kind(threads.each_its_own),
    "threads-come": Kind(threads.coming_and_going),
    # Signals
    "handler-idle": Kind(interrupts.ignoring, by=EITHER),
    "handler-raises": Kind(
        interrupts.handling(interrupts.raises),
        LOST,
        ("Interrupted",),
        interrupts.signalled,
        by=EITHER,
    ),
    "handler-exits": Kind(
        interrupts.handling(interrupts.exits), LOST, ("exit 7",), interrupts.signalled, by=EITHER
    ),
    "handler-leaves": Kind(
        interrupts.handling(interrupts.leaves),
        LOST,
        (*ERRORS, "ValueError"),
        interrupts.signalled,
        by=EITHER,
    ),
    "ctrl-c": Kind(
        interrupts.handling(interrupts.raises),
        LOST,
        ("KeyboardInterrupt",),
        interrupts.interrupted,
        phases=("meeting", "calls", "calls", "calls"),
        by=EITHER,
    ),
    "handler-within": Kind(interrupts.within, LOST, ("Interrupted", "KeyboardInterrupt", "exit 7")),
    # Other jobs and processes on the hosts
    "jobs": Kind(rendezvous.two_jobs, ranks=(4,), alone=True),
    "jobs-port": Kind(
        rendezvous.two_jobs_on_a_port,
        (RIGHT, *REFUSED),
        (RIGHT, *REFUSED),
        ranks=(4,),
        alone=True,
        named=False,
    ),
    "containers": Kind(rendezvous.contained, own_pids=True, why_not=rendezvous.no_pid_namespaces),
    "strangers": Kind(
        rendezvous.connecting, strike=rendezvous.strangers, places=("hosts",), phases=("init",)
    ),
    "held-up": Kind(
        rendezvous.connecting,
        strike=rendezvous.held_up,
        places=ONE_HOST_OR_TWO,
        phases=("init",),
        by=EITHER,
    ),
}
