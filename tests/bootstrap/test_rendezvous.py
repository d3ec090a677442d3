"""Rendezvous: missing ranks are named in time, other jobs and foreign processes are refused, and no
message is executed.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import signal
import socket
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks, start
from torch._C._distributed_c10d import HashStore, TCPStore

import weft
from weft import _native
from weft.bootstrap import connector, shared_store
from weft.bootstrap.handshake import Accepted, Caller, name_of
from weft.bootstrap.listener import Address, Listener
from weft.bootstrap.peer_memory import Probe
from weft.bootstrap.rendezvous import Announcement, RankInfo, StoreRendezvous
from weft.bootstrap.stores import arrived
from weft.bootstrap.wire import decode, encode
from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.launchers.variables import launcher_variables

INFO = RankInfo(
    7,
    "host",
    Address("10.0.0.1", 80, b"secret"),
    frozenset({0, 3}),
    2,
    (-1, 0),
    probe=Probe(2**62, 1),
)
SOON = 20.0  # seconds within which everything here ends that does not wait for its limit


@pytest.mark.parametrize(
    "value",
    [
        INFO,
        INFO._replace(address=Address("\0weft-1", 0, b"")),
        Announcement("0.1", "a job", "", [1, "2"]),
    ],
)
def test_records_are_decoded_as_they_were_encoded(value):
    assert decode(encode(value), type(value)) == value


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        pickle.dumps(INFO),
        b"7",
        b"{}",
        encode(INFO[:-1]),
        encode([*INFO, 0]),
        encode(INFO._replace(pid=True)),
        encode(INFO._replace(pid=2**63)),
        encode(INFO._replace(host=7)),
        encode(INFO._replace(cores="0-3")),
        encode(INFO._replace(address=["10.0.0.1", 80, "no secret"])),
        encode(INFO._replace(address=["10.0.0.1", 65536, ""])),
        encode(INFO._replace(thresholds=[1])),
        encode(INFO).replace(b"32768", b"NaN"),
    ],
    ids=range(16),
)
def test_malformed_records_are_refused(message):
    with pytest.raises(ValueError):  # noqa: PT011
        decode(message, RankInfo)


class _Harmful:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        (
            lambda path: pickle.dumps(_Harmful(path)),
            WeftError,
            "rank 0 cannot read the address that rank 1 sent",
        ),
        (
            lambda path: encode(Announcement(weft.__version__, "", "", "here")),
            WeftError,
            "cannot read the address that rank 1 sent: 'here' is not of type list",
        ),
        (
            lambda path: encode(Announcement("0.0.9", "", "", None)),
            WeftError,
            f"rank 1 runs weft 0.0.9, rank 0 {weft.__version__}",
        ),
        (
            lambda path: encode(Announcement("\x1b[2J\rweft", "", "", None)),
            WeftError,
            f"rank 1 runs weft \\x1b[2J\\rweft, rank 0 {weft.__version__}",
        ),
        (
            lambda path: encode(Announcement(weft.__version__, "B", "", None)),
            WeftError,
            "rank 1 belongs to another job ('B', rank 0 to '')",
        ),
        (
            lambda path: encode(Announcement(weft.__version__, "", "no room", None)),
            PeerLost,
            "rank 1 gave up while rank 0 waited for its address: no room",
        ),
    ],
    ids=["pickled", "garbled", "version", "unprintable", "job", "gives up"],
)
def test_messages_are_parsed_and_not_executed(tmp_path, monkeypatch, message, kind, text):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    store = HashStore()
    store.set("weft 1/0 1", message(tmp_path / "harm"))
    with (
        pytest.raises(kind, match=re.escape(text)),
        StoreRendezvous(store, 0, 2).exchange(INFO, SOON),
    ):
        pass
    assert not (tmp_path / "harm").exists()


def test_the_loss_of_the_store_is_no_timeout():
    server = TCPStore("127.0.0.1", 0, None, True)
    client = TCPStore("127.0.0.1", server.port, None, False)
    meeting = StoreRendezvous(client, 0, 2)
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(meeting.exchange(INFO, 300.0).__enter__)
        while not server.check(["weft 1/0 0"]):
            time.sleep(0.001)
        del server
        words = "rank 0 lost the store while it waited for the addresses of 2 ranks"
        with pytest.raises(PeerLost, match=words):
            lost.result(SOON)
        with pytest.raises(PeerLost, match=words):
            StoreRendezvous(client, 0, 2)
    with (
        pytest.raises(
            PeerTimeout, match=r"waited 0.1 s for the address of rank 1 \(timeout after 100ms\)$"
        ),
        StoreRendezvous(HashStore(), 0, 2).exchange(INFO, 0.1),
    ):
        pass


@contextlib.contextmanager
def all_but(missing):
    """A world of all ranks but one, which was not started."""
    if int(os.environ["RANK"]) == missing:
        yield None
    else:
        with weft.init(timeout=1.5) as world:
            yield world


def without_the_first():
    return all_but(0)


def without_the_last():
    return all_but(2)


def nothing(_):
    return None


@pytest.mark.parametrize(
    ("context", "text"),
    [
        (
            without_the_last,
            r"waited 1.5 s for rank 2 of 3 to join the job at 127.0.0.1:\d+: is it started, and "
            r"are MASTER_ADDR and",
        ),
        (
            without_the_first,
            r"waited 1.5 s for rank 0 of the job to listen at 127.0.0.1:\d+: is it started",
        ),
    ],
    ids=["last", "first"],
)
def test_a_rank_that_is_not_started_is_named_in_time(context, text):
    began = time.monotonic()
    missed = [outcome.error for outcome in start(nothing, 3, context=context) if outcome.error]
    assert time.monotonic() - began < SOON
    assert len(missed) == 2
    for error in missed:
        assert isinstance(error, PeerTimeout), error
        assert re.search(text, str(error)), error


@contextlib.contextmanager
def of_another_size():
    """A world of which the last rank is told that there is one rank more."""
    last = os.environ["RANK"] == "1"
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setenv("WORLD_SIZE", "3")
        with weft.init(timeout=10 * SOON) as world:
            yield world


def test_ranks_that_count_each_other_differently_learn_of_it_at_once():
    words = (
        r"WORLD_SIZE \(world_size=\) differs: it is \d on rank \d, and \d on rank \d; set it to one"
    )
    for outcome in start(nothing, 2, context=of_another_size):
        assert isinstance(outcome.error, WeftError), outcome
        assert re.match(words, str(outcome.error)), outcome.error


@pytest.mark.parametrize("first", [2, 3])
def test_ranks_of_a_store_that_count_each_other_differently(first):
    store, sizes = HashStore(), (first, 5 - first)
    waiting = StoreRendezvous(store, 0, sizes[0])
    with ThreadPoolExecutor() as pool:

        def exchange(rendezvous):
            with rendezvous.exchange(INFO, 10 * SOON):
                pass

        one = pool.submit(exchange, waiting)
        while not store.check(["weft 1/ranks"]):
            time.sleep(0.001)
        with pytest.raises(
            WeftError, match=f"it is {sizes[0]} on rank 0, and {sizes[1]} on rank 1"
        ):
            exchange(StoreRendezvous(store, 1, sizes[1]))
        with pytest.raises(
            WeftError, match=f"it is {sizes[0]} on rank 0, and {sizes[1]} on rank 1"
        ):
            one.result(SOON)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("junk\x1b[2J\r", r"the store has 'junk\\x1b\[2J\\r' where the first rank puts the number"),
        ("2", "the store has '2' where"),
        ("-3 1", "the store has '-3 1' where"),
        ("9" * 5000 + " 1", f"the store has '{'9' * 1000}' where"),
        ("\u0662 1", "where the first rank puts the number of ranks"),
        ("999999999 7", "it is 999999999 on rank 7, and 2 on rank"),
    ],
    ids=["text", "one", "negative", "endless", "digits", "large"],
)
def test_a_number_of_ranks_that_is_none_is_refused_at_once(number, text):
    store = HashStore()
    store.set("weft 1/ranks", number)
    for rank in range(2):
        with (
            pytest.raises(WeftError, match=text),
            StoreRendezvous(store, rank, 2).exchange(INFO, 300.0),
        ):
            pass


def test_what_others_say_of_their_number_of_ranks_is_printable():
    store = HashStore()
    store.set("weft 1/differs", b"\x1b[2Jlost\xff\rweft: found" + b"x" * 5000)
    with pytest.raises(WeftError) as raised, StoreRendezvous(store, 0, 2).exchange(INFO, 300.0):
        pass
    assert str(raised.value).startswith("\\x1b[2Jlost\N{REPLACEMENT CHARACTER}\\rweft: foundx")
    assert len(str(raised.value)) < 1100


class Interrupt(BaseException):
    """The exception of a signal handler."""


def test_a_signal_handler_runs_while_ranks_are_waited_for():
    def handler(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Interrupt), StoreRendezvous(HashStore(), 0, 2).exchange(INFO, SOON):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)


def test_time_in_which_a_rank_is_suspended_counts_in_no_limit_of_a_store():
    """It is between two looks, of which there are many in a second, as of a whole job."""
    store = HashStore()

    class Suspended:
        """The store of a rank that is suspended at its first look, and of a peer that is then
        late.
        """

        looks = 0

        def check(self, keys):
            self.looks += 1
            if self.looks == 1:
                time.sleep(1.2)
            if self.looks == 3:
                store.set("late", "")
            return store.check(keys)

    assert arrived(Suspended(), ["late"], _native.Deadline(0.5))


@contextlib.contextmanager
def strict():
    """A world that is made where warnings are errors, as deprecations of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with weft.init(timeout=SOON) as world:
            yield world


def test_a_world_is_made_without_warnings():
    assert on_ranks(nothing, 2, context=strict) == [None] * 2


def test_a_long_wait_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(shared_store, "_PATIENCE", 0.1)
    with pytest.raises(PeerTimeout, match=r"waited 0.5 s for ranks 1, 2 of 3 to join the job"):
        shared_store._store(0, 3, "127.0.0.1", 0, 0.5)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 waits for ranks 1, 2 of 3 to join the job at 127.0.0.1:0"
    ]


@contextlib.contextmanager
def one_of_two_jobs(folder):
    """A world of two ranks of a job, one of two jobs with the same port."""
    job, rank = divmod(int(os.environ["RANK"]), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "WEFT_JOB": "AB"[job]}
    try:
        with weft.init(timeout=2) as world:
            yield world
    except WeftError:
        (folder / f"{job} {rank}").touch()
        raise


def gathered(_, folder):
    found = weft.all_gather(torch.tensor([float(ord(os.environ["WEFT_JOB"]))])).tolist()
    limit = time.monotonic() + SOON
    while len([*folder.iterdir()]) < 2:  # the port is in use until the other job has given up
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found


def test_two_jobs_at_one_port_stay_separate(tmp_path):
    outcomes = start(gathered, 4, tmp_path, context=partial(one_of_two_jobs, tmp_path))
    jobs = {"A": outcomes[:2], "B": outcomes[2:]}
    [complete] = [
        name for name, ranks in jobs.items() if not any(outcome.error for outcome in ranks)
    ]
    assert [outcome.result for outcome in jobs[complete]] == [[float(ord(complete))] * 2] * 2
    [other] = {*jobs} - {complete}
    first, second = (outcome.error for outcome in jobs[other])
    assert isinstance(first, WeftError), first
    assert f"for the ranks of job {other}" in str(first)
    assert "set MASTER_PORT to a free one on all ranks" in str(first)
    assert isinstance(second, PeerTimeout), second
    assert f"waited 2 s for rank 0 of 2 to join job {other} at 127.0.0.1:" in str(second)


def test_jobs_have_names_and_ports_of_their_own():
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "77"}
    jobs = [
        *(mpi | {"PMIX_NAMESPACE": f"prterun-node1-{pid}"} for pid in (51234, 51243, 51324, 51342)),
        *(slurm | {"SLURM_STEP_ID": str(step)} for step in range(4)),
        slurm | {"SLURM_JOB_ID": "770", "SLURM_STEP_ID": "0"},
    ]
    found = [launcher_variables(job) for job in jobs]
    assert (
        len({variables["MASTER_PORT"] for variables in found})
        == len({variables["WEFT_JOB"] for variables in found})
        == len(jobs)
    )
    assert found[4]["WEFT_JOB"] == "77.0"
    # as set by srun --mpi=pmi2, where ranks on other hosts have other parents
    pmi = slurm | {"SLURM_STEP_ID": "0", "PMI_RANK": "0", "PMI_SIZE": "2"}
    assert launcher_variables(pmi) == found[4]
    assert all(20000 <= int(variables["MASTER_PORT"]) < 32000 for variables in found)


# Connections


def connect_all(listeners, timeout=SOON):
    """The connections of ranks with these listeners, each on a thread."""
    with ThreadPoolExecutor(len(listeners)) as pool:
        peers = [
            {peer: (7, other.address) for peer, other in enumerate(listeners) if other is not own}
            for own in listeners
        ]
        found = [
            pool.submit(connector.connect, rank, own, peers[rank], timeout)
            for rank, own in enumerate(listeners)
        ]
        return [each.result(2 * SOON) for each in found]


def check_joined(connected):
    """Every two ranks have the two ends of one connection."""
    for rank, theirs in enumerate(connected):
        for peer, connection in theirs.items():
            assert connection.getblocking()
            connection.send(bytes([rank, peer]))
    for rank, theirs in enumerate(connected):
        for peer, connection in theirs.items():
            assert connection.recv(2) == bytes([peer, rank])
            connection.close()


@contextlib.contextmanager
def listeners(ranks, host=""):
    with contextlib.ExitStack() as stack:
        made = [Listener(host) for _ in range(ranks)]
        for each in made:
            stack.enter_context(each.socket)
        yield made


@pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["unix", "tcp"])
def test_strangers_delay_no_rank(host):
    """Foreign processes send nothing, too little, malformed data, or the hello for another rank;
    and they are more than a listener keeps.
    """
    with listeners(3, host) as ranks, contextlib.ExitStack() as stack:
        strangers = []
        for message in [b""] * 80 + [
            b"x",
            b"garbled" * 1000,
            name_of(ranks[1].address.secret) + bytes(16),
            b"",
        ]:
            stranger = stack.enter_context(
                socket.socket(ranks[0].address.family, ranks[0].socket.type)
            )
            stranger.connect(ranks[0].address.at)
            stranger.sendall(message) if message else None
            strangers.append(stranger)
        began = time.monotonic()
        check_joined(connect_all(ranks))
        assert time.monotonic() - began < SOON / 2
        for stranger in strangers:
            stranger.settimeout(SOON)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""


@pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["unix", "tcp"])
def test_strangers_do_not_prolong_the_limit(host):
    with (
        listeners(2, host) as (own, absent),
        socket.socket(own.address.family, own.socket.type) as stranger,
    ):
        stranger.connect(own.address.at)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(connector.connect, 0, own, {1: (7, absent.address)}, 0.5)
            while not waiting.done():
                with contextlib.suppress(OSError):
                    stranger.send(b"x")
                time.sleep(0.02)
        with pytest.raises(PeerTimeout, match=r"rank 0 waited 0.5 s for ranks \[1\] to connect"):
            waiting.result()


def test_time_in_which_ranks_are_suspended_counts_in_no_limit_to_connect(monkeypatch):
    """All of them are, between two looks, until the limit has passed."""
    with listeners(2) as ranks, ThreadPoolExecutor() as pool:
        looks, late = [], []

        def suspended(events, seconds):
            looks.append(seconds)
            if len(looks) == 1:
                time.sleep(1.2)
                peers = {0: (7, ranks[0].address)}
                late.append(pool.submit(connector.connect, 1, ranks[1], peers, SOON))
            return poll(events, seconds)

        poll = connector.poll
        monkeypatch.setattr(connector, "poll", suspended)
        first = connector.connect(0, ranks[0], {1: (7, ranks[1].address)}, 1.0)
        check_joined([first, late[0].result(SOON)])


@pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["unix", "tcp"])
def test_a_peer_may_prove_itself_slowly(host):
    with listeners(2, host) as (own, theirs), ThreadPoolExecutor() as pool:
        waiting = pool.submit(connector.connect, 0, own, {1: (7, theirs.address)}, SOON)
        with socket.socket(own.address.family, own.socket.type) as slow:
            slow.connect(own.address.at)
            time.sleep(1.2)
            slow.setblocking(False)
            caller = Caller(slow, own.address.secret, connector._RANK.pack(1))
            while not caller.advance():
                time.sleep(0.1)
            theirs.socket.setblocking(True)
            accepted = Accepted(theirs.socket.accept()[0], connector._RANK.size)
            while not accepted.advance(theirs.address.secret):
                pass
            accepted.connection.send(connector._CONFIRMED)
            for connection in (waiting.result(SOON)[1], accepted.connection):
                connection.close()


def test_more_connections_than_the_backlog(monkeypatch):
    monkeypatch.setattr("weft.bootstrap.listener._LISTEN_BACKLOG", 1)
    with listeners(8) as ranks:
        check_joined(connect_all(ranks))


def test_an_unreachable_peer():
    with socket.create_server(("127.0.0.1", 0)) as server, listeners(1, "127.0.0.1") as [own]:
        port = server.getsockname()[1]
        server.close()
        with pytest.raises(
            PeerLost,
            match=r"rank 1 \(pid 7\) died or gave up, or a firewall refuses connections to it, while "
            "rank 0 waited to connect to it",
        ):
            connector.connect(0, own, {1: (7, Address("127.0.0.1", port, b""))}, SOON)
        with pytest.raises(
            PeerTimeout,
            match=r"rank 0 cannot reach rank 1 \(pid 7\) at no address, port 9: .*; is there a firewall",
        ):
            connector.connect(0, own, {1: (7, Address("no address", 9, b""))}, SOON)


@contextlib.contextmanager
def as_two_users():
    if os.environ["RANK"] == "1":
        # imported before the change of user, after which root's files are unreadable
        "host".encode("idna")
        os.setuid(54321)
    with weft.init(timeout=20) as world:
        yield world


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_ranks_of_two_users_are_refused():
    for rank, outcome in enumerate(start(nothing, 2, context=as_two_users)):
        users = (54321, 0) if rank == 0 else (0, 54321)
        assert isinstance(outcome.error, WeftError), outcome
        assert (
            f"rank {1 - rank} runs as another user than rank {rank}: {users[0]} and {users[1]}; "
            "run all ranks of a host as one user" in str(outcome.error)
        )


# Limits


def patient():
    return weft.init(timeout=math.inf)


def waits(world):
    assert world.timeout == 1e6
    signals = world.signals(1)
    x = torch.ones(3)
    assert weft.all_reduce(x, timeout=math.inf).tolist() == [2.0] * 3
    assert weft.all_reduce_async(x).wait().tolist() == [2.0] * 3
    weft.notify(signals, 0, 1 - world.rank)
    weft.wait(signals, 0, ">=", 1, timeout=math.inf)
    weft.barrier(timeout=1e300)


def test_limits_may_have_any_length():
    on_ranks(waits, 2, context=patient)
    with weft.local_world(2, timeout=math.inf) as local:
        assert local.run(lambda: weft.all_reduce(torch.ones(1)).item()) == [2.0, 2.0]
    for bad in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
            weft.init(timeout=bad)


def patient_group():
    return group(timeout=timedelta(days=365).total_seconds())


def reduces(_):
    x = torch.ones(3)
    dist.all_reduce(x)
    return x.tolist()


def test_groups_may_have_a_timeout_of_a_year():
    assert on_ranks(reduces, 2, context=patient_group) == [[2.0] * 3] * 2
