"""What `weft doctor` says of ranks that see something wrong; its look at real hosts is in test_hosts.py."""

from __future__ import annotations

import re

import pytest

from weft.cli import doctor

RATES = {"float32": 80.0}


def seen(rank, host="one", cores=(0, 1), threads=1, shared="works", rates=RATES):
    return doctor.RankReport(rank, 100 + rank, f"node-{host}", host, "", {"lo": "127.0.0.1"}, cores, threads, shared, rates)


def met(host, address, interface="", port=5000):
    return doctor.Met(f"node-{host}", host, interface, {"lo": "127.0.0.1", "eth1": "10.0.0.7"}, address, port)


@pytest.mark.parametrize(
    ("everyone", "links", "offsets", "words"),
    [
        ([seen(0), seen(1)], {}, [0, 0], []),
        ([seen(0), seen(1, shared="no pages")], {}, [0, 0], ["rank 1 on node-one cannot reserve symmetric memory: no pages"]),
        ([seen(0, threads=3)], {}, [0], ["3 threads on 2 core.*: set OMP_NUM_THREADS", "node-one is over-subscribed: 1 rank"]),
        ([seen(0, cores=(0,)), seen(1, cores=(0,))], {}, [0, 0], ["over-subscribed: 2 rank.* with 2 threads in all on 1 core"]),
        (
            [seen(0), seen(1, "two")],
            {},
            [0, -3_000_000_000],
            ["clock of node-two .rank 1. is 3.0 s behind that of node-one: .* NTP"],
        ),
        ([seen(0), seen(1, "two")], {}, [0, 900_000_000], []),
        (
            [seen(0), seen(1)],
            {(0, 1): (1.0, 9.0), (0, 2): (10.0, 9.0)},
            [0, 0],
            ["ranks 0 and 1 are joined by 1.00 Gbit/s, others by 10"],
        ),
        (
            [seen(0), seen(1, rates={"float32": 20.0})],
            {},
            [0, 0],
            ["rank 1 on node-one multiplies float32 at 20 GFLOP/s, another rank at 80"],
        ),
    ],
)
def test_what_is_wrong_is_said_in_words(everyone, links, offsets, words):
    said = [*doctor._troubles(everyone, links, offsets)]
    assert len(said) == len(words), said
    assert all(re.search(pattern, text) for pattern, text in zip(words, said, strict=True)), said


@pytest.mark.parametrize(
    ("everyone", "failed", "words"),
    [
        ([met("one", "10.0.0.7"), met("two", "10.0.0.8")], [{}, {}], []),
        ([met("one", "127.0.0.1"), met("one", "127.0.0.1")], [{}, {}], []),  # of one host
        (
            [met("one", "127.0.1.1"), met("two", "10.0.0.8")],
            [{}, {0: "Connection refused"}],
            [
                "rank 0 on node-one: the name node-one stands for 127.0.1.1, which other hosts cannot reach; set GLOO.*: eth1 10.0.0.7"
            ],
        ),
        (
            [met("one", "10.0.0.7"), met("two", "127.0.0.1", "lo")],
            [{1: "Connection refused"}, {}],
            ["rank 1 on node-two: the interface lo stands for 127.0.0.1, which"],
        ),
        (
            [met("one", "10.0.0.7"), met("two", "10.0.0.8")],
            [{1: "No route to host"}, {}],
            [
                "rank 0 on node-one cannot connect to rank 1 on node-two at 10.0.0.8, port 5000: No route to host. Is there a firewall"
            ],
        ),
    ],
)
def test_who_cannot_be_reached_is_said_in_words(everyone, failed, words):
    said = [*doctor._unreachable(everyone, failed)]
    assert len(said) == len(words), said
    assert all(re.search(pattern, text) for pattern, text in zip(words, said, strict=True)), said
