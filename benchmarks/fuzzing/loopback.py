"""One exchange of raw bytes with a real asyncio server or client, within one process."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

T = TypeVar("T")

SILENCE_SECONDS = 0.005
"""A server that has said nothing for so long waits for more."""

BODY_SECONDS = 0.2
"""A server that has been busy for so long is taken to wait for the rest of a body, and told that there is none."""

BUSY_SECONDS = 5.0
MAX_REPLY_BYTES = 2**22


class Loop:
    """An event loop that runs only while something is exchanged; closed with the stack."""

    def __init__(self, stack: ExitStack) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note)
        self.faults: list[str] = []
        stack.callback(self._loop.close)

    def run(self, task: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(task)

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record the error of a task or callback that nobody awaits."""
        self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")


class Faults(logging.Handler):
    """Keeps the exceptions that a server logs: what a stranger's bytes brought it to."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


async def ask(port: int, data: bytes, *, is_busy: Callable[[], bool] = lambda: False) -> bytes:
    """Return all that the server at `port` says to `data` until it closes, or is idle and silent."""
    loop = asyncio.get_running_loop()
    with socket.socket() as ours:
        ours.setblocking(False)
        # Closed by a reset, so that no port stays occupied.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await loop.sock_connect(ours, ("127.0.0.1", port))
        sending = loop.create_task(loop.sock_sendall(ours, data))
        reply = bytearray()
        try:
            while len(reply) < MAX_REPLY_BYTES:
                piece = await _piece(ours, is_busy)
                if not piece:
                    break
                reply += piece
        except OSError:  # a server that does not want to read on resets the connection
            pass
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    await asyncio.sleep(0)
    return bytes(reply)


async def _piece(ours: socket.socket, is_busy: Callable[[], bool]) -> bytes:
    """Return what comes next; nothing at the end, and where the server waits for more."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                return await loop.sock_recv(ours, 65536)
        except TimeoutError:
            waited = loop.time() - began
            if not is_busy() or waited > BUSY_SECONDS:
                return b""
            if waited > BODY_SECONDS:
                ours.shutdown(socket.SHUT_WR)


class ReplyRefused(Exception):
    """A server answered with an error that is the sender's; `code` is the HTTP status, and what else it says."""

    def __init__(self, status: bytes, said: bytes) -> None:
        super().__init__(said.decode(errors="replace"))  # cut where it may be within a character
        self.code = status.decode()


_CODE = re.compile(rb'"(?:code|message)":"([^"0-9]{1,60})')
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")


def judge_reply(reply: bytes, faults: Faults) -> str:
    """Return the statuses of a server's answers. Raise what the server failed with, or ReplyRefused."""
    if faults.errors:
        error = faults.errors[0]
        faults.errors.clear()
        raise AssertionError(f"the server failed: {error!r}") from error
    statuses = _STATUS.findall(reply)
    assert not any(status >= b"500" for status in statuses if status != b"503"), reply[:200]
    if statuses and statuses[-1] >= b"400":
        raise ReplyRefused(statuses[-1], b" ".join(_CODE.findall(reply)))
    return b" ".join(statuses[:3]).decode()
