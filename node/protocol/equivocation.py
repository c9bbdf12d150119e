"""Equivocation proofs: two different descriptors of one version, signed by the run's key.

The run's key signs each version once (docs/protocol.md, section 2), so two that differ convict it, wherever they came
from and whenever they are shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION, MAX_DESCRIPTOR_BYTES, open_descriptor, run_id_of
from shardcast.envelope import open_envelope
from shardcast.wire import encode

_BEFORE_ALL_DATES = -1.0


@dataclass(frozen=True, slots=True)
class EquivocationProof:
    """A version that the run's key signed twice, with both envelopes byte for byte."""

    run_id: str
    version: int
    first: bytes
    second: bytes


def find_equivocation(first: bytes, second: bytes) -> EquivocationProof | None:
    """Return the proof if two descriptor envelopes are an equivocation, else None.

    The same content under two signatures is none; expiry does not matter. Raises PeerFault unless both are
    descriptors of one run, signed by its key.
    """
    opened = open_envelope(
        first, domain=DESCRIPTOR_DOMAIN, versions=(DESCRIPTOR_VERSION,), max_payload_bytes=MAX_DESCRIPTOR_BYTES
    )
    run_id = run_id_of(opened.signer)
    one, _ = open_descriptor(first, run_id=run_id, now=_BEFORE_ALL_DATES)
    other, _ = open_descriptor(second, run_id=run_id, now=_BEFORE_ALL_DATES)
    # The wire encoding is canonical and was checked to be, so these are the bytes that were signed.
    if one.version != other.version or encode(one) == encode(other):
        return None
    return EquivocationProof(run_id, one.version, first, second)
