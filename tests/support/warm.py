"""The last import of the server of new ranks: it makes the memory of the server cheap to inherit."""

from __future__ import annotations

import ctypes

# used by every new process at its start
import multiprocessing.popen_forkserver  # noqa: F401

from torch._dynamo import trace_rules

from support.ranks import collect_less_often
from weft.bootstrap import wire
from weft.bootstrap.rendezvous import Announcement, RankInfo
from weft.host import placement
from weft.launchers.variables import launcher_variables

_COLLAPSE = 25  # MADV_COLLAPSE
_HUGE = 1 << 21  # bytes of a huge page


def _to_huge_pages() -> None:
    """Put this process's own memory into huge pages, if there are any: fork and exit take time for
    each mapped page.
    """
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as file:
        mappings = file.readlines()
    for addresses, access, _, _, inode, *_ in map(str.split, mappings):
        if access == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if start < end:
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _COLLAPSE)


# what each rank would find out and import again
placement.host_topology()
launcher_variables({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})
"127.0.0.1".encode("idna")
for record in (Announcement, RankInfo):
    wire._converter(record)
trace_rules.clear_lru_cache()  # otherwise every rank does that with its process group
collect_less_often()
_to_huge_pages()
