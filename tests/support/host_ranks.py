"""What ranks on several hosts do in tests: a script for torchrun, with the name of a part and the
folder for what it finds.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import weft
from support import random_calls, sums
from support.process_resources import leaked, resources
from weft.cli import app
from weft.doctor.checks import diagnose
from weft.engines import network
from weft.engines.recording import clock_offsets, record
from weft.plan.binding import split
from weft.schedules.common import apart
from weft.world import relay, tcp
from weft.world import world as worlds

LIMIT = 2.0  # seconds that a wait may take where something goes wrong


def whole(rank, *shape, call=0):
    """Whole numbers whose products and sums floats hold exactly, other ones for each rank and call."""
    return torch.randint(
        -8, 8, shape, generator=torch.Generator().manual_seed(1000 * call + rank)
    ).float()


def operators(world):
    """Every operator and collective with every algorithm there is, on new data each time, equals
    the single-process result.
    """
    ranks = range(world.ranks)
    shards = [5 + 7 * rank for rank in ranks]
    total, k, n = 96, 6, 5
    for call in range(3):
        b = whole(world.rank, k, n, call=call + 50)
        weights = [whole(r, k, n, call=call + 50) for r in ranks]
        pieces = [whole(r, shards[r], k, call=call) for r in ranks]
        gathered = torch.cat(pieces)
        for algorithm in ("auto", "push", "ring", "sequential"):
            out, kept = weft.all_gather_matmul(
                pieces[world.rank],
                b,
                shard_rows=shards,
                algorithm=algorithm,
                chunk_rows=3,
                return_gathered=True,
            )
            assert torch.equal(out, gathered @ b), algorithm
            assert torch.equal(kept, gathered), algorithm
        whole_a = [whole(r, total, k, call=call + 9) for r in ranks]
        products = [whole_a[r] @ weights[r] for r in ranks]
        summed, own = (
            sum(products),
            slice(world.rank * total // world.ranks, (world.rank + 1) * total // world.ranks),
        )
        for algorithm in ("auto", "push", "ring", "sequential"):
            y = weft.matmul_reduce_scatter(whole_a[world.rank], b, algorithm=algorithm)
            assert torch.equal(y, summed[own]), algorithm
        for algorithm in ("auto", "two_shot", "ring", "sequential"):
            assert torch.equal(
                weft.matmul_all_reduce(whole_a[world.rank], b, algorithm=algorithm), summed
            ), algorithm
        for algorithm in ("auto", "push", "ring"):
            got = weft.all_gather(
                pieces[world.rank], shard_rows=shards, algorithm=algorithm, chunk_rows=4
            )
            assert torch.equal(got, gathered), algorithm
        into = torch.empty(total // world.ranks, n)
        for algorithm in ("push", "ring"):
            assert torch.equal(
                weft.reduce_scatter(products[world.rank], out=into, algorithm=algorithm),
                summed[own],
            )
        for algorithm in ("auto", "two_shot", "ring"):
            for rows in (total, 1):
                got = weft.all_reduce(products[world.rank][:rows].contiguous(), algorithm=algorithm)
                assert torch.equal(got, summed[:rows]), algorithm
        same = products[world.rank].clone()
        assert torch.equal(
            weft.all_reduce(same, out=same, op="max"), torch.stack(products).max(0).values
        )
        for source in ranks:
            sent = (
                products[source].clone()
                if world.rank == source
                else torch.full((total, n), torch.nan)
            )
            assert torch.equal(
                weft.broadcast(sent, source, algorithm=("auto", "ring")[call % 2]), products[source]
            )
        for repeats in (
            1,
            40,
        ):  # through eager buffers, where ranks share a host, and through the workspace
            given = [product.repeat(1, repeats) for product in products]
            taken = torch.cat([given[r].chunk(world.ranks)[world.rank] for r in ranks])
            there, back = torch.empty_like(taken), torch.empty_like(taken)
            handles = [
                weft.all_to_all_async(given[world.rank], out=there),
                weft.all_to_all_async(there, out=back),
            ]
            assert torch.equal(handles[0].wait(), taken)
            assert torch.equal(handles[1].wait(), given[world.rank])
            sizes = [[(r + p) % 3 * 4 for p in ranks] for r in ranks]
            shares = [given[r][: sum(sizes[r])].split(sizes[r]) for r in ranks]
            received = [shares[r][world.rank] for r in ranks]
            options = {
                "input_split_sizes": sizes[world.rank],
                "output_split_sizes": [*map(len, received)],
            }
            assert torch.equal(
                weft.all_to_all(torch.cat(shares[world.rank]), **options), torch.cat(received)
            )
        handles = [
            weft.all_gather_async(pieces[world.rank], shard_rows=shards),
            weft.all_reduce_async(products[world.rank]),
        ]
        assert torch.equal(handles[1].wait(), summed)
        assert torch.equal(handles[0].wait(), gathered)
        weft.barrier()
    noise = torch.randn(64, 32, generator=torch.Generator().manual_seed(world.rank))
    once, again = (
        weft.matmul_all_reduce(
            noise, torch.randn(32, 8, generator=torch.Generator().manual_seed(7))
        )
        for _ in range(2)
    )
    assert torch.equal(once, again)  # the same bits on every run, and on every rank
    everyone = weft.all_gather(once.view(1, -1))
    assert all(torch.equal(everyone[0], theirs) for theirs in everyone)
    wide = torch.randn(40, 64)[:, ::2][:, :6]  # rows that are not contiguous
    assert torch.equal(weft.all_gather(wide, algorithm="push")[world.rank * 40 :][:40], wide)
    symmetric = world.empty(8, 4)
    symmetric.fill_(world.rank)
    assert torch.equal(
        weft.all_gather(symmetric)[:, 0], torch.arange(world.ranks).repeat_interleave(8).float()
    )


def calls_at_random(world):
    """Calls of all kinds one after the other and beside each other: each gives what it must."""
    random_calls.check(world, seed=2, number=300)


def sums_to_the_bit(world):
    """Random sums of every dtype have the promised bits, by every algorithm; products are of one
    column and one row, so exact.
    """
    ranks, rows, columns = range(world.ranks), 61, 24
    kept = split(rows, world.ranks)
    for dtype, out_dtype in sums.FUSED:
        a = [sums.numbers(rank, rows, 1, dtype=dtype) for rank in ranks]
        b = [sums.numbers(rank + 50, 1, columns, dtype=dtype) for rank in ranks]
        products = [sums.products(*pair, out_dtype) for pair in zip(a, b, strict=True)]
        wanted = sums.blocks(sums.once, products, world.hosts, kept, out_dtype)
        mine, options = (a[world.rank], b[world.rank]), {"out_dtype": out_dtype, "chunk_rows": 5}
        for algorithm in ("auto", "push", "ring", "sequential"):
            y = weft.matmul_reduce_scatter(*mine, shard_rows=kept, algorithm=algorithm, **options)
            assert torch.equal(y, wanted[world.rank]), (algorithm, dtype, out_dtype)
        for algorithm in ("auto", "two_shot", "ring", "sequential"):
            y = weft.matmul_all_reduce(*mine, algorithm=algorithm, **options)
            assert torch.equal(y, torch.cat(wanted)), (algorithm, dtype, out_dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        parts = [sums.numbers(rank, rows, columns, dtype=dtype) for rank in ranks]
        for algorithm, how in (("push", sums.once), ("ring", sums.at_every_hop)):
            y = weft.reduce_scatter(parts[world.rank], shard_rows=kept, algorithm=algorithm)
            assert torch.equal(y, sums.blocks(how, parts, world.hosts, kept, dtype)[world.rank]), (
                algorithm,
                dtype,
            )
        parts, kept_each = [part.view(-1) for part in parts], split(rows * columns, world.ranks)
        around = sums.around if apart(world.hosts) else sums.at_every_hop
        for algorithm, how in (("two_shot", sums.once), ("ring", around)):
            y = weft.all_reduce(parts[world.rank], algorithm=algorithm)
            assert torch.equal(
                y, torch.cat(sums.blocks(how, parts, world.hosts, kept_each, dtype))
            ), (algorithm, dtype)


def refusals(world):
    """What hosts cannot do is refused by name, before anything is sent."""
    a, b = torch.ones(64, 4), torch.ones(4, 4)
    far = next(rank for rank in range(world.ranks) if not world.same_host(rank))
    symmetric, signals = world.empty(4), world.signals(1)
    for words, call in {
        "direct is not possible in this world": lambda: weft.all_gather_matmul(
            a, b, algorithm="direct"
        ),
        "pull is not possible in this world": lambda: weft.all_gather(a, algorithm="pull"),
        "one_shot is not possible in this world": lambda: weft.matmul_all_reduce(
            a, b, algorithm="one_shot"
        ),
        f"rank {far} is on another host; one-sided": lambda: weft.put(
            symmetric, torch.ones(4), far
        ),
        f"rank {far} is on another host; one-sided calls": lambda: weft.notify(signals, 0, far),
        f"rank {far} is on another host, whose memory": lambda: world.peer(symmetric, far),
        "have a real link": lambda: world.emulate_link(1.0),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
    assert "push" in weft.explain(a, b)


def error_of(call):
    """The error that a call raises at last, as (class, words, its seconds)."""
    try:
        while True:
            begun = time.monotonic()
            call()
    except weft.WeftError as error:
        return type(error).__name__, str(error), time.monotonic() - begun


@contextlib.contextmanager
def patient_farewell():
    """Let ranks that leave wait long for an answer: that all get one shows in that the test ends."""
    usual, relay._LINGER = relay._LINGER, 300.0
    yield
    relay._LINGER = usual


@contextlib.contextmanager
def uneven_channels(world):
    """Let rank 0 take what the last rank sends later than other ranks of its host do."""
    usual = network._Arrivals.receive

    def late(self, *message):
        if threading.current_thread() is slow:
            time.sleep(0.001)
        return usual(self, *message)

    receivers = dict(zip(world.relay.peers, world.relay.receivers, strict=True))
    slow = receivers.get(world.ranks - 1) if world.rank == 0 else None
    network._Arrivals.receive = late
    yield
    network._Arrivals.receive = usual


def mismatch():
    """Ranks that call something else are shown both calls; nothing is received in place of
    something else.
    """
    with patient_farewell(), weft.init(timeout=20) as world:
        a, b = torch.ones(64, 8), torch.ones(8, 8)
        weft.all_gather_matmul(a, b)
        odd = world.rank == world.ranks - 1
        name, words, _ = error_of(
            lambda: weft.all_reduce(a) if odd else weft.all_gather_matmul(a, b)
        )
        assert name == "MismatchError", words
        assert "all_gather_matmul(" in words, words
        assert "all_reduce(" in words, words


def gives_up():
    """A rank that cannot go on before ranks have told each other all is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(
                worlds,
                "listen_to_hosts",
                lambda rank: (_ for _ in ()).throw(weft.WeftError("no address")),
            )
        return error_of(lambda: weft.init(dist.new_group(backend="gloo"), timeout=300))[:2]


def traffic(world):
    """What this host sends for each operator and collective, in bytes, and the least that could do.

    Rows reach each other host once, and so do sums of a host's rows: what a rank of another host
    keeps goes to it, and comes back where all are to have it.
    """
    rows, columns = 1024, 512
    size, hosts = rows * columns * 4, len(set(world.hosts))
    here = world.hosts.count(world.hosts[world.rank])
    far, mine, part = world.ranks - here, here * (hosts - 1), torch.randn(rows, columns)
    whole, b = torch.randn(world.ranks * rows, columns), torch.eye(columns)
    calls = {
        "all_gather": (lambda: weft.all_gather(part), mine),
        "all_gather_matmul": (lambda: weft.all_gather_matmul(part, b), mine),
        "all_gather_matmul, sequential": (
            lambda: weft.all_gather_matmul(part, b, algorithm="sequential"),
            mine,
        ),
        "reduce_scatter": (lambda: weft.reduce_scatter(whole), far),
        "matmul_reduce_scatter": (lambda: weft.matmul_reduce_scatter(whole, b), far),
        "matmul_reduce_scatter, sequential": (
            lambda: weft.matmul_reduce_scatter(whole, b, algorithm="sequential"),
            far,
        ),
        "all_reduce": (lambda: weft.all_reduce(whole), far + mine),
        "matmul_all_reduce": (lambda: weft.matmul_all_reduce(whole, b), far + mine),
        "matmul_all_reduce, sequential": (
            lambda: weft.matmul_all_reduce(whole, b, algorithm="sequential"),
            far + mine,
        ),
        "all_gather, ring": (lambda: weft.all_gather(part, algorithm="ring"), mine),
        "broadcast": (
            lambda: weft.broadcast(whole, 0),
            world.ranks * (hosts - 1) if world.same_host(0) else 0,
        ),
        "all_to_all": (lambda: weft.all_to_all(whole), here * far),
    }
    found = {}
    for name, (call, least) in calls.items():
        rounds = []
        for _ in range(2):  # since now and then something is sent again
            weft.barrier()
            before = sent()
            weft.barrier()  # nobody begins until all have looked
            call()
            weft.barrier()
            rounds.append(sent() - before)
        found[name] = min(rounds), least * size
    return found


def traces(world):
    """What rank 0 makes of a barrier on all ranks: when each began and ended it; and by how much
    the clocks of others are ahead.
    """
    with record(world) as recording:
        weft.barrier()
    trace, ahead = recording.gather("a barrier"), clock_offsets(world)
    if trace is None:
        return None
    spans = [[span for span in trace.spans if span.rank == rank] for rank in range(world.ranks)]
    return [
        [min(span.start for span in own), max(span.stop for span in own)] for own in spans
    ], ahead


def sent():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def cut_off(folder):
    """A host's interface goes down in mid-operator: every rank gives up within its limit, and says
    so.
    """
    with weft.init(timeout=20) as world:
        a, b = torch.ones(256, 64), torch.ones(64, 8)
        weft.all_gather_matmul(a, b)
        (folder / f"running{world.rank}").touch()
        found = error_of(lambda: weft.all_gather_matmul(a, b, timeout=LIMIT))
    (folder / f"gave_up{dist.get_rank()}").touch()
    while not (folder / "reconnected").exists():
        time.sleep(0.01)
    return found


def doctor():
    """What is printed of hosts that something is wrong with: a firewall, an interface, and the
    clock of the last; the rest is well.
    """
    first, last = (
        os.environ["RANK"] == "0",
        os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1),
    )
    firewall = [
        "ip",
        "rule",
        "{}",
        "ipproto",
        "tcp",
        "sport",
        "30000-60999",
        "blackhole",
    ]  # its answers do not get out

    def diagnosed():
        printed = io.StringIO()
        well = diagnose(Console(file=printed, width=200))
        return well, printed.getvalue()

    with contextlib.ExitStack() as stack:
        for word, undo in (("add", "delete"),) if first else ():
            subprocess.run([part.format(word) for part in firewall], check=True)
            stack.callback(subprocess.run, [part.format(undo) for part in firewall], check=True)
        found = [diagnosed()]
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        found.append(diagnosed())
    with pytest.MonkeyPatch.context() as patch:
        if last:
            now = time.time_ns
            patch.setattr(time, "time_ns", lambda: now() + 90 * 10**9)
        found.append(diagnosed())
    return found


def benches(folder):
    """Benchmarks of every kind measure, or say what cannot be measured on several hosts."""
    few = ["--warmup", "0", "--iterations", "1", "--threads", "1"]
    fused, sizes = ["--shape", "64x32x16", *few], ["--sizes", "4K", *few]
    measured = {
        **dict.fromkeys(("all-gather-matmul", "matmul-all-reduce"), fused),
        **dict.fromkeys(("reduce-scatter", "all-to-all"), sizes),
        "overlap": ["--shape", "64x64x64", "--size", "4K", *few],
    }
    found = []
    for name, options in measured.items():
        code, _ = command("bench", name, *options, "--json", folder / name)
        assert code == 0, name
        if dist.get_rank() == 0:
            found.append(json.loads((folder / name).read_text()))
    refused = {
        "one-sided calls stay within one": ["p2p", *sizes],
        "direct is not possible in this world": [
            "all-gather-matmul",
            *fused,
            "--algorithm",
            "direct",
        ],
        "pull is not possible in this world": ["all-gather", *sizes, "--algorithm", "pull"],
        "one_shot is not possible in this world": ["all-reduce", *sizes, "--algorithm", "one_shot"],
        "have a real link between them": ["matmul-all-reduce", *fused, "--link-gbps", "1"],
        "not to be slowed by an emulated one": ["overlap", "--link-gbps", "1", *few],
    }
    for words, arguments in refused.items():
        code, text = command("bench", *arguments)
        assert (code, words in text) == (1, True), text
    return found


def command(*arguments):
    """The exit code of a weft command that this rank joins in, and what it says of errors."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            app([str(argument) for argument in arguments], standalone_mode=True)
        except SystemExit as end:
            return end.code or 0, said.getvalue()
    return 0, said.getvalue()


def leaves():
    """A rank that leaves its world is named by those that still need it, and they do not lose each
    other.
    """
    with weft.init(timeout=20) as world:
        weft.barrier()
        leaver = world.ranks - 1
        if world.rank == leaver:
            return
        while not world.relay.hung_up[leaver].is_set():
            time.sleep(0.001)
        name, words, _ = error_of(weft.barrier)
        assert name == "PeerLost", words
        assert words.startswith(f"rank {leaver} (pid "), words
        assert "closed its world" in words, words


def halfway():
    """The last rank takes nothing of a long message, sends half of its own, and is gone: nothing
    stays behind elsewhere.
    """
    a, found = torch.ones(16 << 20), []  # more than sockets hold
    weft.init(timeout=20).close()  # now torch.distributed has what it keeps
    worlds._default = None

    def half(peer, tag, rows):
        if not rows:
            whole(peer, tag, rows)
            return
        world.relay.transport.connections[peer].sendall(
            tcp.HEADER.pack(*tag, len(rows)) + bytes(rows[: len(rows) // 2])
        )
        sent.set()
        until_closed()

    def nothing(rows, read):
        if rows.rows:
            until_closed()
            raise ConnectionResetError("closed")

    def until_closed():
        while not world.relay.closed:
            time.sleep(0.001)

    for how in ("left", "raised", "died"):
        before, sent = resources(), threading.Event()
        with (
            contextlib.suppress(KeyError),
            pytest.MonkeyPatch.context() as patch,
            weft.init(timeout=20) as world,
        ):
            whole = world.relay.send
            if world.rank == world.ranks - 1:
                patch.setattr(
                    world.relay, "timeout", 1.0
                )  # which leaving takes, before the other's waiting does
                patch.setattr(world.relay, "send", half)
                patch.setattr(network._Rows, "fill", nothing)
            weft.barrier()
            if world.rank < world.ranks - 1:
                found.append(error_of(lambda: weft.all_gather(a))[:2])
            else:
                weft.all_gather_async(a, timeout=1)
                connection = world.relay.transport.connections[0]
                while not (sent.is_set() and _waiting(connection, termios.FIONREAD)) or _waiting(
                    connection, termios.TIOCOUTQ
                ):
                    time.sleep(0.001)
                if how == "died":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raised":
                    raise KeyError("halfway")
        worlds._default = world = whole = None
        found.append(leaked(before))
    return found


def _waiting(connection, where):
    """The bytes that a socket has in one of its queues."""
    return struct.unpack("i", fcntl.ioctl(connection, where, bytes(4)))[0]


def killed(folder):
    """A rank dies in mid-operator; all others learn of it at once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the agent of the dead rank's host
    with weft.init(timeout=20) as world:
        a, b = torch.ones(256, 64), torch.ones(64, 8)
        weft.all_gather_matmul(a, b)
        if world.rank == world.ranks - 1:
            while not all(
                world.executor.peer_call(rank, world.relay.call + 1) for rank in range(world.rank)
            ):  # they are in the next
                time.sleep(0.001)
            (folder / "death").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        name, words, _ = error_of(lambda: weft.all_gather_matmul(a, b))
        return name, words, time.time()


def main():
    torch.set_num_threads(1)
    parts, folder = sys.argv[1].split(","), Path(sys.argv[2])
    for part in parts:
        if part in (
            "operators",
            "calls_at_random",
            "refusals",
            "sums_to_the_bit",
            "traces",
            "traffic",
        ):
            with patient_farewell(), weft.init(timeout=20) as world, uneven_channels(world):
                found = globals()[part](world)
        else:
            found = globals()[part](*([folder] if part in ("benches", "cut_off", "killed") else []))
        (folder / f"{part}{dist.get_rank()}").write_text(json.dumps(found))
    if "killed" in parts:
        os._exit(
            1
            # the group has lost a member; agents whose ranks succeed wait minutes for those whose ranks
            # do not
        )


if __name__ == "__main__":
    main()
