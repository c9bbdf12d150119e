"""The tables (SQLAlchemy Core); a test compares them with the migrations.

Times are Unix seconds as floats. Digests and keys are lower-case hexadecimal.

Slot states: open -> leased -> submitted -> admitted -> used; back to open when the lease ends or the submission is
rejected; stale, a gap of the log, once no training step may use its policy version.
Submission states: queued -> verifying -> done; back to queued when a verifier dies or cannot decide. If only the row
`spot` was measured, it is queued again once its node is rejected (`recheck`: due, then the second outcome;
`recheck_by`: until when it is tried, then when it was decided), and `void` if a rejection voided its credit.
In a run with pools a slot has a `candidate`, and a `problem` if its environment's problems are a finite set. A
problem's `mean` is the reward of its last group, admitted while policy `head` was the newest; `before`, the one before.
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import (
    BigInteger,
    Boolean,
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
    false,
    text,
)


class SlotState(StrEnum):
    OPEN = "open"
    LEASED = "leased"
    SUBMITTED = "submitted"
    ADMITTED = "admitted"
    USED = "used"
    STALE = "stale"
    SET_ASIDE = "set_aside"
    """Admitted and credited, but never trained on, since all rewards are equal (`batch.only_signal`)."""


class LeaseState(StrEnum):
    ACTIVE = "active"
    SUBMITTED = "submitted"
    RETURNED = "returned"
    EXPIRED = "expired"
    OVERTAKEN = "overtaken"
    """Late with a slot that a step was about to need: another node has it, or it is a gap."""


RECHECK_DUE = "due"
UNKNOWN_SIGNAL = -1
"""Of `deliveries`: a group that nobody delivered may have had signal or not."""


class SubmissionState(StrEnum):
    QUEUED = "queued"
    VERIFYING = "verifying"
    DONE = "done"
    EXPIRED = "expired"
    """Done, and its files are removed (`storage.retention`); its row names them still."""


_Many = BigInteger().with_variant(Integer, "sqlite")
"""64-bit integers; SQLite's are anyway, and its autoincrement needs Integer."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _index_where(condition: str, *columns: str) -> Index:
    """Return an index of the rows that fulfil `condition`; used where a query names that, or compares the column."""
    return Index(None, *columns, sqlite_where=text(condition), postgresql_where=text(condition))


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
    Column("tokens", _Many, nullable=False, default=0),
    Column("rejected_streak", Integer, nullable=False, default=0),
    Column("not_before", Double, nullable=False, default=0.0),
    Column("drift", LargeBinary),
    Column("verified", Integer, nullable=False, server_default="0"),
    Column("strikes", Integer, nullable=False, server_default="0"),
    Column("address", Text, nullable=False, server_default=""),
    Column("place", Text, nullable=False, server_default=""),
    Column("returned", Integer, nullable=False, server_default="0"),
    Column("instance", Text, nullable=False, server_default=""),
    Column("instance_name", Text, nullable=False, server_default=""),
    Column("instance_seen_at", Double, nullable=False, server_default="0"),
    # The oldest policy on its disk when it last asked for work, and since then while it has some.
    Column("held_from", Integer),
    Index(None, "tokens", "node"),
    Index(None, "rejected", "node"),
    Index(None, "seen_at", "node"),
    Index(None, "strikes"),
)

newcomers = Table(
    "newcomers",
    metadata,
    Column("place", Text, primary_key=True),
    Column("taken", Integer, nullable=False),
    Column("rows", Integer, nullable=False),
    Column("counted_at", Double, nullable=False),
)
"""Counts of the slots that nodes which are not proven have in flight (`storage.newcomers`)."""

profiles = Table(
    "profiles",
    metadata,
    Column("node", Text, ForeignKey("nodes.node"), primary_key=True),
    Column("nickname", Text, nullable=False),
    # What a search compares.
    Column("folded", Text, nullable=False, index=True),
    Column("device", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("dtype", Text, nullable=False),
)

descriptors = Table(
    "descriptors",
    metadata,
    Column("version", _Many, primary_key=True, autoincrement=False),
    Column("content", Text, nullable=False),
    Column("envelope", LargeBinary, nullable=False),
    Column("issued_at", Double, nullable=False),
)

stakes = Table(
    "stakes",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("node", Text, nullable=False, index=True),
    Column("amount", _Many, nullable=False),
    Column("why", Text, nullable=False),
    Column("at", Double, nullable=False),
    UniqueConstraint("node", "why"),
)

invited = Table(
    "invited",
    metadata,
    Column("node", Text, primary_key=True),
    Column("invite", Text, nullable=False, index=True),
    Column("at", Double, nullable=False),
)

relays = Table(
    "relays",
    metadata,
    Column("node", Text, primary_key=True),
    Column("url", Text, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("received", Text, nullable=False, server_default="[]"),
    Column("place", Text, nullable=False, server_default=""),
    Column("version", BigInteger),
    Column("good_at", Double),
    Column("probed_at", Double),
    Column("failed_probes", Integer, nullable=False, server_default="0"),
)

heartbeats = Table(
    "heartbeats",
    metadata,
    Column("role", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("seen_at", Double, nullable=False),
    Column("trouble", Text, nullable=False, server_default=""),
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
    Column("candidate", Integer),
    Column("environment", Integer),
    Column("problem", Integer),
    UniqueConstraint("version", "number"),
    Index(None, "state", "version"),
)

problem_means = Table(
    "problem_means",
    metadata,
    Column("environment", Integer, primary_key=True, autoincrement=False),
    Column("problem", Integer, primary_key=True, autoincrement=False),
    Column("mean", Double, nullable=False),
    Column("head", Integer, nullable=False),
    Column("before", Double),
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
    Column("ended_at", Double),
    Index(None, "state", "expires_at"),
    # Of all leases it would be a page more for each that is issued or used, another one for each node.
    _index_where("state = 'active'", "node"),
    _index_where("ended_at IS NOT NULL", "ended_at"),
)

uploads = Table(
    "uploads",
    metadata,
    Column("lease", Text, ForeignKey("leases.lease"), primary_key=True),
    Column("body", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("body_bytes", BigInteger, nullable=False),
    Column("asked_at", Double, nullable=False, index=True),
    Column("submission", Text, index=True),
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
    Column("log_index", _Many),
    Column("decided_at", Double),
    Column("draw", Double, nullable=False, server_default="0"),
    Column("spot", Integer),
    Column("recheck", Text),
    Column("recheck_by", Double),
    Column("recheck_index", _Many),
    Column("void", Boolean, nullable=False, server_default=false()),
    Column("evidence", Text),
    # The signed request itself. None where it is the blob `request`, as of databases made without this column, and once
    # the submission has expired.
    Column("envelope", LargeBinary),
    Index(None, "state", "received_at"),
    # Each index of all rows is a page more that an upload or a verdict writes, another one for each node.
    _index_where("outcome IS NULL", "node", "state"),
    _index_where("outcome IS NOT NULL", "node", "outcome", "log_index"),
    _index_where("recheck IS NOT NULL", "node", "recheck", "recheck_index"),
    _index_where("recheck IS NOT NULL", "recheck"),
)

verdict_tallies = Table(
    "verdict_tallies",
    metadata,
    Column("width", Integer, primary_key=True, autoincrement=False),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", Text, primary_key=True),
    Column("outcome", Text, primary_key=True),
    Column("reason", Text, primary_key=True),
    Column("verdicts", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("wait_seconds", Double, nullable=False),
    Column("longest_wait", Double, nullable=False),
)

rejections = Table(
    "rejections",
    metadata,
    Column("node", Text, ForeignKey("nodes.node"), primary_key=True),
    Column("reason", Text, primary_key=True),
    Column("rejected", Integer, nullable=False),
)

final_counts = Table(
    "final_counts",
    metadata,
    Column("of", Text, primary_key=True),
    Column("state", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("slot_id", Integer, ForeignKey("slots.id"), primary_key=True, autoincrement=False),
    Column("submission", Text, ForeignKey("submissions.submission"), nullable=False, unique=True),
    Column("blob", Text, nullable=False),
    Column("reward_mean", Double, nullable=False),
    Column("signal", Boolean, nullable=False),
    Column("step", Integer, index=True),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("node", Text, ForeignKey("nodes.node"), primary_key=True),
    Column("environment", Integer, primary_key=True, autoincrement=False),
    Column("signal", Integer, primary_key=True, autoincrement=False),
    Column("delivered", Integer, nullable=False),
    Column("missed", Integer, nullable=False),
    Index(None, "missed"),
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
    Column("index", _Many, primary_key=True, autoincrement=False),
    Column("leaf", LargeBinary, nullable=False),
)

log_nodes = Table(
    "log_nodes",
    metadata,
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("index", _Many, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary, nullable=False),
)
