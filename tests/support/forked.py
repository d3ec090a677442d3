"""A rank on each host of tests, forked by this one process: ``python -m support.forked HOST… --
ARGUMENT…`` for `host_ranks`.

The modules of the ranks are imported once, before the forks; each rank then enters the network
namespace of its host, and its time namespace.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from pathlib import Path

from support import host_ranks
from support.hosts import AHEAD, FIRST, PORT

_NEWTIME = 0x80  # CLONE_NEWTIME


def main() -> None:
    at = sys.argv.index("--")
    hosts, sys.argv = sys.argv[1:at], sys.argv[at:]
    cores = sorted(os.sched_getaffinity(0))
    ranks = [
        fork(rank, host, len(hosts), cores[rank % len(cores)]) for rank, host in enumerate(hosts)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    sys.exit(max(map(abs, codes)))


def fork(rank: int, host: str, ranks: int, core: int) -> int:
    """The process of a rank on `host`; it never returns from here."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}") as network:
        if libc.setns(network.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"no rank can enter {host}")
    if AHEAD:
        if libc.unshare(_NEWTIME):
            raise OSError(ctypes.get_errno(), "there is no clock of its own")
        # for processes forked from now on
        Path("/proc/self/timens_offsets").write_text(f"monotonic {rank * AHEAD} 0\n")
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.sched_setaffinity(0, {core})
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        os.environ |= {
            "MASTER_ADDR": os.environ.get("FIRST_HOST", FIRST),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        host_ranks.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
