"""What the coordinator does for those who knock: one method for each endpoint, free of HTTP.

Every method takes the time as an argument, runs in one transaction, and refuses with
`node.protocol.reasons.Refusal`. Nothing here trusts a byte that has not been checked by `authenticate`.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from coordinator.home import Home
from coordinator.relays import RelayRegistry
from coordinator.storage import log, work
from coordinator.storage.blobs import Incoming
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
    Receipt,
    Registration,
    RequestClaim,
)
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION, Descriptor
from shardcast.envelope import seal
from shardcast.wire import derive, digest, encode

DESCRIPTOR_SECONDS = 3600


class Coordinator:
    """The run's judge and book-keeper, holding the run's key."""

    def __init__(
        self,
        home: Home,
        *,
        key: Ed25519PrivateKey,
        relay_urls: tuple[str, ...] = (),
        leases_per_address: int = 0,
    ) -> None:
        self.home = home
        self._key = key
        self._leases_per_address = leases_per_address
        # A secret of the run, so that nobody can search for a key whose place in the trees is next to a victim's.
        self.relays = RelayRegistry(
            home.database, fixed=relay_urls, salt=derive("veriswarm/1 relay tree", key.private_bytes_raw())
        )

    def descriptor(self, *, now: float) -> bytes:
        """The signed description of the run."""
        described = Descriptor(
            run_id=self.home.run_id,
            spec=self.home.spec,
            relays=tuple(self.relays.urls(now=now)),
            issued_at=int(now),
            expires_at=int(now) + DESCRIPTOR_SECONDS,
        )
        return seal(encode(described), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=self._key)

    def newest_policy(self) -> bytes:
        """The signed manifest of the newest policy."""
        with self.home.database.read() as connection:
            newest = select(policies.c.manifest).order_by(policies.c.version.desc()).limit(1)
            manifest = connection.execute(newest).scalar()
        if manifest is None:
            raise Refusal(Reason.NOT_FOUND, "No policy is published yet.")
        return bytes(manifest)

    def authenticate(self, envelope: bytes, *, method: str, path: str, now: float) -> tuple[str, RequestClaim]:
        """The node that signed this request, and what it claims; each signed request is good once."""
        signer, claim = requests.open_claim(envelope)
        requests.check_claim(claim, run_id=self.home.run_id, method=method, path=path, now=now)
        try:
            with self.home.database.write(durable=False) as connection:
                connection.execute(delete(nonces).where(nonces.c.expires_at < now))
                expires_at = now + 2 * requests.MAX_CLOCK_SKEW_SECONDS
                connection.execute(insert(nonces).values(nonce=signer.hex() + claim.nonce, expires_at=expires_at))
        except IntegrityError as error:
            raise Refusal(Reason.REPLAYED_REQUEST, "Its nonce was used.") from error
        return signer.hex(), claim

    def register(self, node: str, registration: Registration, *, now: float) -> None:
        """Make a node known to the run, or refresh what is known about it."""
        about = {"software": registration.software, "engine": registration.engine, "seen_at": now}
        with self.home.database.write(durable=False) as connection:
            if connection.execute(update(nodes).where(nodes.c.node == node).values(**about)).rowcount == 0:
                connection.execute(insert(nodes).values(node=node, registered_at=now, **about))

    def lease(self, node: str, request: LeaseRequest, *, now: float, address: str = "") -> LeaseReply:
        """Give a node work that asks from `address`."""
        caller = work.Caller(address, self._leases_per_address)
        with self.home.database.write(durable=False) as connection:
            return work.lease(connection, node=node, request=request, spec=self.home.spec, now=now, caller=caller)

    def give_back(self, node: str, lease_id: str, *, now: float) -> None:
        """Take a lease back."""
        with self.home.database.write(durable=False) as connection:
            work.give_back(connection, node=node, lease_id=lease_id, now=now)

    def may_submit(self, node: str, lease_id: str, *, now: float) -> None:
        """Refuse a submission before its body is read."""
        with self.home.database.read() as connection:
            if connection.execute(select(nodes.c.node).where(nodes.c.node == node)).first() is None:
                raise Refusal(Reason.UNKNOWN_IDENTITY, f"Node {node[:16]}….")
            work.check_lease(connection, node=node, lease_id=lease_id, spec=self.home.spec, now=now)

    def submit(self, node: str, lease_id: str, envelope: bytes, body: Incoming, *, now: float) -> str:
        """Store a submission and queue it for verification; return its id. What is refused leaves no blob."""
        arrival = work.Arrival(
            submission=digest(envelope), request=digest(envelope), body=body.digest, body_bytes=body.size_bytes
        )
        with self.home.blobs.incoming(max_bytes=len(envelope)) as request:
            request.write(envelope)
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

    def receipt(self, submission: str) -> bytes | str:
        """The signed receipt of a submission, or the state it is in while there is none."""
        with self.home.database.read() as connection:
            query = (
                select(submissions, slots.c.version, slots.c.number, log_entries.c.leaf)
                .join(slots, slots.c.id == submissions.c.slot_id)
                .outerjoin(log_entries, log_entries.c.index == submissions.c.log_index)
                .where(submissions.c.submission == submission)
            )
            row = connection.execute(query).first()
        if row is None:
            raise Refusal(Reason.NOT_FOUND, "No such submission.")
        if row.leaf is None:
            return str(row.state)
        receipt = Receipt(
            run_id=self.home.run_id,
            submission=row.submission,
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
