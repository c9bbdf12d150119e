"""What the coordinator does for those who knock: one method for each endpoint, free of HTTP.

Every method takes the time as an argument, and refuses with `node.protocol.reasons.Refusal`. What a signed request asks
for is done in the transaction of `accept`, which its method is given; all others run in one of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, bindparam, delete, insert, select, update
from sqlalchemy.exc import IntegrityError, OperationalError

from coordinator.descriptors import NOWHERE, Contacts, Descriptors
from coordinator.home import Home
from coordinator.relays import RelayRegistry
from coordinator.storage import accounts, instances, locks, log, uploads, work
from coordinator.storage.blobs import Upload, UploadStore
from coordinator.storage.folder_blobs import Incoming
from coordinator.storage.schema import log_entries, nodes, nonces, policies, slots, submissions
from node.protocol import merkle, requests
from node.protocol.admission import Outcome
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

FORGET_SECONDS = 1.0
"""How often expired nonces are forgotten: those of a minute would keep all who write waiting for 0.1 s."""

# Built once, as in `work_statements`.
_REMEMBER, _FORGET = insert(nonces), delete(nonces).where(nonces.c.expires_at < bindparam("now"))
_NODE, _NEW_NODE = select(nodes.c.node).where(nodes.c.node == bindparam("node")), insert(nodes)
_SAME_NODE = update(nodes).where(nodes.c.node == bindparam("of_node"))
_SUBMISSION = (
    select(
        submissions.c.node,
        submissions.c.state,
        submissions.c.outcome,
        submissions.c.reason,
        submissions.c.detail,
        submissions.c.tokens,
        submissions.c.log_index,
        slots.c.version,
        slots.c.number,
        log_entries.c.leaf,
    )
    .join(slots, slots.c.id == submissions.c.slot_id)
    .outerjoin(log_entries, log_entries.c.index == submissions.c.log_index)
    .where(submissions.c.submission == bindparam("submission"))
)


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
        self._forgot_at = -math.inf
        # A secret of the run, so that nobody can search for a key whose place in the trees is next to a victim's.
        self.relays = RelayRegistry(
            home.database, fixed=relay_urls, salt=derive("veriswarm/1 relay tree", key.private_bytes_raw())
        )
        self.descriptors = Descriptors(home, key=key, relays=self.relays, contacts=contacts)

    def descriptor(self, *, now: float) -> bytes:
        """The signed description of the run."""
        return self.descriptors.newest(now=now).envelope

    def newest_policy(self) -> bytes:
        """The signed manifest of the newest policy."""
        with self.home.database.read() as connection:
            newest = select(policies.c.manifest).order_by(policies.c.version.desc()).limit(1)
            manifest = connection.execute(newest).scalar()
        if manifest is None:
            raise Refusal(Reason.NOT_FOUND, "No policy is published yet.")
        return bytes(manifest)

    @contextmanager
    def accept(self, node: str, claim: RequestClaim, *, method: str, path: str, now: float) -> Iterator[Connection]:
        """The transaction of what `node` has signed `claim` for; each signed request is good once.

        What fails in the block is undone, and the request is used up all the same: else whoever read it on its way
        could have it done later. Only while the database is away is it forgotten with the rest.
        """
        requests.check_claim(claim, run_id=self.home.run_id, method=method, path=path, now=now)
        failure: Exception | None = None
        with self.home.database.write(durable=False) as connection:
            self._use_up(connection, node + claim.nonce, now=now)
            connection.exec_driver_sql("SAVEPOINT asked")
            try:
                yield connection
            except OperationalError:
                raise
            except Exception as error:  # noqa: BLE001  (raised again below)
                connection.exec_driver_sql("ROLLBACK TO SAVEPOINT asked")
                failure = error
        if failure is not None:
            raise failure

    def _use_up(self, connection: Connection, nonce: str, *, now: float) -> None:
        if not 0 <= now - self._forgot_at < FORGET_SECONDS:
            connection.execute(_FORGET, {"now": now})
            self._forgot_at = now
        expires_at = now + 2 * requests.MAX_CLOCK_SKEW_SECONDS
        try:
            connection.execute(_REMEMBER, {"nonce": nonce, "expires_at": expires_at})
        except IntegrityError as error:
            raise Refusal(Reason.REPLAYED_REQUEST, "Its nonce was used.") from error

    def register(self, connection: Connection, node: str, registration: Registration, *, now: float) -> None:
        """Make a node known to the run, or refresh what is known about it."""
        locks.leasing(connection)
        about: dict[str, str | float]
        about = {"software": registration.software, "engine": registration.engine, "seen_at": now}
        about |= instances.admit(connection, node, registration, now=now)
        if connection.execute(_SAME_NODE, about | {"of_node": node}).rowcount == 0:
            connection.execute(_NEW_NODE, about | {"node": node, "registered_at": now})

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
            if connection.execute(_NODE, {"node": node}).first() is None:
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

    def receipt(self, submission: str) -> bytes | str:
        """The signed receipt of a submission, or the state it is in while there is none."""
        with self.home.database.read() as connection:
            row = connection.execute(_SUBMISSION, {"submission": submission}).first()
        if row is None:
            raise Refusal(Reason.NOT_FOUND, "No such submission.")
        if row.leaf is None:
            return str(row.state)
        receipt = Receipt(
            run_id=self.home.run_id,
            submission=submission,
            node=row.node,
            version=row.version,
            slot=row.number,
            outcome=Outcome(row.outcome),
            reason=None if row.reason is None else Reason(row.reason),
            detail=row.detail,
            tokens=row.tokens,
            log_index=row.log_index,
            leaf_hash=merkle.leaf_hash(bytes(row.leaf)).hex(),
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
