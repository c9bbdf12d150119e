"""What a hostile relay may do with a request: some fifty ways to hang, trickle, flood, garble and lie.

    relay = HostileRelay(upstream, BEHAVIOURS["hangs on chunks"])
    url = await relay.start()

Each is written on a bare socket, so that it can break HTTP as an attacker would. What is not spoiled is passed on from
an honest upstream, so that a relay looks well until it is asked for what its behaviour is about.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

import aiohttp

Scope = Literal["chunks", "heads", "manifests", "everything"]
_PATHS: Final[dict[Scope, tuple[str, ...]]] = {
    "chunks": ("/v1/payloads/",),
    "heads": ("/v1/head",),
    "manifests": ("/v1/manifests/", "/v1/versions/"),
    "everything": ("/",),
}
_FOREVER_S: Final = 3600.0
_MAX_REQUEST_BYTES: Final = 8192
_BACKLOG: Final = 100


@dataclass(slots=True)
class HostileExchange:
    """A request, the honest response to it, and where the response is written; `number` counts chunks of this relay."""

    path: str
    status: int
    body: bytes
    writer: asyncio.StreamWriter
    number: int

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def honest(self) -> None:
        await self.send(response(self.body, status=self.status))

    async def forever(self, piece: bytes, *, every_s: float = 0.0) -> None:
        """Send `piece` until the other side hangs up."""
        while True:
            await self.send(piece)
            await asyncio.sleep(every_s)


Act = Callable[[HostileExchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What is spoiled, and how."""

    scope: Scope
    act: Act

    def concerns(self, path: str) -> bool:
        return path.startswith(_PATHS[self.scope])


def response(body: bytes, *fields: str, status: int = 200, length: str | None = None, reason: str = "X") -> bytes:
    """Build an HTTP/1.1 response; `length` replaces the right Content-Length, "" leaves it out."""
    declared = str(len(body)) if length is None else length
    lines = [f"HTTP/1.1 {status} {reason}", *([f"Content-Length: {declared}"] if declared else []), *fields, "", ""]
    return "\r\n".join(lines).encode() + body


class HostileRelay:
    """A server on loopback that passes on what `upstream` has, but for what `behaviour` spoils.

    `on_spoiled` is called for each spoiled response.
    """

    def __init__(self, upstream: str, behaviour: Behaviour, *, on_spoiled: Callable[[], None] = lambda: None) -> None:
        self._upstream, self._behaviour, self._on_spoiled = upstream, behaviour, on_spoiled
        self._chunks, self._connections = 0, set[asyncio.Task[None]]()
        self.asked = Counter[str]()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; return the URL."""
        # Not asyncio's server: one that is closed in the turn in which it accepts a connection loses its socket.
        self._listener = socket.create_server((host, port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        timeout = aiohttp.ClientTimeout(total=90.0)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        return f"http://{host}:{self._listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Close every connection."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        open_ones = list(self._connections)
        for task in open_ones:
            task.cancel()
        try:
            await asyncio.gather(*open_ones, return_exceptions=True)
        finally:
            await self._session.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # it hung up meanwhile, or this process has no descriptor left
        accepted.setblocking(False)
        task = asyncio.create_task(self._serve(accepted))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: accepted.close())  # also of one that is cancelled before it begins

    async def _serve(self, accepted: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted)
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                parts = request[:_MAX_REQUEST_BYTES].split(b" ", 2)
                await self._answer(parts[1].decode("latin-1"), writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError):
            pass  # it hung up, or speaks something else
        finally:
            writer.transport.abort()

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            await HostileExchange(path, 200, b"ok\n", writer, 0).honest()
            return
        spoiled, is_chunk = self._behaviour.concerns(path), path.startswith(_PATHS["chunks"])
        self._chunks += is_chunk
        self.asked["spoiled" if spoiled else "honest"] += 1
        try:
            async with self._session.get(self._upstream + path) as answer:
                status, body = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            status, body = 503, b""
        exchange = HostileExchange(path, status, body, writer, self._chunks)
        if spoiled and (status == 200 or self._behaviour.scope == "everything"):
            self._on_spoiled()
            await self._behaviour.act(exchange)
        else:
            await exchange.honest()


# -- never, or late


async def hang(_: HostileExchange) -> None:
    await asyncio.sleep(_FOREVER_S)


async def close_at_once(exchange: HostileExchange) -> None:
    exchange.writer.transport.abort()


async def close_midway(exchange: HostileExchange) -> None:
    await exchange.send(response(exchange.body)[: -len(exchange.body) // 2 or None])
    exchange.writer.transport.abort()


async def half_then_silence(exchange: HostileExchange) -> None:
    whole = response(exchange.body)
    await exchange.send(whole[: len(whole) // 2])
    await asyncio.sleep(_FOREVER_S)


async def head_then_silence(exchange: HostileExchange) -> None:
    await exchange.send(response(exchange.body)[: -len(exchange.body) or None])
    await asyncio.sleep(_FOREVER_S)


def trickle(bytes_per_s: int) -> Act:
    async def act(exchange: HostileExchange) -> None:
        await exchange.send(response(exchange.body)[: -len(exchange.body) or None])
        step = max(1, bytes_per_s // 10)
        for at in range(0, len(exchange.body), step):
            await exchange.send(exchange.body[at : at + step])
            await asyncio.sleep(step / bytes_per_s)

    return act


async def trickle_head(exchange: HostileExchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nX: ")
    await exchange.forever(b"y", every_s=0.2)


async def late(exchange: HostileExchange) -> None:
    await asyncio.sleep(8.0)
    await exchange.honest()


async def not_yet_at_once(exchange: HostileExchange) -> None:
    await exchange.send(response(b"{}", status=503))


async def not_yet_after_waiting(exchange: HostileExchange) -> None:
    wait_s = float(exchange.path.rpartition("wait=")[2].partition("&")[0] or 0)
    await asyncio.sleep(wait_s)
    await not_yet_at_once(exchange)


def prove_then(after: Act, *, chunks: int = 1) -> Act:
    """Serve some chunks well, so as to be preferred, and then do otherwise."""

    async def act(exchange: HostileExchange) -> None:
        await (exchange.honest() if exchange.number <= chunks else after(exchange))

    return act


# -- too much


async def endless_interim(exchange: HostileExchange) -> None:
    await exchange.forever(b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n" * 64)


async def endless_chunk_extensions(exchange: HostileExchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;")
    await exchange.forever(b"x" * 65536)


async def endless_chunked_body(exchange: HostileExchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await exchange.forever(b"10000\r\n" + bytes(65536) + b"\r\n")


async def endless_body(exchange: HostileExchange) -> None:
    await exchange.send(response(exchange.body))
    await exchange.forever(bytes(65536))


async def endless_fields(exchange: HostileExchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\n")
    await exchange.forever(b"X: y\r\n" * 1024)


async def endless_status_line(exchange: HostileExchange) -> None:
    await exchange.send(b"HTTP/1.1 200 ")
    await exchange.forever(b"O" * 65536)


async def gzip_bomb(exchange: HostileExchange) -> None:
    packed = gzip.compress(bytes(16 * 2**20))
    await exchange.send(response(packed, "Content-Encoding: gzip"))


# -- not what was asked for


def reply(*fields: str, status: int = 200, length: str | None = None, body: bytes | None = None) -> Act:
    """Answer with the honest body, or `body`, under another head."""

    async def act(exchange: HostileExchange) -> None:
        sent = exchange.body if body is None else body
        await exchange.send(response(sent, *fields, status=status, length=length))

    return act


def raw(data: bytes) -> Act:
    async def act(exchange: HostileExchange) -> None:
        await exchange.send(data)

    return act


def changed(change: Callable[[bytes], bytes]) -> Act:
    """Answer with a changed body."""

    async def act(exchange: HostileExchange) -> None:
        await exchange.send(response(change(exchange.body)))

    return act


async def trailers(exchange: HostileExchange) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n"
    await exchange.send(head + f"{len(exchange.body):x}\r\n".encode() + exchange.body + b"\r\n0\r\nX: y\r\n\r\n")


async def smuggled(exchange: HostileExchange) -> None:
    """Put another response behind each, for the next request on the connection."""
    await exchange.send(response(exchange.body) + response(bytes(len(exchange.body))))


def _flipped(body: bytes) -> bytes:
    return bytes([body[0] ^ 1]) + body[1:] if body else b""


BEHAVIOURS: Final[dict[str, Behaviour]] = {
    "hangs on chunks": Behaviour("chunks", hang),
    "hangs on everything": Behaviour("everything", hang),
    "hangs on heads": Behaviour("heads", hang),
    "hangs on manifests": Behaviour("manifests", hang),
    "closes at once on chunks": Behaviour("chunks", close_at_once),
    "closes at once on everything": Behaviour("everything", close_at_once),
    "closes midway": Behaviour("chunks", close_midway),
    "half a chunk, then silence": Behaviour("chunks", half_then_silence),
    "a head, then silence": Behaviour("chunks", head_then_silence),
    "half a manifest, then silence": Behaviour("manifests", half_then_silence),
    "one byte a second": Behaviour("chunks", trickle(10)),
    "a rate just above the limit": Behaviour("chunks", trickle(9000)),
    "trickles everything": Behaviour("everything", trickle(9000)),
    "trickled response heads on chunks": Behaviour("chunks", trickle_head),
    "trickled response heads on everything": Behaviour("everything", trickle_head),
    "eight seconds late": Behaviour("chunks", late),
    "says that it has no chunk yet": Behaviour("chunks", not_yet_at_once),
    "waits, then has no chunk yet": Behaviour("chunks", not_yet_after_waiting),
    "one good chunk, then hangs": Behaviour("chunks", prove_then(hang)),
    "four good chunks, then hangs": Behaviour("chunks", prove_then(hang, chunks=4)),
    "one good chunk, then trickles": Behaviour("chunks", prove_then(trickle(9000))),
    "one good chunk, then lies": Behaviour("chunks", prove_then(changed(_flipped))),
    "endless interim responses on chunks": Behaviour("chunks", endless_interim),
    "endless interim responses on everything": Behaviour("everything", endless_interim),
    "endless chunk extensions on chunks": Behaviour("chunks", endless_chunk_extensions),
    "endless chunk extensions on everything": Behaviour("everything", endless_chunk_extensions),
    "endless chunked body": Behaviour("everything", endless_chunked_body),
    "endless body": Behaviour("chunks", endless_body),
    "endless fields": Behaviour("everything", endless_fields),
    "endless status line": Behaviour("everything", endless_status_line),
    "gzip bomb": Behaviour("everything", gzip_bomb),
    "wrong Content-Length": Behaviour("chunks", reply(length="17")),
    "negative Content-Length": Behaviour("everything", reply(length="-1")),
    "huge Content-Length": Behaviour("everything", reply(length="999999999999999")),
    "two Content-Lengths": Behaviour("everything", reply("Content-Length: 5")),
    "no Content-Length": Behaviour("everything", reply(length="")),
    "trailers": Behaviour("everything", trailers),
    "another response behind each": Behaviour("chunks", smuggled),
    "redirects to itself": Behaviour("everything", reply("Location: /v1/head", status=302)),
    "redirects to loopback": Behaviour("everything", reply("Location: http://127.0.0.1:22/", status=307)),
    "status 204": Behaviour("everything", reply(status=204, body=b"")),
    "status 206": Behaviour("chunks", reply("Content-Range: bytes 0-1/9", status=206)),
    "status 404": Behaviour("everything", reply(status=404, body=b"{}")),
    "status 429": Behaviour("everything", reply("Retry-After: 3600", status=429, body=b"{}")),
    "status 500": Behaviour("everything", reply(status=500, body=b"{}")),
    "status 503": Behaviour("everything", reply(status=503, body=b"{}")),
    "garbage": Behaviour("everything", raw(b"\x00\xff" * 4096)),
    "another protocol": Behaviour("everything", raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")),
    "nothing at all": Behaviour("everything", reply(body=b"")),
    "a flipped bit in chunks": Behaviour("chunks", changed(_flipped)),
    "a flipped bit in heads": Behaviour("heads", changed(_flipped)),
    "a flipped bit in manifests": Behaviour("manifests", changed(_flipped)),
    "zeros for chunks": Behaviour("chunks", changed(lambda body: bytes(len(body)))),
    "chunks cut short": Behaviour("chunks", changed(lambda body: body[:-1])),
    "chunks too long": Behaviour("chunks", changed(lambda body: body + b"x")),
}
