"""The socket on which a service manager hears of the processes that it started (sd_notify(3))."""

from __future__ import annotations

import socket
from contextlib import suppress


class Manager:
    """One, at `address`: a path, or an abstract name that begins with NUL."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """What has arrived since the last call, an assignment each."""
        assignments = []
        with suppress(BlockingIOError):
            while True:
                assignments += self._socket.recv(1024).decode().splitlines()
        return assignments

    def close(self) -> None:
        self._socket.close()
