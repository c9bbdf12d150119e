"""Opening a signed receipt (docs/protocol.md, section 8.3)."""

from __future__ import annotations

from node.protocol.messages import MAX_MESSAGE_BYTES, MESSAGE_VERSION, RECEIPT_DOMAIN, Receipt
from shardcast.envelope import open_envelope
from shardcast.wire import decode


def open_receipt(data: bytes, *, signer: bytes | None) -> Receipt:
    """Return the receipt in an envelope signed by `signer`, the run's public key; None takes any. Raises PeerFault."""
    opened = open_envelope(
        data, domain=RECEIPT_DOMAIN, versions=(MESSAGE_VERSION,), max_payload_bytes=MAX_MESSAGE_BYTES, signer=signer
    )
    return decode(Receipt, opened.payload, max_bytes=MAX_MESSAGE_BYTES)
