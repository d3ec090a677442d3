"""Every course of the agreement of a few ranks: `weft.membership.view` and `.membership` run as they are, in every
order of events.

A state is what each process knows, and what is under way between them. Any event that is possible may be
next, so a message takes any time, a process is slow, suspended or late, and its time limit passes at any
moment; a partition that drops all, and heals or not, is a message that takes long. Besides, processes
are killed, which loses any of what they have sent last, and connections between hosts are refused or reset
(`breaks`), as often as is asked for.

What a process knows is interned, as are messages, and each of its steps is computed once.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from weft.errors import WeftError
from weft.membership import view as views
from weft.membership.agreement import outcome
from weft.membership.decision import Decision, Membership
from weft.membership.view import Answer, Ended, Request, View
from weft.version import __version__


class Address(NamedTuple):
    secret: bytes  # a process, and which of its endpoints


class Info(NamedTuple):
    host: int
    address: Address


class Handle(NamedTuple):
    info: Info


class Endpoint(NamedTuple):
    handle: Handle


class Place(Membership):
    """A membership that is one object, so that it is compared and hashed as such."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Process(NamedTuple):
    """What one process is. `endpoint` is that of its place: in the decision `place`, or in the first world;
    `own` is the next. `visits` are the processes that have called it, and their latest requests, `kept` the
    endpoints that answer a decision.
    """

    phase: str  # late, agreeing, joining, making, made, out, dead
    endpoint: int = 0
    place: Decision | None = None
    was_made: bool = True
    in_doubt: bool = False
    joiners: int = 0
    agreements: int = 0
    again: bool = False
    view: View | None = None
    in_vain: bool = False
    visits: tuple[tuple[int, Request | None], ...] = ()
    shared: Request | None = None
    invited: tuple[Handle, ...] = ()
    ended: frozenset[int] = frozenset()
    kept: tuple[tuple[int, Decision], ...] = ()
    older: tuple[tuple[int, Decision], ...] = ()
    adopted: frozenset[Decision] = frozenset()
    met: frozenset[int] = frozenset()  # that were making the world when this one did
    said: str = ""

    @property
    def missing(self) -> set[int]:
        """The processes that have not come to make the world that this one makes."""
        return {_owner(each) for each in self.place.handles} - self.met

    @property
    def calls(self) -> dict[int, Handle]:
        """Whom it wants to have called, by process."""
        if self.phase == "joining":
            return {_owner(each): each for each in self.invited if _owner(each) not in self.ended}
        if self.phase != "agreeing":
            return {}
        handles = self.view.membership.handles
        return {_owner(handles[rank]): handles[rank] for rank in self.view.called}

    def opened(self, endpoint: int) -> bool:
        """Whether this endpoint of it is open."""
        if self.phase in ("dead", "out"):
            return False
        own = self.endpoint + (self.phase in ("agreeing", "joining"))
        return self.endpoint <= endpoint <= own or self.decision(endpoint) is not None

    def decision(self, endpoint: int) -> Decision | None:
        return dict(self.kept + self.older).get(endpoint)

    def serves(self, endpoint: int) -> bool:
        """Whether it accepts who calls at this endpoint."""
        return self.phase == "agreeing" and endpoint == self.endpoint


class Channel(NamedTuple):
    """A connection: whether the caller and the endpoint have it open, whether it was reset between them, and what
    is under way, as numbers.
    """

    called: bool = True
    answered: bool = True
    broken: bool = False
    requests: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()


class State(NamedTuple):
    processes: tuple[int, ...]
    channels: tuple[tuple[tuple[int, int, int], Channel], ...]  # caller, called, its endpoint
    kills: int
    breaks: int
    late: bool = False  # a time limit has passed


class Violation(Exception):
    """A property that does not hold, with the course that leads there."""


_SAID = {
    "start": "agrees on who continues",
    "asked": "receives a request of process {0}",
    "answered": "receives an answer of process {0}",
    "called": "calls process {0}",
    "ended": "finds its call to process {0} ended (refused: {1})",
    "deserted": "finds that process {0} has hung up",
    "reset": "loses its connection with process {0}",
    "passed": "has waited for its time limit",
    "unanswered": "has waited for a while",
    "made": "has made the world",
    "unmade": "gives up making the world",
    "killed": "is killed",
}


def _named(decision: Decision | None) -> str:
    if decision is None:
        return "the first world"
    endpoints = [".".join(map(str, each.info.address.secret)) for each in decision.handles]
    return f"{decision.name}: {' '.join(endpoints)}" + " in doubt" * decision.doubtful


def _tell(explorer: Explorer, process: Process, answer: Answer) -> tuple:
    """What tells all who have asked a process."""
    return "tell", explorer.number(answer), tuple(caller for caller, _ in process.visits)


def _owner(handle: Handle) -> int:
    return handle.info.address.secret[0]


def _sorted(channels: dict) -> tuple:
    """Those that are open at one end at least."""
    return tuple(sorted(each for each in channels.items() if each[1][0] or each[1][1]))


class Explorer:
    """All courses of ranks on these `hosts`, and as many `joiners`, with so many `kills`, `breaks` and
    `agreements` of each rank.

    `states` is how many there are.
    """

    def __init__(
        self,
        hosts: tuple[int, ...],
        joiners: int = 0,
        kills: int = 0,
        breaks: int = 0,
        agreements: int = 2,
        leaves: bool = False,
    ) -> None:
        self.hosts = hosts + (0,) * joiners
        self.ranks = len(hosts)
        self.joiners, self.agreements, self.leaves = joiners, agreements, leaves
        self.numbers: dict[object, int] = {}
        self.values: list[object] = []
        self.first = tuple(self.handle(each, 0) for each in range(self.ranks))
        self.place = functools.cache(self._place)
        self.moved = functools.cache(self._moved)
        self.meet = functools.cache(self._meet)
        self.wanted = functools.cache(self._wanted)
        self.begin = State(
            tuple(
                self.number(Process("late", joiners=joiners))
                if each < self.ranks
                else self.number(Process("joining", endpoint=-1, invited=self.first))
                for each in range(len(self.hosts))
            ),
            (),
            kills,
            breaks,
        )
        self.several = {host for host in hosts if hosts.count(host) > 1}
        self.ends: dict[object, str] = {}
        self.states = 0

    # what is interned

    def number(self, value: object) -> int:
        found = self.numbers.get(value)
        if found is None:
            found = self.numbers[value] = len(self.values)
            self.values.append(value)
        return found

    def handle(self, process: int, endpoint: int) -> Handle:
        return Handle(Info(self.hosts[process], Address(bytes((process, endpoint)))))

    def _place(
        self, decision: Decision | None, was_made: bool, process: int, endpoint: int
    ) -> Place:
        own = Endpoint(self.handle(process, endpoint))
        if decision is None:
            return Place.of_made("first", process, self.first, own)
        if not was_made:
            return Place.decided(decision, own)
        rank = decision.rank_of(own.handle)
        return Place.of_made(decision.name, rank, decision.handles, own)

    # what a process does: the next process, and what it does to its connections

    def _moved(self, who: int, number: int, event: str, *more: object) -> tuple[int, tuple]:
        effects: list[tuple] = []
        process = getattr(self, "_" + event)(who, self.values[number], effects, *more)
        return self.number(process), tuple(effects)

    def _start(self, who: int, process: Process, effects: list, left: frozenset = frozenset()):
        place = self.place(process.place, process.was_made, who, process.endpoint)
        own = self.handle(who, process.endpoint + 1)
        process = process._replace(
            phase="agreeing",
            agreements=process.agreements + 1,
            met=frozenset(),
            view=View(place, own, process.joiners, 1.0, left),
            in_vain=False,
            visits=(),
            shared=None,
        )
        if process.was_made:
            process = process._replace(older=process.older + process.kept, kept=())
        return self._step(who, process, effects)

    def _step(self, who: int, process: Process, effects: list, passed: bool = False) -> Process:
        """As `Agreement._step` and `_share`."""
        said = [request for _, request in process.visits if request]
        requests = process.view.taking_part(said)
        joining = views.joining(said)
        view = process.view.waiting(requests, process.in_vain)
        process = process._replace(
            view=view, in_vain=process.in_vain and view.leader == process.view.leader
        )
        effects.append(("keep", frozenset(process.calls)))
        try:
            if view.leader == view.rank:
                decision = view.decision(requests, joining, not passed, f"{who}.{process.endpoint}")
                if decision is not None:
                    return self._adopt(who, process, effects, decision)
            elif passed:
                return self._step(who, process._replace(view=view.impatient()), effects)
        except WeftError as error:
            return self._fail(process, effects, type(error).__name__)
        request = view.request(joining)
        if request != process.shared:
            effects.append(("ask", self.number(request)))
            effects.append(_tell(self, process, view.answer()))
            process = process._replace(shared=request)
        return process

    def _adopt(self, who: int, process: Process, effects: list, decision: Decision) -> Process:
        effects += [_tell(self, process, Answer(decision)), ("hang up",)]
        if process.phase == "agreeing":
            known = process.view.membership.handles
            again = not process.was_made and decision.previous == (*range(len(known)),)
            kept = (*process.kept, (process.endpoint, decision))
        else:
            again, kept = False, ()
        if decision.rank_of(self.handle(who, process.endpoint + 1)) is None:
            if process.phase == "joining":
                return process._replace(invited=decision.handles, ended=frozenset())
            return self._fail(process, [], "Excluded")
        return process._replace(
            phase="making",
            endpoint=process.endpoint + 1,
            place=decision,
            met=frozenset(),
            was_made=False,
            joiners=decision.joiners,
            again=again,
            view=None,
            in_vain=False,
            visits=(),
            shared=None,
            invited=(),
            ended=frozenset(),
            kept=kept,
            adopted=process.adopted | {decision},
        )

    def _fail(self, process: Process, effects: list, error: str) -> Process:
        effects += [_tell(self, process, Answer(None, error)), ("hang up",)]
        return Process("out", said=error, adopted=process.adopted)

    def _passed(self, who: int, process: Process, effects: list) -> Process:
        if process.phase == "joining":
            return self._fail(process, effects, "PeerTimeout")
        return self._step(who, process, effects, True)

    def _unanswered(self, who: int, process: Process, effects: list) -> Process:
        return self._step(who, process._replace(in_vain=True), effects)

    def _asked(self, who: int, process: Process, effects: list, caller: int, number: int):
        request = self.values[number]
        if not process.view.accepts(request):
            return self._deserted(who, process, effects, caller)
        visits = {**dict(process.visits), caller: request}
        process = process._replace(
            visits=tuple(visits.items()), view=process.view.after_request(request)
        )
        effects.append(("tell", self.number(process.view.answer()), (caller,)))
        return self._step(who, process, effects)

    def _deserted(self, who: int, process: Process, effects: list, caller: int) -> Process:
        visits = tuple(each for each in process.visits if each[0] != caller)
        return self._step(who, process._replace(visits=visits), effects)

    def _answered(self, who: int, process: Process, effects: list, called: int, number: int):
        answer = self.values[number]
        try:
            decision = outcome(answer)
        except WeftError as error:
            return self._fail(process, effects, type(error).__name__)
        if decision is not None:
            return self._adopt(who, process, effects, decision)
        if process.phase == "joining":
            return process
        view = process.view.after_answer(self._rank(process, called), answer)
        return self._step(who, process._replace(view=view), effects)

    def _ended(self, who: int, process: Process, effects: list, called: int, refused: bool):
        if process.phase == "joining":
            own = self.handle(who, process.endpoint + 1)
            if not views.is_dead(Ended(refused), process.calls[called], own):
                return process
            process = process._replace(ended=process.ended | {called})
            return process if process.calls else self._fail(process, effects, "PeerLost")
        view = process.view.after_end(self._rank(process, called), Ended(refused))
        return self._step(who, process._replace(view=view), effects)

    def _rank(self, process: Process, called: int) -> int:
        return [_owner(each) for each in process.view.membership.handles].index(called)

    def _made(self, who: int, process: Process, effects: list) -> Process:
        kept = process.kept if process.place.doubtful or process.in_doubt else ()
        return process._replace(
            phase="made",
            was_made=True,
            in_doubt=process.place.doubtful,
            joiners=0,
            again=False,
            met=frozenset(),
            kept=(),
            older=process.older + kept,
        )

    def _unmade(self, who: int, process: Process, effects: list) -> Process:
        if process.again:
            return self._fail(process, effects, "PeerLost")
        return self._start(who, process, effects)

    def _killed(self, who: int, process: Process, effects: list) -> Process:
        effects.append(("hang up",))
        return Process("dead", adopted=process.adopted)

    # what may be next

    def apply(self, state: State, who: int, event: str, *more: object, **change: object) -> State:
        """The state after an event of a process."""
        processes, channels, kills, breaks, late = state
        number, effects = self.moved(who, processes[who], event, *more)
        if effects or "channels" in change:
            changed = dict(channels)
            changed.update(change.pop("channels", ()))
            for effect in effects:
                self._affect(changed, who, *effect)
            channels = _sorted(changed)
        processes = (*processes[:who], number, *processes[who + 1 :])
        if self.values[number].phase == "making":
            processes = self.meet(processes, who)
        return State(
            processes,
            channels,
            change.get("kills", kills),
            change.get("breaks", breaks),
            late or change.get("late", False),
        )

    def _affect(
        self, channels: dict, who: int, effect: str, what: object = None, more: object = ()
    ):
        """Do to connections what a process does."""
        for key, channel in channels.items():
            called, answered, broken, requests, answers = channel
            if key[0] == who and called:
                if effect == "hang up" or (effect == "keep" and key[1] not in what):
                    channels[key] = Channel(False, answered, broken, requests, ())
                elif effect == "ask" and requests[-1:] != (what,):
                    channels[key] = Channel(called, answered, broken, (*requests, what), answers)
            elif key[1] == who and answered:
                if effect == "hang up":
                    channels[key] = Channel(called, False, broken, (), answers)
                elif effect == "tell" and key[0] in more and answers[-1:] != (what,):
                    channels[key] = Channel(called, answered, broken, requests, (*answers, what))

    def _meet(self, processes: tuple[int, ...], who: int) -> tuple[int, ...]:
        """What they are once this one may have begun to make a world."""
        place = self.values[processes[who]].place
        values = [self.values[each] for each in processes]
        here = {
            each
            for each, process in enumerate(values)
            if process.phase in ("making", "made") and process.place == place
        }
        return tuple(
            self.number(process._replace(met=process.met | here))
            if each in here and process.phase == "making"
            else number
            for each, (number, process) in enumerate(zip(processes, values, strict=True))
        )

    def _wanted(self, number: int) -> tuple[tuple[int, int], ...]:
        """Whom a process wants to have called, and at which endpoints."""
        calls = self.values[number].calls
        return tuple((called, handle.info.address.secret[1]) for called, handle in calls.items())

    def events(self, state: State) -> Iterator[tuple[tuple, State]]:
        """What may be next without a fault or a time limit, and the state after it."""
        processes = [self.values[each] for each in state.processes]
        channels = dict(state.channels)
        for key, channel in state.channels:
            caller, called, endpoint = key
            if channel.answered and channel.requests:
                change = {key: channel._replace(requests=channel.requests[1:])}
                first = channel.requests[0]
                yield self._event(state, called, "asked", caller, first, channels=change)
            if channel.answered and (channel.broken or not channel.called):
                change = {key: channel._replace(answered=False, requests=())}
                yield self._event(state, called, "deserted", caller, channels=change)
            if channel.called and channel.answers:
                change = {key: channel._replace(answers=channel.answers[1:])}
                first = channel.answers[0]
                yield self._event(state, caller, "answered", called, first, channels=change)
            if channel.called and (channel.broken or not channel.answered):
                change = {key: channel._replace(called=False, answers=())}
                died = processes[called].phase == "dead"
                yield self._event(state, caller, "ended", called, died, channels=change)
        for who, process in enumerate(processes):
            for called, endpoint in self.wanted(state.processes[who]):
                key = (who, called, endpoint)
                if key in channels and channels[key].called:
                    continue
                other = processes[called]
                if not other.opened(endpoint):
                    yield self._event(state, who, "ended", called, True)
                    continue
                if (decision := other.decision(endpoint)) is not None:
                    answers = (self.number(Answer(decision)),)
                    call = Channel(answered=False, answers=answers)
                elif other.serves(endpoint):
                    call = Channel(requests=(self._request(who, process),))
                else:
                    continue
                change = _sorted({**channels, key: call})
                yield ("called", who, called), state._replace(channels=change)
            if process.phase == "late":
                yield self._event(state, who, "start")
            elif process.phase == "making" and process.missing <= {who}:
                yield self._event(state, who, "made")

    def _event(self, state: State, who: int, event: str, *more: object, **change: object):
        return (event, who, *more), self.apply(state, who, event, *more, **change)

    def _request(self, who: int, process: Process) -> int:
        if process.phase == "joining":
            return self.number(
                Request(__version__, -1, b"", self.handle(who, process.endpoint + 1))
            )
        return self.number(process.shared)

    def lost(self, processes: list[Process], process: Process) -> bool:
        """Whether another rank of the world that a process has, or makes, is known to be out of it."""
        return any(
            other.place != process.place or other.phase not in ("making", "made")
            for other in (processes[_owner(each)] for each in process.place.handles)
            if process.place in other.adopted or other.phase in ("dead", "out")
        )

    def limits(self, state: State) -> Iterator[tuple[tuple, State]]:
        """The time limits that may pass, and what follows a loss."""
        processes = [self.values[each] for each in state.processes]
        for who, process in enumerate(processes):
            if process.phase in ("agreeing", "joining"):
                yield self._event(state, who, "passed", late=True)
            if process.phase == "agreeing" and not process.in_vain and self.several:
                hosts = {self.hosts[each] for each in process.calls} & self.several
                if hosts - {self.hosts[who]}:
                    yield self._event(state, who, "unanswered")
            if process.phase in ("making", "made") and process.agreements < self.agreements:
                event = "unmade" if process.phase == "making" else "start"
                yield self._event(state, who, event, late=not self.lost(processes, process))

    def faults(self, state: State) -> Iterator[tuple[tuple, State]]:
        processes = [self.values[each] for each in state.processes]
        if state.kills:
            for who, process in enumerate(processes):
                if process.phase not in ("out", "dead"):
                    yield self._event(state, who, "killed", kills=state.kills - 1)
        if state.breaks:
            channels = dict(state.channels)
            left = state.breaks - 1
            for key, channel in state.channels:
                caller, called, _ = key
                if self.hosts[caller] != self.hosts[called] and not channel.broken:
                    change = _sorted({**channels, key: channel._replace(broken=True)})
                    yield ("reset", caller, called), state._replace(channels=change, breaks=left)
            for who in range(len(processes)):
                for called, endpoint in self.wanted(state.processes[who]):
                    key = (who, called, endpoint)
                    open_call = key in channels and channels[key].called
                    if self.hosts[who] != self.hosts[called] and not open_call:
                        yield self._event(state, who, "ended", called, True, breaks=left)

    def next(self, state: State) -> Iterator[tuple[tuple, State]]:
        return itertools.chain(self.events(state), self.limits(state), self.faults(state))

    # what must hold

    def wrong(self, state: State) -> str:
        """What does not hold in a state."""
        processes = [self.values[each] for each in state.processes]
        whole = {
            process.place
            for process in processes
            if process.phase == "made"
            and all(
                processes[_owner(each)].phase == "made"
                and processes[_owner(each)].place == process.place
                for each in process.place.handles
            )
        }
        if len(whole) > 1:
            return "two worlds continue: " + " and ".join(
                str([_owner(each) for each in one.handles]) for one in whole
            )
        for who, process in enumerate(processes):
            if process.phase == "agreeing":
                for rank in process.view.dead:
                    address = process.view.membership.handles[rank].info.address.secret
                    if processes[address[0]].opened(address[1]):
                        return f"process {address[0]} is not gone, as process {who} believes"
        return ""

    def stuck(self, state: State) -> str:
        """What does not come about, if nothing happens any more to some of the processes that are alive, and
        nobody hears of the others: they are suspended, or on hosts that are cut off, with refusals or silently.
        """
        processes = [self.values[each] for each in state.processes]
        alive = [each for each, one in enumerate(processes) if one.phase not in ("out", "dead")]
        several = len({*self.hosts}) > 1
        for number in range(1, len(alive) + 1):
            for some in itertools.combinations(alive, number):
                for refuses in (False, True) if several and number < len(self.hosts) else (False,):
                    if found := self._unsettled(state, frozenset(some), refuses):
                        how = "refused" if refuses else "unresponsive"
                        return f"{found}; from here on {[*some]} alone, others {how}"
        return ""

    def _unsettled(self, state: State, some: frozenset[int], refuses: bool) -> str:
        last, passed = self._settled(state, some, refuses)
        ends = {each: self.values[last.processes[each]] for each in some}
        for each, process in ends.items():
            if process.phase not in ("made", "out"):
                return f"process {each} waits for ever"
        votes = [each for each in some if each < self.ranks]
        most = 2 * len(votes) > self.ranks or (2 * len(votes) == self.ranks and 0 in votes)
        adopted = {
            each for number in state.processes for each in self.values[number].adopted
        }  # a leader that is killed between its answers may leave two decisions
        if state.late or self.joiners or not most or len(adopted) > 1:
            return ""
        worlds = {process.place for process in ends.values() if process.phase == "made"}
        if len(worlds) != 1 or any(process.phase != "made" for process in ends.values()):
            return f"processes {votes} can talk and do not continue"
        here = {self.hosts[each] for each in some}
        ended = {
            each for each in range(self.ranks) if self.values[state.processes[each]].phase == "dead"
        }
        certain = {*range(self.ranks)} - some <= {
            each for each in ended if self.hosts[each] in here
        }
        return f"processes {votes} do not continue at once" if passed and certain else ""

    def _settled(self, state: State, some: frozenset[int], refuses: bool) -> tuple[State, bool]:
        """The last state, and whether a time limit passes on the way."""
        path, passed = list[tuple](), frozenset[int]()
        while (found := self.ends.get(key := (state, passed, some, refuses))) is None:
            path.append(key)
            after, passed = self._soon(state, passed, some, refuses)
            if after is None or len(path) > 500:
                found = state, False
                break
            state = after
        # a time limit passed unless all of this path was prompt
        late = found[1] or len(path) > 2 or any(each[1] for each in path)
        for each in path:
            self.ends[each] = found[0], late
        return found[0], late

    def _soon(
        self, state: State, passed: frozenset[int], some: frozenset[int], refuses: bool
    ) -> tuple[State | None, frozenset[int]]:
        """The state once all has arrived, or else once a time limit has passed: each has the same, so that of
        each passes (`passed`) before that of another does again.
        """
        seen = {state}
        while (after := self._prompt(state, some, refuses, seen)) is not None:
            seen.add(after)
            state = after
        if len(seen) > 1:
            return state, passed
        phases = {each: self.values[state.processes[each]].phase for each in some}
        waiting = [
            each for each, phase in phases.items() if phase in ("agreeing", "joining", "making")
        ]
        if not waiting:
            return None, passed
        who = max({*waiting} - passed, default=max(waiting))
        event = "unmade" if phases[who] == "making" else "passed"
        return self.apply(state, who, event), (passed if {*waiting} - passed else frozenset()) | {
            who
        }

    def _prompt(self, state: State, some: frozenset[int], refuses: bool, seen: set) -> State | None:
        """A state that follows without a time limit, and is none of those seen."""
        processes = [self.values[each] for each in state.processes]
        here = {self.hosts[each] for each in some}

        def reaches(who: int, other: int) -> bool:
            if other in some:
                return True
            near = self.hosts[other] in here if processes[other].phase in ("out", "dead") else False
            return near or self.hosts[who] == self.hosts[other]

        for (event, who, *more), after in self.events(state):
            told = event in ("asked", "answered", "deserted", "ended", "called")
            if who not in some or (told and not reaches(who, more[0])) or after in seen:
                continue
            if event == "called" and more[0] not in some:
                continue  # nobody is there
            return after
        for who in sorted(some):
            process = processes[who]
            if process.phase == "agreeing":
                if not process.in_vain:
                    return self.apply(state, who, "unanswered")
                for called, _ in self.wanted(state.processes[who]):
                    if refuses and not reaches(who, called):
                        after = self.apply(state, who, "ended", called, True)
                        if after not in seen:
                            return after
            if process.phase in ("making", "made") and (
                self.lost(processes, process)
                or {_owner(each) for each in process.place.handles} - some
            ):
                return self.apply(state, who, "unmade" if process.phase == "making" else "start")
        return None

    def explore(self, live: bool = False, most: int = 10**9) -> Explorer:
        """All states, breadth first; `live` also tells whether each leads on. Raises `Violation`."""
        before: dict[State, tuple | None] = {self.begin: None}
        queue = deque([self.begin])
        while queue and len(before) < most:
            state = queue.popleft()
            if found := self.wrong(state) or (self.stuck(state) if live else ""):
                raise Violation(self._course(before, state) + found)
            for event, after in self.next(state):
                if after not in before:
                    before[after] = state, event
                    queue.append(after)
        self.states = len(before)
        return self

    def _course(self, before: dict, state: State) -> str:
        """The events that lead to a state, one a line."""
        lines = list[str]()
        while before[state] is not None:
            after, (state, (event, who, *more)) = state, before[state]
            told = f"process {who} {_SAID[event].format(*more)}"
            lines.append(f"{told:<60}: {self._readable(self.values[after.processes[who]])}\n")
        return "".join(reversed(lines))

    def _readable(self, process: Process) -> str:
        """What a process knows."""
        if process.phase == "agreeing":
            view = process.view
            known = [
                f"{name} {sorted(each)}"
                for name in ("dead", "unresponsive", "called", "answered")
                if (each := getattr(view, name))
            ]
            visits = [each for each, request in process.visits if request]
            return f"rank {view.rank} after {_named(process.place)}, {', '.join(known)}, asked by {visits}"
        where = f" {_named(process.place)}" if process.phase in ("making", "made") else ""
        return f"{process.phase}{where} {process.said}"
