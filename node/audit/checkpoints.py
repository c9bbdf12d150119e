"""Signed checkpoints as an auditor reads them."""

from __future__ import annotations

from node.protocol.messages import CHECKPOINT_DOMAIN, MAX_MESSAGE_BYTES, MESSAGE_VERSION, Checkpoint
from shardcast.envelope import open_envelope
from shardcast.errors import PeerFault
from shardcast.wire import decode


def open_checkpoint(envelope: bytes, *, run_id: str, signer: bytes | None) -> Checkpoint:
    """Return the checkpoint in `envelope`; raises PeerFault unless `signer` (None: anybody) signed it for this run."""
    opened = open_envelope(
        envelope,
        domain=CHECKPOINT_DOMAIN,
        versions=(MESSAGE_VERSION,),
        max_payload_bytes=MAX_MESSAGE_BYTES,
        signer=signer,
    )
    checkpoint = decode(Checkpoint, opened.payload, max_bytes=MAX_MESSAGE_BYTES)
    if checkpoint.run_id != run_id:
        raise PeerFault("it names another run", code="wrong_run")
    return checkpoint
