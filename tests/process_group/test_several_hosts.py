"""Groups of torch.distributed on weft whose ranks are on several hosts."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.hosts import hosts, needs_hosts

pytestmark = [needs_hosts, pytest.mark.slow]
SOON = 5.0  # seconds; survivors take milliseconds, and the machine may be busy


def test_two_hosts_and_a_rank_that_dies(tmp_path):
    with hosts(2) as net:
        net.start(Path(__file__), 2, tmp_path)
        ended = net.finish()
    assert (tmp_path / "death").exists(), ended
    death = float((tmp_path / "death").read_text())
    for rank in range(3):
        when, name, words = json.loads((tmp_path / f"rank{rank}").read_text())
        assert (name, words[:12]) == ("PeerLost", "rank 3 (pid "), words
        assert when - death < SOON


def main(folder):
    """A rank: collectives, messages and pairs over several hosts; then the last rank dies."""
    torch.set_num_threads(1)
    dist.init_process_group("weft")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.full((1000,), float(rank))
    dist.all_reduce(x)
    assert x.tolist() == [6.0] * 1000
    dist.all_reduce(x, dist.ReduceOp.PRODUCT)
    assert x.tolist() == [6.0**4] * 1000
    found = [torch.zeros(3) for _ in range(ranks)]
    dist.all_gather(found, torch.full((3,), float(rank)))
    assert [part[0].item() for part in found] == [0.0, 1.0, 2.0, 3.0]
    outs, sizes = [torch.zeros(rank + 1) for _ in range(ranks)], range(1, ranks + 1)
    dist.all_to_all(outs, [torch.full((n,), float(rank)) for n in sizes])
    assert [out.tolist() for out in outs] == [[float(peer)] * (rank + 1) for peer in range(ranks)]
    after, before, place = (rank + 1) % ranks, (rank - 1) % ranks, torch.zeros(100_000)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((100_000,), float(rank)), after),
            dist.P2POp(dist.irecv, place, before),
        ]
    )
    for work in works:
        work.wait()
    assert place.unique().tolist() == [float(before)]
    if rank == 0:
        assert {dist.recv(place[:1], tag=3) for _ in range(ranks - 1)} == {1, 2, 3}
    else:
        dist.send(place[:1], 0, tag=3)
    for pair in ([0, 2], [1, 3], [0, 1]):
        inner = dist.new_group(pair)
        if rank in pair:
            y = torch.ones(5)
            work = dist.all_reduce(y, group=inner, async_op=True)
            work.wait()
            assert y.tolist() == [2.0] * 5
    dist.barrier()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the agent of the dead rank's host
    (folder / f"through{rank}").touch()
    if rank == 3:
        # so that no rank loses it in the barrier
        while not all((folder / f"through{peer}").exists() for peer in range(3)):
            time.sleep(0.001)
        (folder / "death").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.recv(x, 3)
    except dist.DistError as error:
        (folder / f"rank{rank}").write_text(
            json.dumps([time.time(), type(error).__name__, str(error)])
        )
    os._exit(1)  # agents with successful ranks would wait minutes for agents whose ranks fail


if __name__ == "__main__":
    main(Path(sys.argv[1]))
