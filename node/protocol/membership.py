"""What a new key shows before a run gives it work: an invite, a stake, or a proof of work (docs/protocol.md, 3.7).

Pure: the clock, and what the coordinator has counted, are passed in. Keys are free, so a policy makes each of them cost
something before it costs the coordinator a slot. It says nothing about the work that follows.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Final, Literal

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from node.protocol.reasons import Reason, Refusal
from shardcast.envelope import open_envelope, seal
from shardcast.errors import Malformed, PeerFault
from shardcast.wire import Count, Digest, PublicKey, Wire, decode, derive, encode

INVITE_DOMAIN: Final = "swarmproof/invite"
INVITE_VERSION: Final = 1

MAX_INVITE_BYTES: Final = 1024
MAX_INVITE_ENVELOPE_BYTES: Final = MAX_INVITE_BYTES + 512
MAX_INVITE_TEXT: Final = 4 * -(-MAX_INVITE_ENVELOPE_BYTES // 3)
MAX_INVITE_SECONDS: Final = 366 * 24 * 3600
MAX_INVITED_KEYS: Final = 10_000
MAX_SKEW_SECONDS: Final = 60

MAX_BITS: Final = 28
"""224 s on one core of an AMD EPYC in Python, at 1.2 million attempts a second; a puzzle is good for 600 s or more."""

PuzzleBits = Annotated[int, Meta(ge=1, le=MAX_BITS)]


class MembershipSpec(Wire, frozen=True):
    """Which policy decides whether a new key may work, and its price; a run without this table is open to all keys.

    `stake`: what must be noted for the key, in the units of the operator's registry. `bits`: the leading zero bits of a
    proof of work while newcomers' slots are free; `most_bits`: however many wait for them.
    """

    policy: Literal["invite", "stake", "work"]
    stake: Annotated[int, Meta(ge=1, le=2**53 - 1)] = 1
    bits: PuzzleBits = 20
    most_bits: PuzzleBits = 26

    def __post_init__(self) -> None:
        """Refuse a price that falls with the queue; msgspec turns the ValueError into its own error."""
        if self.most_bits < self.bits:
            raise ValueError("membership.most_bits must be at least membership.bits")


class Invite(Wire, frozen=True):
    """The run lets `keys` new keys join until `expires_at`; only the key `node`, where that is not null.

    A bearer token: whoever has it may use it up. `id` is random, so that its uses can be counted.
    """

    run_id: Digest
    id: Digest
    keys: Annotated[int, Meta(ge=1, le=MAX_INVITED_KEYS)]
    node: PublicKey | None
    issued_at: Count
    expires_at: Count

    def __post_init__(self) -> None:
        """Refuse invalid values; msgspec turns the ValueError into its own error."""
        if not self.issued_at < self.expires_at <= self.issued_at + MAX_INVITE_SECONDS:
            raise ValueError("it must end after it began, and within 366 days")
        if self.node is not None and self.keys != 1:
            raise ValueError("an invite for one node has one key")


class Puzzle(Wire, frozen=True):
    """What a new key has to solve: a hash with `bits` leading zero bits; `salt` is taken until `expires_at`."""

    salt: Digest
    bits: PuzzleBits
    expires_at: Count


class ProofOfWork(Wire, frozen=True):
    """The solution of a puzzle, for one key: the salt, and the counter that gives a hash with enough zero bits."""

    salt: Digest
    counter: Count


# -- invites


def sign_invite(invite: Invite, *, key: Ed25519PrivateKey) -> bytes:
    """Seal an invite with the run's key."""
    return seal(encode(invite), domain=INVITE_DOMAIN, version=INVITE_VERSION, key=key)


def open_invite(data: bytes, *, run_key: bytes, run_id: str) -> Invite:
    """Return the invite in an envelope of this run's key; raises Refusal. See `check_invite` for whom it is for."""
    try:
        opened = open_envelope(
            data,
            domain=INVITE_DOMAIN,
            versions=(INVITE_VERSION,),
            max_payload_bytes=MAX_INVITE_BYTES,
            signer=run_key,
        )
        invite = decode(Invite, opened.payload, max_bytes=MAX_INVITE_BYTES)
    except PeerFault as error:
        raise Refusal(Reason.BAD_INVITE, f"{error.code}.") from error  # never what was sent: it may be a secret
    if invite.run_id != run_id:
        raise Refusal(Reason.BAD_INVITE, "wrong_run.")
    return invite


def check_invite(invite: Invite, *, node: str, used: int, now: float) -> None:
    """Raise Refusal unless the key `node` may use this invite, which has let in `used` keys, at the time `now`."""
    if not invite.issued_at - MAX_SKEW_SECONDS <= now < invite.expires_at:
        raise Refusal(Reason.EXPIRED_INVITE, f"It holds from {invite.issued_at} to {invite.expires_at}, now {now:.0f}.")
    if invite.node not in (None, node):
        raise Refusal(Reason.FOREIGN_INVITE, f"It is for {invite.node}, this is {node}.")
    if used >= invite.keys:
        raise Refusal(Reason.SPENT_INVITE, f"It is for {invite.keys} keys, and has let in {used}.")


def invite_token(envelope: bytes) -> str:
    """Return an invite as people pass it on: the base64url of its envelope, with padding."""
    return base64.urlsafe_b64encode(envelope).decode("ascii")


def parse_invite_token(text: str) -> bytes:
    """Return the envelope in a token; raises Malformed without quoting it."""
    try:
        if len(text) > MAX_INVITE_TEXT:
            raise Malformed("an invite is longer than any that a run signs", code="oversized")
        return base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise Malformed("an invite is not base64url") from error


# -- proof of work


def work_seed(*, run_id: str, node: str, salt: str) -> bytes:
    """Return the 32 bytes that a proof of work for the key `node` starts from: it is worth nothing for another key."""
    return derive("swarmproof/1 proof of work", bytes.fromhex(run_id), bytes.fromhex(node), bytes.fromhex(salt))


def work_bits(seed: bytes, counter: int) -> int:
    """Return with how many zero bits BLAKE3(seed || u64 counter) begins."""
    return 256 - int.from_bytes(_attempt(seed, counter), "big").bit_length()


def find_work(seed: bytes, *, bits: int, start: int, attempts: int) -> int | None:
    """Return the first counter from `start` on whose hash has `bits` zero bits; None after so many attempts."""
    bound = (1 << (256 - bits)).to_bytes(32, "big")  # big-endian bytes compare as numbers do
    return next((at for at in range(start, start + attempts) if _attempt(seed, at) < bound), None)


def _attempt(seed: bytes, counter: int) -> bytes:
    return blake3(seed + counter.to_bytes(8, "big")).digest()


def price_bits(rules: MembershipSpec, *, waiting: int, capacity: int) -> int:
    """Return the zero bits that the next new key owes.

    `waiting` members without standing share `capacity` slots (at least 1). The price doubles once they are as many as
    the slots, and with every doubling after that.
    """
    return min(rules.most_bits, rules.bits + (waiting // capacity).bit_length())
