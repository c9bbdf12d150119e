"""The coordinator's operations, one method per endpoint, independent of HTTP.

Every method takes the time as an argument and raises `node.protocol.reasons.Refusal`. Methods of signed requests take
the transaction that `accept` opened; all others open their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import UNSET, UnsetType

from coordinator.run.descriptors import NO_CONTACTS, Contacts, Descriptors
from coordinator.run.health import Health, read_health
from coordinator.run.history import KeptHistory, current_checkpoint
from coordinator.run.home import Home
from coordinator.run.joining import Joining, joining_of
from coordinator.run.membership import membership_of
from coordinator.run.relays import RelayRegistry
from coordinator.storage import instances, locks, log, nodes, retention, uploads, work
from coordinator.storage.accounts import LogAccounts, standing_report
from coordinator.storage.blobs import Upload, UploadStore
from coordinator.storage.database import Connection
from coordinator.storage.folder_blobs import Incoming
from coordinator.storage.schema import SubmissionState
from coordinator.storage.signed_requests import SignedRequestLog
from coordinator.storage.steps import manifest_of
from coordinator.storage.submissions import envelope_of, logged_verdict
from node.protocol import merkle, requests
from node.protocol.checkpoints import seal_checkpoint
from node.protocol.endpoints import Pending
from node.protocol.membership import Puzzle
from node.protocol.messages import (
    MESSAGE_VERSION,
    RECEIPT_DOMAIN,
    LeaseReply,
    LeaseRequest,
    NodeStanding,
    Receipt,
    Registration,
    RequestClaim,
    SlotName,
)
from node.protocol.notes import Note
from node.protocol.profiles import check_nickname
from node.protocol.reasons import Reason, Refusal
from shardcast.envelope import seal
from shardcast.wire import derive, digest, encode, is_digest

logger = logging.getLogger(__name__)

HISTORY_SECONDS = 1.0


class Coordinator:
    """The operations of one run; holds the run's key."""

    def __init__(
        self,
        home: Home,
        *,
        key: Ed25519PrivateKey,
        relay_urls: tuple[str, ...] = (),
        leases_per_address: int = 0,
        contacts: Contacts = NO_CONTACTS,
    ) -> None:
        self.home = home
        self._key = key
        self._leases_per_address = leases_per_address
        self._signed = SignedRequestLog(home.database)
        self._membership = membership_of(home, key=key)
        self._history = KeptHistory(home.folder, run_id=home.run_id, signer=home.public_key)
        self._history_due = 0.0
        self._witnessed: Note | None = None
        self._accounts = LogAccounts(rules=home.spec.standing)
        # Secret, or an attacker could search for a node key that is placed next to a victim's.
        self.relays = RelayRegistry(
            home.database,
            fixed=relay_urls,
            salt=derive("swarmproof/1 relay tree", key.private_bytes_raw()),
            endpoints=contacts.endpoints,
        )
        self.descriptors = Descriptors(home, key=key, contacts=replace(contacts, relays=relay_urls))

    def descriptor(self, *, now: float) -> bytes:
        """Return the signed descriptor."""
        return self.descriptors.newest(now=now).envelope

    @property
    def joining(self) -> Joining | None:
        """How workers join, by the contacts that the operator gave; None without any."""
        contacts = self.descriptors.contacts
        return joining_of(self.home.run_id, endpoints=contacts.endpoints, peers=contacts.peers)

    def health(self, *, now: float) -> Health:
        """Return whether the run works, and what is wrong."""
        return read_health(self.home, has_sources=bool(self.relays.urls(now=now)), now=now)

    def newest_policy(self) -> bytes:
        """Return the signed manifest of the newest policy; raises Refusal before the first."""
        with self.home.database.read() as connection:
            manifest = manifest_of(connection)
        if manifest is None:
            raise Refusal(Reason.NOT_FOUND, "No policy is published yet.")
        return manifest

    @contextmanager
    def accept(self, node: str, claim: RequestClaim, *, method: str, path: str, now: float) -> Iterator[Connection]:
        """Check `claim`, signed by `node`, and open the transaction that uses it up; see `SignedRequestLog.consume`."""
        requests.check_claim(claim, run_id=self.home.run_id, method=method, path=path, now=now)
        with self._signed.consume(node + claim.nonce, now=now) as connection:
            yield connection

    def register(self, connection: Connection, node: str, registration: Registration, *, now: float) -> None:
        """Register a node, or refresh its registration; raises Refusal for a new key that may not join, or a nickname
        that is none.
        """
        if not isinstance(registration.nickname, UnsetType):
            check_nickname(registration.nickname)
        locks.leasing(connection)  # new keys one at a time: each counts those before it
        if not nodes.is_registered(connection, node):
            self._membership.check(connection, node, registration, now=now)
        nodes.register(connection, node, registration, now=now)

    def puzzle(self, *, now: float) -> Puzzle:
        """Return what a new key solves to register; raises Refusal in a run that asks for no work."""
        with self.home.database.read() as connection:
            return self._membership.puzzle(connection, now=now)

    def lease(
        self, connection: Connection, node: str, request: LeaseRequest, *, now: float, address: str = ""
    ) -> LeaseReply:
        """Lease slots to a node that requests them from network `address`."""
        quota = work.AddressQuota(address, self._leases_per_address)
        locks.leasing(connection)  # before the node's row, which others change while they hold it
        check = instances.record_activity(connection, node, request.instance, now=now)
        spec = self.home.spec
        return work.lease(connection, node=node, request=request, spec=spec, now=now, quota=quota, check=check)

    def standing(self, node: str, *, now: float) -> NodeStanding:
        """Return a node's public standing report; a default one for an unknown node."""
        with self.home.database.read() as connection:
            return standing_report(connection, node, accounts=self._accounts, spec=self.home.spec, now=now)

    def best_of_day(self, connection: Connection, *, now: float, most: int) -> list[tuple[str, int]]:
        """Return at most `most` nodes with today's tokens (UTC), the most first; raises as `standing`."""
        return self._accounts.best_of_day(connection, now=now, most=most)

    def return_lease(self, connection: Connection, node: str, lease_id: str, *, now: float) -> None:
        """End a lease early, on its holder's request."""
        work.return_lease(connection, node=node, lease_id=lease_id, spec=self.home.spec, now=now)

    def check_may_submit(
        self,
        connection: Connection,
        node: str,
        lease_id: str,
        *,
        claimed: SlotName | UnsetType = UNSET,
        now: float,
    ) -> None:
        """Raise Refusal unless `node` may submit for this lease, as work of the slot `claimed` if it names one.

        Called before the body is read.
        """
        spec = self.home.spec
        try:
            work.check_lease(connection, node=node, lease_id=lease_id, claimed=claimed, spec=spec, now=now)
        except Refusal as refusal:  # the holder of a lease is registered
            if not nodes.is_registered(connection, node):
                raise Refusal(Reason.UNKNOWN_IDENTITY, f"Node {node[:16]}….") from refusal
            raise

    def refuse_stranger(self, node: str, lease_id: str | None, *, now: float) -> None:
        """Raise Refusal unless `node` is registered and, if a lease is named, may submit for it; only reads."""
        with self.home.database.read() as connection:
            if lease_id is not None:
                self.check_may_submit(connection, node, lease_id, now=now)
            elif not nodes.is_registered(connection, node):
                raise Refusal(Reason.UNKNOWN_IDENTITY, f"Node {node[:16]}….")

    def submit(self, node: str, lease_id: str, envelope: bytes, body: Incoming, *, now: float) -> str:
        """Store a submission and queue it for verification; return its id. A refused one leaves no blob."""
        stored = work.StoredSubmission(envelope, body=body.digest, body_bytes=body.size_bytes)
        body.sync()
        # Sync outside the transaction, so that the write lock is not held during an fsync. A verdict on a submission
        # that a power cut could lose is safe: its own durable transaction syncs everything before it.
        with self.home.database.write(durable=False) as connection:
            name = work.submit(connection, stored, node=node, lease_id=lease_id, spec=self.home.spec, now=now)
            body.commit()
        self.home.database.sync()
        return name

    def signed_request(self, name: str) -> bytes | None:
        """Return the signed request of submission `name` if its row has it; raises Refusal for a damaged one."""
        if not is_digest(name):
            return None
        with self.home.database.read() as connection:
            envelope = envelope_of(connection, name)
        if envelope is not None and digest(envelope) != name:
            logger.warning("the signed request of submission %s is damaged, and is not served", name)
            raise Refusal(Reason.NOT_FOUND, "That request is damaged here.")
        return envelope

    def has_expired(self, name: str) -> bool:
        """Return whether blob `name` was a submission's, whose files are removed."""
        if not is_digest(name):
            return False
        with self.home.database.read() as connection:
            return retention.is_expired(connection, name)

    def announce_upload(self, connection: Connection, node: str, upload: Upload, *, now: float) -> None:
        """Record the one body that a node may upload for its lease; raises Refusal for another."""
        limit = self.home.spec.limits.max_submission_bytes
        if upload.body_bytes > limit:
            raise Refusal(Reason.OVERSIZED_BODY, f"{upload.body_bytes} bytes, at most {limit} are taken.")
        self.check_may_submit(connection, node, upload.lease, now=now)
        uploads.announce(connection, upload, now=now)

    def submit_upload(self, store: UploadStore, node: str, upload: Upload, envelope: bytes, *, now: float) -> str:
        """Queue an uploaded body for verification; return the submission's id.

        The verifier is the first to read it. After a refusal the upload stays until swept.
        """
        with self.home.database.read() as connection:
            announced = uploads.of_lease(connection, upload.lease)
        if announced is not None and announced != upload:
            raise Refusal(Reason.BODY_MISMATCH, f"Another body was announced for lease {upload.lease[:16]}….")
        if announced is None or not store.holds(upload):
            raise Refusal(Reason.UPLOAD_FIRST, f"Nothing of that size and SHA-256 was uploaded: {upload.sha256[:16]}….")
        stored = work.StoredSubmission(envelope, body=upload.body, body_bytes=upload.body_bytes)
        with self.home.database.write(durable=False) as connection:
            name = work.submit(connection, stored, node=node, lease_id=upload.lease, spec=self.home.spec, now=now)
            uploads.submitted(connection, upload, name)
        self.home.database.sync()
        return name

    def receipt(self, submission: str) -> bytes | Pending:
        """Return the signed receipt of a submission, or Pending before its verdict; raises Refusal if unknown.

        Signed is what the log's leaf says, never what the submission's own row does; raises StorageFault where the two
        do not belong together.
        """
        with self.home.database.read() as connection:
            found = logged_verdict(connection, submission)
        if found is None:
            raise Refusal(Reason.NOT_FOUND, "No such submission.")
        if isinstance(found, SubmissionState):
            return Pending(state=found.value)  # type: ignore[arg-type]
        entry = found.entry
        receipt = Receipt(
            run_id=self.home.run_id,
            submission=entry.submission,
            node=entry.node,
            version=entry.version,
            slot=entry.slot,
            outcome=entry.outcome,
            reason=entry.reason,
            detail=entry.detail,
            tokens=entry.tokens,
            log_index=found.log_index,
            leaf_hash=merkle.leaf_hash(found.leaf).hex(),
        )
        return seal(encode(receipt), domain=RECEIPT_DOMAIN, version=MESSAGE_VERSION, key=self._key)

    def checkpoint(self) -> bytes:
        """Return the note of the log's current size and root, signed, once it is kept outside of the database."""
        with self.home.database.read() as connection:
            checkpoint = current_checkpoint(connection, run_id=self.home.run_id)
        note = seal_checkpoint(checkpoint, key=self._key)
        self._history.keep(checkpoint, note)
        return note

    def witnessed(self) -> bytes:
        """Return the note of the newest checkpoint that a witness signed; raises Refusal without one."""
        if self._witnessed is None:
            raise Refusal(Reason.NOT_FOUND, "No witness has signed a checkpoint since this coordinator started.")
        return self._witnessed.encode()

    def set_witnessed(self, note: Note) -> None:
        """Show a note of the run's with the signatures of witnesses from now on."""
        self._witnessed = note

    @property
    def is_history_due(self) -> bool:
        """Whether the last checkpoint was kept HISTORY_SECONDS ago."""
        return time.monotonic() >= self._history_due

    def keep_history(self) -> None:
        """Keep a checkpoint before a receipt is sent: it, too, is a promise that its entry stays."""
        try:
            self.checkpoint()
        except OSError as error:
            logger.warning("checkpoint not kept in %s, the next receipt tries again: %s", self.home.folder, error)
        finally:
            self._history_due = time.monotonic() + HISTORY_SECONDS

    def log_size(self) -> int:
        """Return the number of log entries."""
        with self.home.database.read() as connection:
            return log.size(connection)

    def entries(self, start: int, end: int) -> list[bytes]:
        """Return the exact bytes of entries start .. end - 1, or fewer; see `coordinator.storage.log.leaves`."""
        with self.home.database.read() as connection:
            return log.leaves(connection, start, end)

    def inclusion(self, index: int, size: int) -> list[bytes]:
        """Return the inclusion proof of entry `index` in the log of `size` entries; raises Refusal if there is none."""
        with self.home.database.read() as connection:
            if not 0 <= index < size <= log.size(connection):
                raise Refusal(Reason.NOT_FOUND, f"No entry {index} in a log of {size}.")
            return log.inclusion(connection, index, size)

    def consistency(self, first: int, second: int) -> list[bytes]:
        """Return the consistency proof between two sizes of the log; raises Refusal if it never had them."""
        with self.home.database.read() as connection:
            if not 0 <= first <= second <= log.size(connection):
                raise Refusal(Reason.NOT_FOUND, f"No log of {second} that extends one of {first}.")
            return log.consistency(connection, first, second)
