"""A database server's host that loses its power: what is sent there is never acknowledged, and nothing is said."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any, Final, Self

from psycopg.conninfo import conninfo_to_dict

_IP_MINTTL: Final = 21
_MORE_THAN_ANY: Final = 255
"""Packets begin at 64: the kernel drops each one that arrives with less, and acknowledges nothing."""


class VanishingHost:
    """An address of a PostgreSQL server that listens on a Unix socket, by its URL; `url` is that by the address."""

    def __init__(self, url: str) -> None:
        given: dict[str, Any] = conninfo_to_dict(url)
        self._server = f"{given['host']}/.s.PGSQL.5432"
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._connections: list[tuple[socket.socket, socket.socket]] = []
        port = self._listening.getsockname()[1]
        self.url = f"postgresql://{given['user']}@127.0.0.1:{port}/{given['dbname']}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for pair in self._connections:
            for one in pair:
                one.close()
        self._listening.close()

    def vanish(self) -> None:
        """Be another host from now on, for those who connect again."""
        for outside, inside in self._connections:
            outside.setsockopt(socket.IPPROTO_IP, _IP_MINTTL, _MORE_THAN_ANY)
            with contextlib.suppress(OSError):
                inside.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                outside, _ = self._listening.accept()
                inside = socket.socket(socket.AF_UNIX)
                inside.connect(self._server)
                self._connections.append((outside, inside))
                for one, other in ((outside, inside), (inside, outside)):
                    threading.Thread(target=_forward, args=(one, other), daemon=True).start()


def _forward(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
