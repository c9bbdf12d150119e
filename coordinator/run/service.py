"""What the coordinator does for those who knock: one method for each endpoint, free of HTTP.

Every method takes the time as an argument, and refuses with `node.protocol.reasons.Refusal`. What a signed request asks
for is done in the transaction of `accept`, which its method is given; all others run in one of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.run.descriptors import NOWHERE, Contacts, Descriptors
from coordinator.run.home import Home
from coordinator.run.relays import RelayRegistry
from coordinator.storage import accounts, instances, log, nodes, uploads, work
from coordinator.storage.blobs import Upload, UploadStore
from coordinator.storage.database import Connection
from coordinator.storage.folder_blobs import Incoming
from coordinator.storage.signed_requests import SignedRequestLog
from coordinator.storage.steps import newest_manifest
from coordinator.storage.submissions import judged_submission
from node.protocol import merkle, requests
from node.protocol.admission import Outcome
from node.protocol.endpoints import Pending
from node.protocol.messages import (
    CHECKPOINT_DOMAIN,
    MESSAGE_VERSION,
    RECEIPT_DOMAIN,
    Checkpoint,
    LeaseReply,
    LeaseRequest,
    NodeStanding,
    Receipt,
    Registration,
    RequestClaim,
)
from node.protocol.reasons import Reason, Refusal
from shardcast.envelope import seal
from shardcast.wire import derive, encode


class Coordinator:
    """The run's judge and book-keeper, holding the run's key."""

    def __init__(
        self,
        home: Home,
        *,
        key: Ed25519PrivateKey,
        relay_urls: tuple[str, ...] = (),
        leases_per_address: int = 0,
        contacts: Contacts = NOWHERE,
    ) -> None:
        self.home = home
        self._key = key
        self._leases_per_address = leases_per_address
        self._signed = SignedRequestLog(home.database)
        # A secret of the run, so that nobody can search for a key whose place in the trees is next to a victim's.
        self.relays = RelayRegistry(
            home.database, fixed=relay_urls, salt=derive("swarmproof/1 relay tree", key.private_bytes_raw())
        )
        self.descriptors = Descriptors(home, key=key, relays=self.relays, contacts=contacts)

    def descriptor(self, *, now: float) -> bytes:
        """The signed description of the run."""
        return self.descriptors.newest(now=now).envelope

    def newest_policy(self) -> bytes:
        """The signed manifest of the newest policy."""
        with self.home.database.read() as connection:
            manifest = newest_manifest(connection)
        if manifest is None:
            raise Refusal(Reason.NOT_FOUND, "No policy is published yet.")
        return manifest

    @contextmanager
    def accept(self, node: str, claim: RequestClaim, *, method: str, path: str, now: float) -> Iterator[Connection]:
        """Open the transaction of what `node` signed `claim` for; raises Refusal. See `SignedRequestLog.using_up`."""
        requests.check_claim(claim, run_id=self.home.run_id, method=method, path=path, now=now)
        with self._signed.using_up(node + claim.nonce, now=now) as connection:
            yield connection

    def register(self, connection: Connection, node: str, registration: Registration, *, now: float) -> None:
        """Make a node known to the run, or refresh what is known about it."""
        nodes.register(connection, node, registration, now=now)

    def lease(
        self, connection: Connection, node: str, request: LeaseRequest, *, now: float, address: str = ""
    ) -> LeaseReply:
        """Give a node work that asks from `address`."""
        caller = work.Caller(address, self._leases_per_address)
        instances.hear(connection, node, request.instance, now=now)
        return work.lease(connection, node=node, request=request, spec=self.home.spec, now=now, caller=caller)

    def standing(self, node: str, *, now: float) -> NodeStanding:
        """What the run knows of a node, for itself and everybody else."""
        with self.home.database.read() as connection:
            return accounts.standing_report(connection, node, spec=self.home.spec, now=now)

    def give_back(self, connection: Connection, node: str, lease_id: str, *, now: float) -> None:
        """Take a lease back."""
        work.give_back(connection, node=node, lease_id=lease_id, now=now)

    def may_submit(self, connection: Connection, node: str, lease_id: str, *, now: float) -> None:
        """Refuse a submission before its body is read."""
        try:
            work.check_lease(connection, node=node, lease_id=lease_id, spec=self.home.spec, now=now)
        except Refusal as refusal:  # who holds a lease is known
            if not nodes.is_registered(connection, node):
                raise Refusal(Reason.UNKNOWN_IDENTITY, f"Node {node[:16]}….") from refusal
            raise

    def submit(self, node: str, lease_id: str, request: Incoming, body: Incoming, *, now: float) -> str:
        """Store a submission and queue it for verification; return its id. What is refused leaves no blob."""
        arrival = work.Arrival(
            submission=request.digest, request=request.digest, body=body.digest, body_bytes=body.size_bytes
        )
        request.sync()
        body.sync()
        # Nobody waits for the disk while others wait for the database. A verdict on what would be lost in a power
        # cut is none: its own transaction is durable, and with it all that was written before.
        with self.home.database.write(durable=False) as connection:
            work.submit(connection, arrival, node=node, lease_id=lease_id, spec=self.home.spec, now=now)
            body.commit()
            request.commit()
        self.home.database.sync()
        return arrival.submission

    def announce(self, connection: Connection, node: str, upload: Upload, *, now: float) -> None:
        """Note what a node is about to put into the object store, as the one body of its lease."""
        limit = self.home.spec.limits.max_submission_bytes
        if upload.body_bytes > limit:
            raise Refusal(Reason.OVERSIZED_BODY, f"{upload.body_bytes} bytes, at most {limit} are taken.")
        self.may_submit(connection, node, upload.lease, now=now)
        uploads.announce(connection, upload, now=now)

    def submit_upload(self, store: UploadStore, node: str, upload: Upload, envelope: bytes, *, now: float) -> str:
        """Queue what lies in the object store for verification; return the submission's id.

        The verifier is the first of the run's processes to read it. What is refused leaves no request; the upload
        stays until it is swept.
        """
        with self.home.database.read() as connection:
            announced = uploads.of_lease(connection, upload.lease)
        if announced is not None and announced != upload:
            raise Refusal(Reason.BODY_MISMATCH, f"Another body was announced for lease {upload.lease[:16]}….")
        if announced is None or not store.holds(upload):
            raise Refusal(Reason.UPLOAD_FIRST, f"Nothing of that size and SHA-256 was uploaded: {upload.sha256[:16]}….")
        name = store.put(envelope)
        arrival = work.Arrival(submission=name, request=name, body=upload.body, body_bytes=upload.body_bytes)
        try:
            with self.home.database.write(durable=False) as connection:
                work.submit(connection, arrival, node=node, lease_id=upload.lease, spec=self.home.spec, now=now)
                uploads.submitted(connection, upload, name)
        except Refusal:
            store.remove(name)  # its nonce makes it nobody else's
            raise
        self.home.database.sync()
        return name

    def receipt(self, submission: str) -> bytes | Pending:
        """Return the signed receipt of a submission, or the state it is in while there is none; raises Refusal."""
        with self.home.database.read() as connection:
            row = judged_submission(connection, submission)
        if row is None:
            raise Refusal(Reason.NOT_FOUND, "No such submission.")
        if row.leaf is None:
            return Pending(state=row.state)  # type: ignore[arg-type]
        receipt = Receipt(
            run_id=self.home.run_id,
            submission=submission,
            node=row.node,
            version=row.version,
            slot=row.slot,
            outcome=Outcome(row.outcome),
            reason=None if row.reason is None else Reason(row.reason),
            detail=row.detail,
            tokens=row.tokens,
            log_index=row.log_index,
            leaf_hash=merkle.leaf_hash(row.leaf).hex(),
        )
        return seal(encode(receipt), domain=RECEIPT_DOMAIN, version=MESSAGE_VERSION, key=self._key)

    def checkpoint(self, *, now: float) -> bytes:
        """The signed size and root of the log as it is now."""
        with self.home.database.read() as connection:
            size = log.size(connection)
            root = log.root(connection, size)
        checkpoint = Checkpoint(run_id=self.home.run_id, size=size, root=root.hex(), issued_at=int(now))
        return seal(encode(checkpoint), domain=CHECKPOINT_DOMAIN, version=MESSAGE_VERSION, key=self._key)

    def log_size(self) -> int:
        """How many entries the log has."""
        with self.home.database.read() as connection:
            return log.size(connection)

    def entries(self, start: int, end: int) -> list[bytes]:
        """Exact leaves of the log."""
        with self.home.database.read() as connection:
            return log.leaves(connection, start, end)

    def inclusion(self, index: int, size: int) -> list[bytes]:
        """An inclusion proof; raises Refusal for sizes that the log never had."""
        with self.home.database.read() as connection:
            if not 0 <= index < size <= log.size(connection):
                raise Refusal(Reason.NOT_FOUND, f"No entry {index} in a log of {size}.")
            return log.inclusion(connection, index, size)

    def consistency(self, first: int, second: int) -> list[bytes]:
        """A consistency proof; raises Refusal for sizes that the log never had."""
        with self.home.database.read() as connection:
            if not 0 <= first <= second <= log.size(connection):
                raise Refusal(Reason.NOT_FOUND, f"No log of {second} that extends one of {first}.")
            return log.consistency(connection, first, second)
