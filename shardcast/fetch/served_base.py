"""Find a version that sources serve in full, to compute from it one that they keep as deltas.

Origins do so with old versions (`shardcast.store.archive`). Who does not have a version is not to blame: nobody backs
off for it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final

from shardcast import wire
from shardcast.codec.delta_routes import MAX_HOPS, Hop
from shardcast.errors import CorruptChunk, NetworkFault, NotServed, PeerFault, ShardcastError
from shardcast.fetch.hedging import first_accepted
from shardcast.fetch.sources import Sources
from shardcast.fetch.transport import Transport
from shardcast.manifest import Payload, SignedManifest

PROBE_S: Final = 4.0
"""Less than a source may take for a chunk: one that hangs must not use up the time in which a route is sought."""


async def find_served_base(
    signed: SignedManifest,
    *,
    sources: Sources,
    transport: Transport,
    manifest_of: Callable[[int], Awaitable[SignedManifest | None]],
) -> tuple[SignedManifest, list[Hop]] | None:
    """Follow the folded deltas back to the first version that is served in full.

    Returns that and the deltas from it to `signed`, in order of application; None if there is no such version.
    """
    chain = list[Hop]()
    for _ in range(MAX_HOPS):
        delta = signed.manifest.folded_delta
        base = None if delta is None else await manifest_of(delta.base_version)
        if delta is None or base is None or base.manifest.result_digest != delta.base:
            return None
        chain.insert(0, Hop(signed, signed.manifest.deltas.index(delta)))
        if await _is_served(base.manifest.full, sources, transport):
            return base, chain
        signed = base
    return None


async def _is_served(payload: Payload, sources: Sources, transport: Transport) -> bool:
    """Return whether any source has a chunk, which none can foresee, and sends it within PROBE_S."""
    index = secrets.randbelow(payload.chunk_count)

    async def ask(url: str) -> None:
        chunk = memoryview(bytearray(payload.chunk_length(index)))
        try:
            async with asyncio.timeout(PROBE_S):
                await transport.chunk(url, payload.digest, index, into=chunk, wait_s=0.0)
        except TimeoutError as error:
            raise NotServed(f"no chunk within {PROBE_S:.0f} s", code="not_served") from error
        if wire.digest(chunk) != payload.chunk_digest(index):
            raise CorruptChunk(f"digest mismatch: {len(chunk)} bytes are not chunk {index}")

    def failed(url: str, error: ShardcastError) -> None:
        if isinstance(error, PeerFault):
            sources.failed(url, error, time.monotonic(), of_chunk=True)

    try:
        await first_accepted(sources.by_promise(time.monotonic()), ask, failed=failed)
    except (NetworkFault, PeerFault):
        return False
    return True
