"""Findings of `weft doctor` on faulty ranks; its run on real hosts is in test_hosts.py."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console
from support.sysfs import recorded
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.doctor import checks as doctor
from weft.doctor import cores as placed
from weft.doctor.memory import Memory
from weft.host import topology
from weft.host.topology import Core, Topology
from weft.schedules.thresholds import Thresholds

RATES = {"float32": 80.0}
PLENTY = Memory(20 << 30, 0, 10 << 30)


SMALL = Topology(tuple(Core((cpu,), 0, 0, 0) for cpu in range(2)), cpuset=frozenset({0, 1}))


def report(
    rank,
    host="one",
    cores=(0, 1),
    threads=1,
    shared="works",
    rates=RATES,
    topology=SMALL,
    team=None,
    thresholds=(),
    waited=0.0,
    memory=PLENTY,
    quotas=(),
):
    name, addresses = f"node-{host}", {"lo": "127.0.0.1"}
    return doctor.RankReport(
        rank,
        100 + rank,
        name,
        host,
        "",
        addresses,
        tuple(cores),
        threads,
        shared,
        rates,
        topology,
        team or threads,
        dict(thresholds),
        memory,
        dict(quotas),
        waited,
        20.1,
    )


def contact(host, address, interface="", port=5000):
    return doctor.Contact(
        f"node-{host}", host, interface, {"lo": "127.0.0.1", "eth1": "10.0.0.7"}, address, port
    )


@pytest.mark.parametrize(
    ("reports", "links", "offsets", "patterns"),
    [
        ([report(0), report(1)], {}, [0, 0], []),
        (
            [report(0), report(1, shared="no pages")],
            {},
            [0, 0],
            ["rank 1 on node-one cannot allocate symmetric memory: no pages"],
        ),
        (
            [report(0, memory=Memory(100 << 20, 300 << 20, 0)), report(1)],
            {},
            [0, 0],
            [
                "node-one has 100 MiB of memory for 2 rank.s. under the limit of 300 MiB of its "
                "container or job; .* resources.limits.memory in Kubernetes, sbatch --mem"
            ],
        ),
        (
            [report(0, threads=2, team=1)],
            {},
            [0],
            ["rank 0 on node-one copies and adds with 1 of its 2 threads: "],
        ),
        (
            [report(0, threads=3)],
            {},
            [0],
            ["3 threads on 2 core.*: set OMP_NUM_THREADS", "node-one is oversubscribed: 1 rank"],
        ),
        (
            [report(0, cores=(0,)), report(1, cores=(0,))],
            {},
            [0, 0],
            ["oversubscribed: 2 rank.* with 2 threads in all on 1 core"],
        ),
        (
            [report(0), report(1, "two")],
            {},
            [0, -3_000_000_000],
            ["clock of node-two .rank 1. is 3.0 s behind that of node-one: .* NTP"],
        ),
        ([report(0), report(1, "two")], {}, [0, 900_000_000], []),
        (
            [report(0), report(1)],
            {(0, 1): (1.0, 9.0), (0, 2): (10.0, 9.0)},
            [0, 0],
            ["ranks 0 and 1 have a link of 1.00 Gbit/s, others of 10"],
        ),
        (
            [report(0), report(1, rates={"float32": 20.0})],
            {},
            [0, 0],
            ["rank 1 on node-one multiplies float32 at 20 GFLOP/s, another rank at 80"],
        ),
    ],
)
def test_faults_are_reported(reports, links, offsets, patterns):
    texts = [*doctor._problems(reports, links, offsets)]
    assert len(texts) == len(patterns), texts
    assert all(re.search(pattern, text) for pattern, text in zip(patterns, texts, strict=True)), (
        texts
    )


def test_a_small_dev_shm_is_noted_but_no_fault():
    ranks = [report(0, memory=Memory(20 << 30, 0, 64 << 20)), report(1), report(2, "two")]
    [(kind, text)] = doctor._notes(ranks)
    assert kind == "note"
    assert text.startswith(
        "/dev/shm of node-one has 64 MiB, the default of containers. weft needs none"
    )
    assert all(remedy in text for remedy in ("docker run --ipc host", "Kubernetes", "pyxis"))
    assert [*doctor._problems(ranks, {}, [0, 0, 0])] == []
    [(_, text)] = doctor._notes([report(0, memory=Memory(20 << 30, 0, 512 << 20))])
    assert "has 512 MiB. weft needs none" in text


def test_a_lack_of_memory_for_a_world_is_no_lack_of_a_connection(monkeypatch):
    def rejected(**_):
        raise weft.SymmetricMemoryError("rank 0 has no memory to make the world: 9 bytes requested")

    monkeypatch.setattr(doctor, "init", rejected)
    console = Console(width=200, record=True, file=StringIO(), soft_wrap=True)
    assert not doctor.diagnose(console)
    printed = console.export_text()
    assert printed.startswith("wrong: there is no memory for a world: rank 0 has no memory to make")
    assert "resources.limits.memory" in printed
    assert "No connection" not in printed


@pytest.mark.parametrize("kind", [RuntimeError, weft.SymmetricMemoryError])
def test_errors_are_printed_as_they_are(kind, monkeypatch):
    error = "[/__w/gloo/pair.cc:553] Connection closed by peer [fe80::1]:7040"

    def rejected(**_):
        raise kind(error)

    monkeypatch.setattr(doctor, "init", rejected)
    console = Console(width=200, record=True, file=StringIO())
    assert not doctor.diagnose(console)
    assert error in console.export_text()
    doctor._print_verdict([report(0)], ["no [pages]"], console)
    assert "no [pages]" in console.export_text()


@pytest.mark.parametrize("verbose", [False, True])
def test_the_verdict_comes_first_and_fits_a_narrow_terminal(verbose):
    words = ["doctor", *["--verbose"] * verbose]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    lines = done.stdout.splitlines()
    fine = done.exit_code == 0
    assert lines[0].startswith("Nothing is wrong: 1 rank on 1 host." if fine else "wrong: ")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 20 or verbose or not fine
    assert ("─" in "".join(lines), "--verbose shows" in "".join(lines)) == (verbose, not verbose)
    if fine and not verbose:
        assert max(map(len, CliRunner().invoke(app, words).stdout.splitlines())) > 80, "a file"


def printed(width, everyone, links):
    """The verdict, the summary and the tables in a terminal of some width."""
    console = Console(width=width, record=True, file=StringIO())
    doctor._print_verdict(everyone, [*doctor._problems(everyone, links, [0] * 3)], console)
    for text in doctor._summary(everyone, links):
        console.print(text, markup=False)
    sentences = console.export_text()
    doctor._print_tables(everyone, links, console)
    return sentences, console.export_text()


def test_no_cell_is_cut_and_no_word_broken():
    memory = Memory(20 << 30, 0, 64 << 20)
    name = "-0123456789" * 3
    everyone = [report(0, memory=memory), report(1, threads=3), report(2, name)]
    links = {(0, 2): (8.25, 70.0), (1, 2): (3.5, 90.0)}
    sentences, tables = printed(80, everyone, links)
    assert sentences.startswith("wrong: rank 1 on node-one computes with 3 threads on 2 core(s)")
    assert "Nothing is wrong" not in sentences
    assert sentences.split() == printed(1000, everyone, links)[0].split()
    text = " ".join(sentences.split())
    for words in (
        "node-one: 2 ranks (0-1) on 2 cores (0-1); threads of each: 1 to 3; GFLOP/s: float32 80.",
        "Links of hosts: 3.50 to 8.25 Gbit/s, latency 70 to 90 us.",
    ):
        assert words in text
    assert "…" not in tables
    cells = [line.split("│")[2].strip() for line in tables.splitlines() if line.count("│") == 7]
    assert "".join(cells).replace(" ", "") == f"0:node-one0:node-one1:node-{name}"


def test_other_programs_on_the_cores_are_noticed_but_no_fault():
    idle, disturbed = report(0, cores=(0,)), report(1, cores=(1,), waited=0.34)
    [(kind, text)] = doctor._notes([idle, disturbed, report(2, "two")])
    assert kind == "busy"
    assert text.startswith(
        "rank 1 on node-one waited for a core in 34% of the time of its products, at a load of "
        "20.1 on 2 core(s): other programs are running"
    )
    assert [*doctor._problems([idle, disturbed], {}, [0, 0])] == []
    # ranks that share a core wait for each other, which is a fault
    shared = [report(0, cores=(0,), waited=0.5), report(1, cores=(0,), waited=0.5)]
    assert [*doctor._notes(shared)] == []


def test_quotas_of_control_groups_are_found(tmp_path):
    files = {
        "pod/cpu.max": "150000 100000",
        "pod/container/cpu.max": "max 100000",
        "cpu/job/cpu.cfs_quota_us": "200000",
        "cpu/job/cpu.cfs_period_us": "50000",
        "cpu/job/step/cpu.cfs_quota_us": "-1",
        "cpu/job/step/cpu.cfs_period_us": "50000",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    second = placed.quotas("0::/pod/container\n", tmp_path)
    assert second == {str((tmp_path / "pod").stat().st_ino): 1.5}
    first = placed.quotas("4:cpu,cpuacct:/job/step\n3:memory:/pod\n0::/\n", tmp_path)
    assert [*first.values()] == [4.0]


def test_ranks_that_their_control_group_stops_are_reported():
    def ranks(*quotas):
        every = [{"cores": (rank,), "quotas": quota} for rank, quota in enumerate(quotas)]
        return [report(rank, waited=0.5 * rank, **each) for rank, each in enumerate(every)]

    pod, uneven = {"7": 1.5}, {"rates": {"float32": 20.0}}
    stopped = [*ranks(pod, pod | {"8": 1.0}), report(2, "two", **uneven)]
    [text, other] = doctor._problems(stopped, {}, [0, 0, 0])
    assert text.startswith(
        "the control group of node-one grants the time of 1.5 CPU(s) to 2 threads of rank(s) 0-1"
    )
    assert all(remedy in text for remedy in ("docker run --cpus", "limits.cpu", "OMP_NUM_THREADS"))
    assert other.startswith("rank 2 on node-two multiplies float32 at 20 GFLOP/s")
    assert [*doctor._notes(stopped)] == [], "no other programs"
    slow = [stopped[0], stopped[1]._replace(providers={"float32": 20.0})]
    assert len([*doctor._problems(slow, {}, [0, 0])]) == 1
    # each in a container of its own
    alone = ranks({"7": 1.0}, {"8": 1.0})
    assert [*doctor._problems(alone, {}, [0, 0])] == []
    assert len([*doctor._notes(alone)]) == 1


@pytest.mark.parametrize(
    ("reports", "failed", "patterns"),
    [
        ([contact("one", "10.0.0.7"), contact("two", "10.0.0.8")], [{}, {}], []),
        ([contact("one", "127.0.0.1"), contact("one", "127.0.0.1")], [{}, {}], []),  # on one host
        (
            [contact("one", "127.0.1.1"), contact("two", "10.0.0.8")],
            [{}, {0: "Connection refused"}],
            [
                "rank 0 on node-one: the name node-one has the address 127.0.1.1, which other hosts "
                "cannot reach; set GLOO.*: eth1 10.0.0.7"
            ],
        ),
        (
            [contact("one", "10.0.0.7"), contact("two", "127.0.0.1", "lo")],
            [{1: "Connection refused"}, {}],
            ["rank 1 on node-two: the interface lo has the address 127.0.0.1, which"],
        ),
        (
            [contact("one", "10.0.0.7"), contact("two", "10.0.0.8")],
            [{1: "No route to host"}, {}],
            [
                "rank 0 on node-one cannot connect to rank 1 on node-two at 10.0.0.8, port 5000: "
                "No route to host. Is there a firewall"
            ],
        ),
    ],
)
def test_unreachable_ranks_are_reported(reports, failed, patterns):
    texts = [*doctor._unreachable(reports, failed)]
    assert len(texts) == len(patterns), texts
    assert all(re.search(pattern, text) for pattern, text in zip(patterns, texts, strict=True)), (
        texts
    )


def test_ranks_are_drawn_on_their_cores(tmp_path):
    epyc = topology.read(recorded("epyc", tmp_path))
    console = Console(width=140, record=True, file=StringIO())
    console.print(
        placed.drawing(
            [report(0, cores=range(8), topology=epyc), report(1, cores=range(8, 24), topology=epyc)]
        )
    )
    drawn = console.export_text()
    assert "node-one: 64 cores with 128 hardware threads" in drawn
    lines = [line for line in drawn.splitlines() if "-" in line and "│" in line]
    assert len(lines) == 8
    assert [word.strip() for word in lines[0].strip("│").split("│")] == [
        "0",
        "0",
        "0-7",
        "64-71",
        "0 on 0-7",
    ]
    assert "1 on 8-15" in lines[1]
    assert "1 on 16-23" in lines[2]
    assert "none" in lines[3]


def test_thresholds_are_printed_with_their_source():
    def texts(agreed, *thresholds, oversubscribed=False):
        console = Console(width=140, record=True, file=StringIO())
        console.print(
            doctor._thresholds(
                [
                    report(rank, thresholds=cache_sizes)
                    for rank, cache_sizes in enumerate(thresholds)
                ],
                agreed,
                oversubscribed,
            )
        )
        return [
            [word.strip() for word in line.strip("│").split("│")][1:]
            for line in console.export_text().splitlines()[3:-1]
        ]

    cache_sizes = {"first_level": 48 << 10, "second_level": 2 << 20}
    first, *seconds, latency = texts(Thresholds(**cache_sizes), cache_sizes, cache_sizes)
    assert first == ["24 KiB", "first-level cache of 48 KiB (sysfs)"]
    assert [size for size, _ in seconds] == ["2048 KiB", "1024 KiB", "512 KiB"]
    assert {source for _, source in seconds} == {"second-level cache of 2048 KiB (sysfs)"}
    assert latency == ["3.0 notifies", "default"]
    first, *_ = texts(Thresholds(), cache_sizes, {})
    assert first == ["16 KiB", "first-level cache of 32 KiB (sysfs and default)"]
    assert texts(Thresholds(), cache_sizes, cache_sizes, oversubscribed=True)[-1] == [
        "50.0 notifies",
        "default, as ranks share cores",
    ]


@pytest.mark.parametrize(
    ("group", "ranks", "patterns"),
    [
        ("", [(range(32), 32), (range(32, 64), 32)], []),
        (
            "",
            [(range(16, 48), 32), (range(48, 64), 16)],
            ["rank.s. 0 on node-one run on several NUMA nodes"],
        ),
        (
            "",
            [([0, 1, 64, 65], 4)],
            ["rank 0 on node-one computes with 4 threads on 2 core.* with 4 hardware threads"],
        ),
        ("", [([0, 64], 1), ([0, 64], 1)], ["2 rank.*compute with 2 threads in all on 1 core"]),
        ("0-3", [([0, 1], 2), ([2, 3], 2)], []),
        (
            "0,64",
            [([0], 1), ([64], 1)],
            ["2 threads in all on 1 core", "allows 1 of its 64 cores .0,64. for 2 threads"],
        ),
    ],
)
def test_faults_of_binding_are_reported(tmp_path, group, ranks, patterns):
    folder = recorded("xeon", tmp_path)
    (folder / "fs/cgroup").mkdir(parents=True)
    (folder / "fs/cgroup/cpuset.cpus.effective").write_text(group)
    xeon = topology.read(folder)
    texts = [
        *placed.problems(
            [
                report(rank, cores=cores, threads=n, topology=xeon)
                for rank, (cores, n) in enumerate(ranks)
            ]
        )
    ]
    assert len(texts) == len(patterns), texts
    assert all(re.search(pattern, text) for pattern, text in zip(patterns, texts, strict=True)), (
        texts
    )
