"""Rendezvous among other jobs and processes: two jobs on a host, containers with equal pids, and
foreign processes that connect.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from support.storm.judge import Scene
from support.storm.machine import end, forked, starved
from support.storm.rank import Part

_CLONE_NEWNET = 0x40000000
_SLOWLY = 0.7  # seconds between the bytes of a slow foreign process


def two_jobs(part: Part) -> None:
    """Two jobs of two ranks each: their names are permutations of the same digits, or they are
    steps of one allocation.
    """
    _job(part, {})


def two_jobs_on_a_port(part: Part) -> None:
    """Two jobs of two ranks each that are given the same port."""
    _job(part, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(part.draw.randrange(32768, 60000))})


def contained(part: Part) -> None:
    """All ranks are process 1 of their containers, with equal addresses, and read each other's
    large tensors in place.
    """
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    with part.world() as world:
        part.report("world")
        for number in range(6):
            gathered = weft.all_gather(torch.full((1 << 20,), 10.0 * number + world.rank))
            found = [one[0].item() for one in gathered.chunk(world.ranks)]
            assert found == [10.0 * number + rank for rank in range(world.ranks)], (
                f"rank {world.rank} gathers {found}"
            )
        for call in part.calls(10):
            call(world)


def connecting(part: Part) -> None:
    """Ranks that make and use a world while foreign processes connect to their ports."""
    time.sleep(0.3)  # foreign processes run by this time
    started, starved_before = time.monotonic(), starved(os.getpid())
    with part.world() as world:
        took = time.monotonic() - started - (starved(os.getpid()) - starved_before)
        assert took < part.trial.limit + 1, (
            f"rank {part.rank} connects for {took:.1f} s, although its limit is "
            f"{part.trial.limit:g} s"
        )
        for call in part.calls(10):
            call(world)


@contextmanager
def strangers(scene: Scene) -> Iterator[None]:
    """On each host, a process that connects to every port opened there; the victim is stopped while
    it connects, which prolongs the rendezvous.
    """
    assert scene.net is not None
    pids = [forked(_call_all, scene.trial.seed, name) for name in scene.net.names]
    with held_up(scene):
        yield
    for pid in pids:
        end(pid)


@contextmanager
def held_up(scene: Scene) -> Iterator[None]:
    """A victim that is stopped for a while as it connects."""
    draw = random.Random(scene.trial.seed)
    scene.until(lambda: bool(scene.victim.event("meeting")))
    time.sleep(draw.uniform(0, 0.02))
    scene.victim.kill(signal.SIGSTOP)
    time.sleep(draw.choice((0.3, 1.5)))
    scene.victim.kill(signal.SIGCONT)
    yield


def no_pid_namespaces() -> str:
    """The reason why ranks cannot have pid namespaces of their own here, or an empty text."""
    return "pid namespaces need root" if os.geteuid() else ""


def _job(part: Part, variables: dict[str, str]) -> None:
    job, rank = divmod(part.rank, 2)
    digits = part.draw.sample("123456789", 5)
    name = "".join(part.draw.sample(digits, 5) if job else digits)
    if part.draw.random() < 0.7:
        variables |= {
            "PMIX_NAMESPACE": f"prterun-node1-{name}@1",
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
        }
        variables |= {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    else:
        variables |= {
            "SLURM_JOB_ID": "".join(digits),
            "SLURM_STEP_ID": str(job),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
        }
        variables |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    os.environ |= variables
    time.sleep(random.uniform(0, 0.3))
    with weft.init(timeout=part.trial.limit):
        part.report("world")
        found = weft.all_gather(torch.tensor([float(job), float(rank)])).tolist()
        assert found == [job, 0, job, 1], f"rank {rank} of job {job} gathers {found}"
        time.sleep(0.3)  # the other job starts while this one is running
    if dist.is_initialized():
        dist.destroy_process_group()


def _call_all(seed: int, network: str) -> None:
    draw = random.Random(seed)
    with open(f"/run/netns/{network}") as file:
        assert not ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET)
    earlier, slow, kept, spoken = (
        _listening(),
        list[socket.socket](),
        list[socket.socket](),
        time.monotonic(),
    )
    while True:
        # ports that are open for some milliseconds, while ranks connect
        for address in _listening() - earlier:
            if len(kept) < 100:
                with contextlib.suppress(OSError):
                    kept.append(caller := socket.create_connection(address, 1.0))
                    caller.setblocking(False)
                    _speak(
                        draw.choice(("silent", "slow", "garbled", "huge", "gone")),
                        caller,
                        draw,
                        slow,
                    )
        if time.monotonic() > spoken + _SLOWLY:
            spoken = time.monotonic()
            for caller in slow:
                with contextlib.suppress(OSError):
                    caller.send(draw.randbytes(1))
        time.sleep(0.0005)


def _speak(
    behaviour: str, caller: socket.socket, draw: random.Random, slow: list[socket.socket]
) -> None:
    match behaviour:
        case "slow":
            slow.append(caller)
        case "garbled":
            caller.send(draw.randbytes(draw.choice((1, 20, 24, 4000))))
        case "huge":
            caller.send(bytes([255]) * (1 << 20))
        case "gone":
            caller.close()


def _listening() -> set[tuple[str, int]]:
    """The addresses at which a process listens in this network namespace."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in places}
