"""A wire between a node and its coordinator that keeps every byte of both ways."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Wire:
    """What went each way through `url`."""

    url: str = ""
    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    block_on_close = True


@contextmanager
def overheard(url: str) -> Iterator[Wire]:
    """The server at `url`, as it is called through a wire."""
    where, wire = urlsplit(url), Wire()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((where.hostname, where.port)) as server:
                back = threading.Thread(target=_copy, args=(server, self.request, wire.down))
                back.start()
                _copy(self.request, server, wire.up)
                back.join()

    with _Server(("127.0.0.1", 0), Handler) as listening:
        wire.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield wire
        finally:
            listening.shutdown()
            thread.join()


def _copy(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with suppress(OSError):
        while piece := source.recv(65536):
            kept.extend(piece)
            target.sendall(piece)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
