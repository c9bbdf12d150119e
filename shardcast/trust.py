"""Decide what to believe about the newest version: every rule in one place, without IO, the clock passed in.

A valid signature proves who signed, not when, nor that everyone was told the same. TrustedState remembers the highest
version seen and refuses anything older (rollback), anything expired (freeze) and another run's signatures (replay
across runs), and keeps both envelopes when a publisher signs two different histories (equivocation). After python-tuf's
TrustedMetadataSet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardcast import wire
from shardcast.errors import Equivocation, LocalFault, Malformed, PeerFault, Stale
from shardcast.files import as_local_fault, read_bounded, write_atomically
from shardcast.manifest import DEFAULT_LIMITS, Head, Limits, Manifest, SignedManifest, open_head, open_manifest
from shardcast.wire import Count, Digest, Wire

HEADS_REMEMBERED = 8
"""Enough to notice a fork among versions that workers still use; each is about 500 bytes."""

_MAX_STATE_BYTES = 16 * 1024


class Seen(Wire, frozen=True, kw_only=True):
    """The highest version seen, and the signed head that proves it."""

    run_id: Digest
    version: Count
    manifest_digest: Digest
    head: bytes


class FraudProof(Wire, frozen=True, kw_only=True):
    """Two envelopes of one publisher that contradict each other; see `check_fraud_proof`."""

    first: bytes
    second: bytes


@dataclass(frozen=True, slots=True)
class _Signed:
    digest: str
    envelope: bytes


class TrustedState:
    """What one client or relay believes about one run.

    `fraud` holds the proof once an Equivocation was raised. The first statement seen stays the one believed.
    """

    def __init__(
        self,
        *,
        run_id: str,
        publisher_key: bytes,
        limits: Limits = DEFAULT_LIMITS,
        seen: Seen | None = None,
    ) -> None:
        if seen is not None and seen.run_id != run_id:
            raise LocalFault(f"state folder belongs to run {seen.run_id[:16]}…; use another folder", code="wrong_run")
        self.run_id = run_id
        self.publisher_key = publisher_key
        self.limits = limits
        self.seen = seen
        self.fraud: FraudProof | None = None
        self._issued_at = -1
        self._heads: dict[int, _Signed] = {}
        if seen is not None:
            self._heads[seen.version] = _Signed(seen.manifest_digest, seen.head)

    @property
    def version(self) -> int:
        """Highest version seen; -1 before the first."""
        return -1 if self.seen is None else self.seen.version

    def accept_head(self, data: bytes, now: float) -> Head:
        """Accept `data` as the newest head at time `now` (Unix seconds), or raise a PeerFault."""
        head = open_head(data, run_id=self.run_id, publisher_key=self.publisher_key, limits=self.limits)
        # Before the age check: an expired head that contradicts a known one still convicts the publisher.
        self._refuse_contradiction(head.version, head.manifest_digest, data)
        self._check_window(head.issued_at, head.expires_at, now)
        if head.version < self.version:
            raise Stale(
                f"head of version {head.version} is older than version {self.version}, already seen", code="rollback"
            )
        self._remember(head, data)
        return head

    def accept_manifest(self, data: bytes, now: float, expected_digest: str) -> SignedManifest:
        """Accept `data` as the manifest that a head named by `expected_digest`, or raise a PeerFault."""
        signed = self._open_manifest(data)
        if signed.digest != expected_digest:
            raise Malformed("manifest is not the one requested", code="wrong_manifest")
        manifest = signed.manifest
        if self.seen is not None and expected_digest == self.seen.manifest_digest:
            if manifest.version != self.seen.version:
                raise Malformed("head and manifest differ in version", code="head_mismatch")
        elif manifest.version < self.version:
            raise Stale(
                f"manifest of version {manifest.version} is older than version {self.version}, already seen",
                code="rollback",
            )
        # issued_at is not checked: a publisher whose clock was ahead re-signs heads but not manifests.
        self._check_expiry(manifest.expires_at, now)
        return signed

    def accept_archived(self, data: bytes, version: int, *, expected_digest: str | None = None) -> SignedManifest:
        """Accept `data` as the manifest of an old `version` that the caller itself requested, or raise a PeerFault.

        Age and order are waived; signature, run and consistency are not. Without `expected_digest` only the publisher's
        signature and the remembered heads vouch for it.
        """
        signed = self._open_manifest(data)
        if signed.manifest.version != version:
            raise Malformed(
                f"manifest is of version {signed.manifest.version}, requested {version}", code="wrong_manifest"
            )
        if expected_digest is not None and signed.digest != expected_digest:
            raise Malformed("manifest is not the one requested", code="wrong_manifest")
        return signed

    def _open_manifest(self, data: bytes) -> SignedManifest:
        signed = open_manifest(data, run_id=self.run_id, publisher_key=self.publisher_key, limits=self.limits)
        self._refuse_contradiction(signed.manifest.version, signed.digest, data)
        if signed.manifest.previous is not None:
            self._refuse_contradiction(signed.manifest.version - 1, signed.manifest.previous, data)
        return signed

    def _refuse_contradiction(self, version: int, digest: str, envelope: bytes) -> None:
        known = self._heads.get(version)
        if known is not None and known.digest != digest:
            self.fraud = FraudProof(first=known.envelope, second=envelope)
            raise Equivocation(f"publisher signed two different histories of version {version}")

    def _check_window(self, issued_at: int, expires_at: int, now: float) -> None:
        if issued_at > now + self.limits.clock_skew_s:
            raise Stale(
                f"signed {issued_at - now:.0f} s in the future: check this machine's clock", code="not_yet_valid"
            )
        self._check_expiry(expires_at, now)

    def _check_expiry(self, expires_at: int, now: float) -> None:
        if expires_at < now - self.limits.clock_skew_s:
            raise Stale(f"signature window expired {now - expires_at:.0f} s ago", code="expired")

    def _remember(self, head: Head, envelope: bytes) -> None:
        self._heads[head.version] = _Signed(head.manifest_digest, envelope)
        if head.version == self.version and head.issued_at < self._issued_at:
            return  # a lagging source must not make the shown head older
        self._issued_at = head.issued_at
        while len(self._heads) > HEADS_REMEMBERED:
            del self._heads[min(self._heads)]
        self.seen = Seen(run_id=head.run_id, version=head.version, manifest_digest=head.manifest_digest, head=envelope)


def check_fraud_proof(proof: FraudProof, *, run_id: str, publisher_key: bytes) -> int:
    """Return the version whose history the publisher signed twice; raises Malformed if `proof` proves nothing.

    A head or manifest states the digest of its version. A manifest of version v also states that v - 1, if it was ever
    published, has the digest `previous`.
    """
    first = _statements(proof.first, run_id, publisher_key)
    second = _statements(proof.second, run_id, publisher_key)
    for version in sorted(first.keys() & second.keys(), reverse=True):
        if first[version] != second[version]:
            return version
    raise Malformed("envelopes do not contradict each other", code="no_fraud")


def _statements(data: bytes, run_id: str, publisher_key: bytes) -> dict[int, str]:
    """Return the digest per version that an envelope states."""
    try:
        head = open_head(data, run_id=run_id, publisher_key=publisher_key)
        return {head.version: head.manifest_digest}
    except PeerFault:
        signed = open_manifest(data, run_id=run_id, publisher_key=publisher_key)
    return _manifest_statements(signed.manifest, signed.digest)


def _manifest_statements(manifest: Manifest, digest: str) -> dict[int, str]:
    statements = {manifest.version: digest}
    if manifest.previous is not None:
        statements[manifest.version - 1] = manifest.previous
    return statements


def load_seen(path: Path) -> Seen | None:
    """Read what `save_seen` wrote; None if there is nothing yet.

    Raises LocalFault for an unreadable file: ignoring it would allow a rollback.
    """
    try:
        return wire.decode(Seen, read_bounded(path, max_bytes=_MAX_STATE_BYTES), max_bytes=_MAX_STATE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise as_local_fault(error, path) from error
    except Malformed as error:
        raise LocalFault(f"{path} is damaged ({error}); restore it or use another folder", code="bad_state") from error


def save_seen(path: Path, seen: Seen) -> None:
    """Persist `seen` durably; call before acting on it."""
    write_atomically(path, wire.encode(seen))


def save_fraud_proof(folder: Path, version: int, proof: FraudProof) -> Path:
    """Save the proof for an operator as canonical JSON and return its path."""
    path = folder / f"equivocation-{version}.json"
    if not path.exists():
        write_atomically(path, wire.encode(proof))
    return path
