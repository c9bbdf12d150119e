"""Client of a witness (c2sp.org/tlog-witness): what logs and auditors ask it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from node.client.http import Exchange, ExchangeLimits, Reply, Request, checked_url, printable
from node.errors import BadReply, ConfigError, Refused, Unavailable
from node.protocol.checkpoints import AddCheckpoint, origin_hash, parse_size
from node.protocol.notes import (
    MAX_NOTE_BYTES,
    KeyKind,
    NoteSignature,
    VerifierKey,
    parse_key,
    parse_signatures,
)
from shardcast.errors import Malformed

LIMITS: Final = ExchangeLimits(connect_seconds=5.0, reply_seconds=10.0)
MAX_WITNESSES: Final = 16
_ADDRESS: Final = re.compile(r"(.+\+[0-9a-f]{8}\+[A-Za-z0-9+/]{44})(?:@(.+))?")


class SizeConflict(Exception):
    """A witness has signed another size than a request begins from: `size`."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the witness has signed {size} entries")
        self.size = size


@dataclass(frozen=True, slots=True)
class WitnessAddress:
    """A witness's key, and its URL where that is known."""

    key: VerifierKey
    url: str | None


def parse_witness(text: str) -> WitnessAddress:
    """Read VKEY or VKEY@URL; raises ConfigError."""
    match = _ADDRESS.fullmatch(text)
    try:
        key = parse_key(text if match is None else match[1], KeyKind.WITNESS)
    except Malformed as error:
        raise ConfigError(f"{printable(str(error))}; `swarmproof witness` prints its key when it starts.") from error
    url = None if match is None else match[2]
    return WitnessAddress(key, None if url is None else checked_url(url))


def parse_witnesses(texts: Sequence[str]) -> tuple[WitnessAddress, ...]:
    """Read witnesses, each key once and at most MAX_WITNESSES; raises ConfigError."""
    found = tuple(map(parse_witness, texts))
    if len({one.key.public_key for one in found}) < len(found) or len(found) > MAX_WITNESSES:
        raise ConfigError(f"Give each --witness once, and at most {MAX_WITNESSES}.")
    return found


def reachable_witnesses(texts: Sequence[str]) -> tuple[WitnessAddress, ...]:
    """Read witnesses as `parse_witnesses` does, each with its URL; raises ConfigError."""
    found = parse_witnesses(texts)
    missing = [one.key.name for one in found if one.url is None]
    if missing:
        raise ConfigError(f"Say where the witness {printable(missing[0])} is: --witness VKEY@URL")
    return found


class WitnessClient:
    """Calls to one witness, without retries; use as an async context manager."""

    def __init__(self, url: str, *, limits: ExchangeLimits = LIMITS) -> None:
        self._exchange = Exchange(url, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._exchange.close()

    async def add(self, request: AddCheckpoint) -> tuple[NoteSignature, ...]:
        """Ask for a signature; return unverified ones. Raises SizeConflict, Refused, BadReply or Unavailable."""
        body = request.encode()
        sent = Request(method="POST", path="/add-checkpoint", body=body, max_reply_bytes=MAX_NOTE_BYTES)
        reply = await self._exchange.send(sent, body_bytes=len(body), headers={"Content-Type": "text/plain"})
        try:
            if reply.status == 409:
                raise SizeConflict(parse_size(reply.body.decode("ascii", "replace").removesuffix("\n")))
            return parse_signatures(self._accepted(reply).body)
        except Malformed as error:
            raise BadReply(f"The witness {self._exchange.url} answers what is no signature: {error}.") from error

    async def newest(self, origin: str) -> bytes | None:
        """Return the unverified note of the newest checkpoint that it signed of a log; None if it signed none."""
        path = f"/{origin_hash(origin)}/checkpoint"
        sent = Request(method="GET", path=path, max_reply_bytes=MAX_NOTE_BYTES)
        reply = await self._exchange.send(sent, body_bytes=0, headers={})
        return None if reply.status == 404 else self._accepted(reply).body

    def _accepted(self, reply: Reply) -> Reply:
        if reply.status == 200:
            return reply
        said = printable(reply.body.decode("utf-8", "replace").strip())
        if reply.status in {429, 503}:
            raise Unavailable(f"The witness {self._exchange.url} answers {reply.status}: {said}")
        raise Refused(
            f"The witness {self._exchange.url} refuses ({reply.status}): {said}",
            status=reply.status,
            code="unwitnessed",
        )
