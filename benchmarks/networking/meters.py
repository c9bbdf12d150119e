"""Meters of this process: memory, processor time, and bytes of its TCP connections. Linux only."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Final

import psutil

_INFO_BYTES: Final = 136
_COUNTS: Final = struct.Struct("@QQ")
_COUNTS_AT: Final = 120
"""Offset in struct tcp_info (linux/tcp.h) of tcpi_bytes_acked and tcpi_bytes_received."""


class TcpMeter:
    """Bytes that went over this process's TCP connections, but for those with `without_port` at the other end.

    A connection that opened and ended between two looks is not seen.
    """

    def __init__(self, without_port: int) -> None:
        self._without_port = without_port
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self) -> tuple[int, int]:
        """Return bytes sent and received since the process began."""
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError, ValueError):
                name = str(path.readlink())
                if name.startswith("socket:"):
                    self._seen[name] = self._counts(int(path.name))
        return sum(sent for sent, _ in self._seen.values()), sum(received for _, received in self._seen.values())

    def _counts(self, descriptor: int) -> tuple[int, int]:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family not in {socket.AF_INET, socket.AF_INET6} or one.getpeername()[1] == self._without_port:
                return 0, 0
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        sent, received = _COUNTS.unpack_from(info, _COUNTS_AT)
        return int(sent), int(received)


def cpu_seconds() -> float:
    """Return user and system time of this process."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def memory_mib() -> float:
    """Return this process's resident memory (RSS)."""
    return float(psutil.Process().memory_info().rss / 2**20)
