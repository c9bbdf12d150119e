"""Mutations of HTTP messages: targets, queries and headers as what they are, and all of it as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from benchmarks.fuzzing.mutation import MAX_INPUT_BYTES, mixed, scramble
from benchmarks.fuzzing.target import Mutator

_METHODS = (b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"CONNECT", b"get", b"G\xc3\x89T", b"PRI")
_VALUES = (
    *(b"", b"0", b"-1", b"1", b"+1", b" 1", b"1.5", b"1e3", b"nan", b"inf", b"-inf", b"30.001", b"0x10", b"1_0"),
    *(b"9007199254740992", b"9007199254740993", b"9" * 500, b"%00", b"%ff", b"%ed%a0%80", b"%", b"%zz", b"true"),
    *(b"\xd9\xa1", b"\xff", b"a&a=b", b"a;b", b"..%2f..", b"\x00", b"ab" * 32, b"AB" * 32, b"0" * 64, b"["),
)
_HEADERS = tuple(
    line.encode("latin-1")
    for line in (
        *("Content-Length: 0", "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999"),
        *("Content-Length: +5", "Content-Length: 5, 5", "Content-Encoding: gzip", "Content-Encoding: deflate"),
        *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: x", "Trailer: x"),
        *("Connection: close", "Connection: keep-alive, Upgrade", "Upgrade: websocket", "Upgrade: h2c"),
        *("Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13", "Expect: 100-continue", "Expect: \xff", "Keep-Alive: x"),
        *("Host: [", "Host: a/b?c#d", "Host:", "Range: bytes=0-", "Range: bytes=9-1", "Range: x=1", " folded"),
        *("Range: bytes=" + "0-0," * 200, "If-Range: x", "If-None-Match: *", "Accept-Encoding: gzip", "Cookie: a=b"),
        *(
            "Authorization: Swarmproof \xff",
            "Authorization: Swarmproof",
            "Authorization: Basic Og==",
            "X: " + "y" * 9000,
        ),
        *("Content-Type: application/json; charset=x", "Content-Type: \xff; charset=\x80", "Date: x"),
        *("Retry-After: 99999999999999999999", "Retry-After: -1", "Location: http://[", "Set-Cookie: \xff"),
    )
)
_BODIES = (
    b"",
    b"{}",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"-5\r\n",
    b"0\r\nX: y\r\n\r\n",
    b"\x1f\x8b\x08\x00",
)
_TOKENS = (
    b"\r\n",
    b"\n",
    b"\r\n\r\n",
    b"\0",
    b":",
    b"?",
    b"&",
    b"=",
    b"%",
    b"#",
    b"/",
    b" ",
    b"\t",
    b"HTTP/1.1",
    b"chunked",
)


def http_mutator(*paths: bytes) -> Mutator:
    """Mutate requests and responses; `paths` are what a request may be for."""

    def change(rng: Random, corpus: Sequence[bytes]) -> bytes:
        data = rng.choice(corpus)
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        for _ in range(rng.choice((1, 1, 2, 4))):
            roll = rng.randrange(6)
            if roll < 2:
                lines[0] = _first_line(rng, lines[0], paths)
            elif roll < 4:
                lines.insert(rng.randint(1, len(lines)), rng.choice(_HEADERS))
            elif roll == 4 and len(lines) > 1:
                at = rng.randrange(1, len(lines))
                lines[at : at + 1] = rng.choice(([], [lines[at]] * 2, [lines[at]] * 120, [scramble(rng, lines[at])]))
            else:
                body = rng.choice((*_BODIES, scramble(rng, body)))
        return (b"\r\n".join(lines) + b"\r\n\r\n" + body)[:MAX_INPUT_BYTES]

    def scrambled(rng: Random, corpus: Sequence[bytes]) -> bytes:
        return scramble(rng, rng.choice(corpus), tokens=(*_TOKENS, *_HEADERS))[:MAX_INPUT_BYTES]

    def several(rng: Random, corpus: Sequence[bytes]) -> bytes:
        return b"".join(change(rng, corpus) for _ in range(rng.choice((2, 3))))[:MAX_INPUT_BYTES]

    return mixed((6, change), (2, scrambled), (1, several))


def _first_line(rng: Random, line: bytes, paths: Sequence[bytes]) -> bytes:
    """Choose another method, target, status or version."""
    parts = line.split(b" ")
    roll = rng.randrange(5)
    if not paths:  # a response
        parts[1:2] = [
            rng.choice(
                (b"200", b"204", b"100", b"101", b"301", b"304", b"404", b"429", b"500", b"999", b"0", b"-1", b"")
            )
        ]
    elif roll == 0:
        parts[0] = rng.choice(_METHODS)
    elif roll == 1:
        parts[1:2] = [rng.choice(paths)]
    elif roll == 2 and len(parts) > 1:
        parts[1] = _query(rng, parts[1])
    elif roll == 3 and len(parts) > 1:
        parts[1] = rng.choice(
            (b"*", b"//x/" + parts[1], b"http://[x" + parts[1], b"http://h" + parts[1], parts[1] + rng.choice(_VALUES))
        )
    else:
        parts[-1:] = [rng.choice((b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 x", b""))]
    return b" ".join(parts)


def _query(rng: Random, target: bytes) -> bytes:
    """Replace a value of the query or a part of the path, or repeat a parameter."""
    path, _, query = target.partition(b"?")
    pairs = [pair.split(b"=", 1) for pair in query.split(b"&")] if query else []
    if pairs and rng.random() < 0.8:
        at = rng.randrange(len(pairs))
        replaced = [pairs[at][0], rng.choice(_VALUES)]
        pairs[at : at + 1] = rng.choice(([replaced], [replaced], [replaced, pairs[at]], [], [[pairs[at][0]]]))
    else:
        parts = path.split(b"/")
        parts[rng.randrange(len(parts))] = rng.choice(_VALUES)
        path = b"/".join(parts)
    return path + (b"?" + b"&".join(b"=".join(pair) for pair in pairs) if pairs else b"")
