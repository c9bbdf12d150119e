"""What a run's pages show: verdicts as they were counted, evidence, which policy a relay holds, workers in order."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

WIDTHS = (0, 60, 3600, 86400)
_CHUNK = 10_000
MANY = {
    "nodes": ("tokens",),
    "descriptors": ("version",),
    "stakes": ("amount",),
    "submissions": ("log_index", "recheck_index"),
    "log_entries": ("index",),
    "log_nodes": ("index",),
}


def upgrade() -> None:
    op.create_table(
        "verdict_tallies",
        sa.Column("width", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("verdicts", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("wait_seconds", sa.Double(), nullable=False),
        sa.Column("longest_wait", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("width", "start", "kind", "outcome", "reason", name="pk_verdict_tallies"),
    )
    op.create_table(
        "uploads",
        sa.Column("lease", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("body_bytes", sa.BigInteger(), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("submission", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["lease"], ["leases.lease"], name="fk_uploads_lease"),
        sa.PrimaryKeyConstraint("lease", name="pk_uploads"),
    )
    with op.batch_alter_table("uploads", schema=None) as batch_op:
        batch_op.create_index("ix_uploads_asked_at", ["asked_at"], unique=False)
        batch_op.create_index("ix_uploads_submission", ["submission"], unique=False)
    with op.batch_alter_table("submissions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("evidence", sa.Text(), nullable=True))
    with op.batch_alter_table("relays", schema=None) as batch_op:
        batch_op.add_column(sa.Column("version", sa.BigInteger(), nullable=True))
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.create_index("ix_nodes_tokens_node", ["tokens", "node"], unique=False)
        batch_op.create_index("ix_nodes_rejected_node", ["rejected", "node"], unique=False)
        batch_op.create_index("ix_nodes_seen_at_node", ["seen_at", "node"], unique=False)
        batch_op.create_index("ix_nodes_strikes", ["strikes"], unique=False)
    _alter_many(sa.Integer(), sa.BigInteger())
    _count_what_was_decided(op.get_bind())


def downgrade() -> None:
    _alter_many(sa.BigInteger(), sa.Integer())
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        for name in ("strikes", "seen_at_node", "rejected_node", "tokens_node"):
            batch_op.drop_index(f"ix_nodes_{name}")
    with op.batch_alter_table("relays", schema=None) as batch_op:
        batch_op.drop_column("version")
    with op.batch_alter_table("submissions", schema=None) as batch_op:
        batch_op.drop_column("evidence")
    op.drop_table("uploads")
    op.drop_table("verdict_tallies")


def _alter_many(before: sa.types.TypeEngine[int], after: sa.types.TypeEngine[int]) -> None:
    """What grows with a run gets 64 bits, where there is a difference."""
    if op.get_bind().dialect.name == "postgresql":
        for table, columns in MANY.items():
            for column in columns:
                op.alter_column(table, column, existing_type=before, type_=after)


def _count_what_was_decided(connection: sa.Connection) -> None:
    """The tallies of a run that an earlier release has begun. When a second verdict was made it did not note: those
    count where the first one does."""
    names = ("outcome", "reason", "tokens", "received_at", "decided_at", "spot", "recheck")
    submissions = sa.table("submissions", *map(sa.column, names))
    tallies = sa.table(
        "verdict_tallies",
        *map(sa.column, ("width", "start", "kind", "outcome", "reason")),
        *map(sa.column, ("verdicts", "tokens", "wait_seconds", "longest_wait")),
    )
    found: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    decided = sa.select(submissions).where(submissions.c.outcome.is_not(None))
    for row in connection.execute(decided.execution_options(yield_per=_CHUNK)):
        wait = max(0.0, row.decided_at - row.received_at)
        for width in WIDTHS:
            start = int(row.decided_at) // width * width if width else 0
            kind = "full" if row.spot is None else "spot"
            _add(found[width, start, kind, row.outcome, row.reason or ""], row.tokens, wait)
            if row.recheck in {"admitted", "rejected", "indeterminate"}:
                _add(found[width, start, "second", row.recheck, ""], row.tokens, 0.0)
    if found:
        keys = tuple(column.name for column in tallies.columns)
        connection.execute(
            sa.insert(tallies), [dict(zip(keys, (*key, *value), strict=True)) for key, value in found.items()]
        )


def _add(total: list[float], tokens: int, wait: float) -> None:
    total[0] += 1
    total[1] += tokens
    total[2] += wait
    total[3] = max(total[3], wait)
