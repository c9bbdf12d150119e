"""Which run this is: its descriptor, and what a reader remembers of it (section 2)."""

from __future__ import annotations

from typing import Any

from .envelope import Opened, open_envelope
from .messages import DESCRIPTOR, RUN_SPEC
from .values import Refused, decode, derive, digest, encode

MAX_BYTES = 256 * 1024


def run_id_of(public_key: str) -> str:
    """Return the id of the run with this public key."""
    return derive("swarmproof/1 run id", bytes.fromhex(public_key)).hex()


class Descriptors:
    """The newest descriptor of one run. `remembered` is the envelope that a former process saw last."""

    def __init__(self, run_id: str, remembered: bytes | None = None) -> None:
        self.run_id = run_id
        self.envelope: bytes | None = None
        self.newest: dict[str, Any] = {}
        self.run_key = ""
        self.contradictions: list[tuple[bytes, bytes]] = []
        if remembered is not None:
            self._take(remembered)

    @property
    def spec(self) -> dict[str, Any]:
        """The run's rules."""
        return self.newest["spec"]

    @property
    def spec_digest(self) -> str:
        """The digest that the log's first entry names."""
        return digest(encode(RUN_SPEC, self.spec))

    def _open(self, envelope: bytes) -> tuple[Opened, dict[str, Any]]:
        opened = open_envelope(envelope, "swarmproof/run", max_payload_bytes=MAX_BYTES)
        if run_id_of(opened.signer) != self.run_id:
            raise Refused("wrong_run", "signed by another run's key")
        value = decode(DESCRIPTOR, opened.payload, max_bytes=MAX_BYTES)
        if value["run_id"] != self.run_id:
            raise Refused("wrong_run", "names another run")
        return opened, value

    def _take(self, envelope: bytes) -> None:
        opened, self.newest = self._open(envelope)
        self.envelope, self.run_key = envelope, opened.signer

    def accept(self, envelope: bytes, *, now: float) -> dict[str, Any]:
        """Check a descriptor that anybody brought and return it; it is the newest from then on.

        Raises Refused, in the page's order: a bad envelope or encoding, `wrong_run`, `expired`, `rollback`,
        `equivocation` (both envelopes stay in `contradictions`), `other_rules`.
        """
        _, value = self._open(envelope)
        if now >= value["expires_at"]:
            raise Refused("expired")
        if self.envelope is not None:
            if value["version"] < self.newest["version"]:
                raise Refused("rollback", f"version {value['version']} after {self.newest['version']}")
            if value["version"] == self.newest["version"] and value != self.newest:
                self.contradictions.append((self.envelope, envelope))
                raise Refused("equivocation", f"two descriptors of version {value['version']}")
            if value["spec"] != self.spec:
                raise Refused("other_rules")
        self._take(envelope)
        return value
