"""The tables (SQLAlchemy Core). migrations/ holds the same schema as steps; a test compares the two.

Times are seconds since 1970 (UTC) as floating point. Digests and keys are lower-case hexadecimal.

A slot's life: open -> leased -> submitted -> admitted -> used; back to open when its lease ends or its
submission is rejected; stale once no training step may take its policy version any more.
A submission's life: queued -> verifying -> done; back to queued when a verifier dies or cannot decide. Where only
the row `spot` was measured, it is queued again when its node is caught (`recheck`: due, then the second outcome).
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import (
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)


class SlotState(StrEnum):
    OPEN = "open"
    LEASED = "leased"
    SUBMITTED = "submitted"
    ADMITTED = "admitted"
    USED = "used"
    STALE = "stale"


class LeaseState(StrEnum):
    ACTIVE = "active"
    SUBMITTED = "submitted"
    RETURNED = "returned"
    EXPIRED = "expired"


RECHECK_DUE = "due"


class SubmissionState(StrEnum):
    QUEUED = "queued"
    VERIFYING = "verifying"
    DONE = "done"


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

facts = Table(
    "facts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("node", Text, primary_key=True),
    Column("software", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("registered_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("admitted", Integer, nullable=False, default=0),
    Column("rejected", Integer, nullable=False, default=0),
    Column("tokens", Integer, nullable=False, default=0),
    Column("rejected_streak", Integer, nullable=False, default=0),
    Column("not_before", Double, nullable=False, default=0.0),
    Column("drift", LargeBinary),
    Column("verified", Integer, nullable=False, server_default="0"),
    Column("strikes", Integer, nullable=False, server_default="0"),
    Column("address", Text, nullable=False, server_default=""),
)

stakes = Table(
    "stakes",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("node", Text, nullable=False, index=True),
    Column("amount", Integer, nullable=False),
    Column("why", Text, nullable=False),
    Column("at", Double, nullable=False),
    UniqueConstraint("node", "why"),
)

relays = Table(
    "relays",
    metadata,
    Column("node", Text, primary_key=True),
    Column("url", Text, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("received", Text, nullable=False, server_default="[]"),
    Column("place", Text, nullable=False, server_default=""),
)

nonces = Table(
    "nonces",
    metadata,
    Column("nonce", Text, primary_key=True),
    Column("expires_at", Double, nullable=False, index=True),
)

policies = Table(
    "policies",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("manifest_digest", Text, nullable=False),
    Column("result_digest", Text, nullable=False),
    Column("manifest", LargeBinary, nullable=False),
    Column("published_at", Double, nullable=False),
)

slots = Table(
    "slots",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("version", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("opened_at", Double, nullable=False),
    UniqueConstraint("version", "number"),
    Index(None, "state", "version"),
)

leases = Table(
    "leases",
    metadata,
    Column("lease", Text, primary_key=True),
    Column("slot_id", Integer, ForeignKey("slots.id"), nullable=False, index=True),
    Column("node", Text, ForeignKey("nodes.node"), nullable=False),
    Column("state", Text, nullable=False),
    Column("issued_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index(None, "state", "expires_at"),
    Index(None, "node", "state"),
)

submissions = Table(
    "submissions",
    metadata,
    Column("submission", Text, primary_key=True),
    Column("lease", Text, ForeignKey("leases.lease"), nullable=False, unique=True),
    Column("slot_id", Integer, ForeignKey("slots.id"), nullable=False, index=True),
    Column("node", Text, ForeignKey("nodes.node"), nullable=False),
    Column("request", Text, nullable=False),
    Column("body", Text, nullable=False, index=True),
    Column("body_bytes", Integer, nullable=False),
    Column("received_at", Double, nullable=False),
    Column("state", Text, nullable=False),
    Column("verifier", Text),
    Column("claimed_until", Double),
    Column("attempts", Integer, nullable=False, default=0),
    Column("outcome", Text),
    Column("reason", Text),
    Column("detail", Text),
    Column("figure", Text),
    Column("tokens", Integer),
    Column("log_index", Integer),
    Column("decided_at", Double),
    Column("draw", Double, nullable=False, server_default="0"),
    Column("spot", Integer),
    Column("recheck", Text, index=True),
    Column("recheck_by", Double),
    Index(None, "state", "received_at"),
    Index(None, "node", "state"),
)

groups = Table(
    "groups",
    metadata,
    Column("slot_id", Integer, ForeignKey("slots.id"), primary_key=True, autoincrement=False),
    Column("submission", Text, ForeignKey("submissions.submission"), nullable=False, unique=True),
    Column("blob", Text, nullable=False),
    Column("reward_mean", Double, nullable=False),
    Column("step", Integer, index=True),
)

steps = Table(
    "steps",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("assigned_at", Double, nullable=False),
    Column("finished_at", Double),
    Column("reward_mean", Double, nullable=False),
    Column("staleness_mean", Double, nullable=False),
    Column("stats", Text),
)

log_entries = Table(
    "log_entries",
    metadata,
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("leaf", LargeBinary, nullable=False),
)

log_nodes = Table(
    "log_nodes",
    metadata,
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary, nullable=False),
)
