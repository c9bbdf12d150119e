"""Have the run's witnesses sign its checkpoints, beside everything else: nothing of a run waits for them.

A thread offers the newest checkpoint to all witnesses at once, every ROUND_SECONDS in which the log has grown, and now
and then when it has not, so that auditors see that they still look. What they sign is in memory: after a restart the
next round brings it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from coordinator.run.background import background_thread
from coordinator.run.service import Coordinator
from node.client.witness import SizeConflict, WitnessAddress, WitnessClient
from node.errors import BadReply, NodeError
from node.protocol.checkpoints import AddCheckpoint, Checkpoint, open_checkpoint
from node.protocol.notes import Note, NoteSignature, parse_note
from shardcast.errors import BadSignature

log = logging.getLogger(__name__)

ROUND_SECONDS: Final = 3.0
REFRESH_SECONDS: Final = 60.0
MOST_ROUNDS_SKIPPED: Final = 20
"""Of a witness that keeps failing."""


@dataclass(slots=True)
class _Asked:
    """One witness: what it signed last, and for how many rounds it is left alone."""

    address: WitnessAddress
    client: WitnessClient
    size: int = 0
    signed_at: float = float("-inf")
    failures: int = 0
    skipped: int = 0


class Witnessing:
    """Offers checkpoints of a run to its witnesses, and gives `coordinator` what they sign."""

    def __init__(self, coordinator: Coordinator, witnesses: Sequence[WitnessAddress]) -> None:
        self._coordinator, self._witnesses = coordinator, witnesses

    def run(self, stop: threading.Event) -> None:
        """Go on until `stop` is set; failures are logged."""
        asyncio.run(self._run(stop))

    async def _run(self, stop: threading.Event) -> None:
        async with contextlib.AsyncExitStack() as clients:
            asked = [
                _Asked(one, await clients.enter_async_context(WitnessClient(one.url)))
                for one in self._witnesses
                if one.url is not None
            ]
            while not await asyncio.to_thread(stop.wait, ROUND_SECONDS):
                try:
                    await self._round(asked)
                except Exception:  # nobody would notice that a thread has ended
                    log.exception("no checkpoint could be offered to witnesses, retrying")

    async def _round(self, asked: Sequence[_Asked]) -> None:
        note = parse_note(await asyncio.to_thread(self._coordinator.checkpoint))
        home = self._coordinator.home
        checkpoint = open_checkpoint(note.encode(), run_id=home.run_id, signer=home.public_key)
        due = [one for one in asked if _is_due(one, checkpoint)]
        signed = list[NoteSignature]()
        for finished in asyncio.as_completed([self._offer(one, note, checkpoint) for one in due]):
            if (signature := await finished) is not None:
                signed.append(signature)
                self._coordinator.set_witnessed(Note(note.text, (*note.signatures, *signed)))

    async def _offer(self, one: _Asked, note: Note, checkpoint: Checkpoint) -> NoteSignature | None:
        """Return the witness's signature; None, and a line in the log, if it gives none."""
        try:
            signature = await self._signature(one, note, checkpoint)
        except (NodeError, SizeConflict, BadSignature) as error:
            one.failures += 1
            one.skipped = min(2**one.failures - 2, MOST_ROUNDS_SKIPPED)
            if one.failures == 1:
                log.warning("witness %s does not sign %d entries: %s", one.address.key.name, checkpoint.size, error)
            return None
        if one.failures:
            log.info("witness %s signs again", one.address.key.name)
        one.size, one.signed_at, one.failures = checkpoint.size, time.monotonic(), 0
        return signature

    async def _signature(self, one: _Asked, note: Note, checkpoint: Checkpoint) -> NoteSignature:
        try:
            found = await self._add(one, note, checkpoint)
        except SizeConflict as conflict:
            if conflict.size > checkpoint.size:
                raise BadReply(
                    f"it has signed {conflict.size} entries: either another process has added some since, or this "
                    "database is older than the log was",
                    code="unwitnessed",
                ) from conflict
            one.size = conflict.size
            found = await self._add(one, note, checkpoint)
        key = one.address.key
        for signature in found:
            if (signature.name, signature.key_id) == (key.name, key.key_id):
                key.verify(note.text, signature.signature)
                return signature
        raise BadReply("its answer has no signature under the key that it should have", code="unwitnessed")

    async def _add(self, one: _Asked, note: Note, checkpoint: Checkpoint) -> tuple[NoteSignature, ...]:
        proof = await asyncio.to_thread(self._coordinator.consistency, one.size, checkpoint.size)
        return await one.client.add(AddCheckpoint(one.size, tuple(proof), note.encode()))


def _is_due(one: _Asked, checkpoint: Checkpoint) -> bool:
    if one.skipped:
        one.skipped -= 1
        return False
    return one.size != checkpoint.size or time.monotonic() - one.signed_at >= REFRESH_SECONDS


@contextmanager
def witnessing_thread(coordinator: Coordinator, witnesses: Sequence[WitnessAddress]) -> Iterator[None]:
    """Context manager during which a thread has the witnesses sign; without any, there is none."""
    if not witnesses:
        yield
        return
    with background_thread(Witnessing(coordinator, witnesses).run, name="witnesses"):
        yield
