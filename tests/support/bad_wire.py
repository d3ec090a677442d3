"""A wire between hosts that loses, delays and reorders packets, or is cut.

Each host's interface is a TAP device, whose packets this process passes on: so a kernel without
`tc netem` will do.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.hosts import WHY_NOT, Hosts

_TUNSETIFF, _TAP_WITHOUT_HEADER, _NEW_NET = 0x400454CA, 0x1002, 0x40000000
_FRAME = 1 << 16  # bytes at most
needs_wire = pytest.mark.skipif(
    bool(WHY_NOT) or not Path("/dev/net/tun").exists(), reason=WHY_NOT or "no /dev/net/tun"
)


class WiredHosts(Hosts):
    """Hosts joined by one wire: of each packet it loses a share `loss`, and delays the others by
    `delay` seconds, `jitter` more or less, which changes their order.
    """

    def __init__(self, count: int, loss: float, delay: float, jitter: float) -> None:
        self.loss, self.delay, self.jitter = loss, delay, jitter
        self.taps: list[int] = []
        self.cut: set[int] = set()
        self.stopping, self.stopped = os.pipe()
        super().__init__(count)
        self.passing = threading.Thread(target=self._pass_on, daemon=True)
        self.passing.start()

    def join(self, host: int, name: str) -> None:
        """Make the interface of a host, by a thread that is in its namespace."""
        made = threading.Thread(target=self._make, args=(name,))
        made.start()
        made.join()

    def cut_off(self, host: int) -> None:
        self.cut.add(host)

    def reconnect(self, host: int) -> None:
        self.cut.discard(host)

    def close(self) -> None:
        os.close(self.stopped)
        if hasattr(self, "passing"):
            self.passing.join()
        for each in (*self.taps, self.stopping):
            os.close(each)
        super().close()

    def _make(self, name: str) -> None:
        namespace = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
        assert not ctypes.CDLL(None).setns(namespace, _NEW_NET)
        os.close(namespace)
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP_WITHOUT_HEADER))
        self.taps.append(tap)

    def _pass_on(self) -> None:
        """Pass packets on until the end of the hosts."""
        dice = random.Random(1)
        under_way: list[tuple[float, int, int, bytes]] = []
        poll = select.poll()
        for each in (*self.taps, self.stopping):
            poll.register(each, select.POLLIN)
        number = 0
        while True:
            left = under_way[0][0] - time.monotonic() if under_way else 1.0
            for ready, _ in poll.poll(max(0.0, 1000 * left)):
                if ready == self.stopping:
                    return
                sender = self.taps.index(ready)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        frame = os.read(ready, _FRAME)
                        for host in range(len(self.taps)):
                            lost = dice.random() < self.loss or self.cut & {sender, host}
                            if host == sender or lost:
                                continue
                            late = self.delay + dice.uniform(-self.jitter, self.jitter)
                            number += 1
                            packet = time.monotonic() + late, number, host, frame
                            heapq.heappush(under_way, packet)
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, host, frame = heapq.heappop(under_way)
                with contextlib.suppress(OSError):  # the queue is full, or the interface down
                    os.write(self.taps[host], frame)


@contextlib.contextmanager
def wired_hosts(
    count: int,
    loss: float = 0.0,
    delay: float = 0.0,
    jitter: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[WiredHosts]:
    """Hosts that exist until the end of the block."""
    made = WiredHosts.__new__(WiredHosts)
    made.environment = environment or {}
    try:
        made.__init__(count, loss, delay, jitter)  # type: ignore[misc]
        yield made
    finally:
        made.close()
