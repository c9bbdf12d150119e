"""the first schema"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "facts",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_facts")),
    )
    op.create_table(
        "log_entries",
        sa.Column("index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("leaf", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("index", name=op.f("pk_log_entries")),
    )
    op.create_table(
        "log_nodes",
        sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("level", "index", name=op.f("pk_log_nodes")),
    )
    op.create_table(
        "nodes",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("software", sa.Text(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("admitted", sa.Integer(), nullable=False),
        sa.Column("rejected", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("rejected_streak", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_nodes")),
    )
    op.create_table(
        "nonces",
        sa.Column("nonce", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("nonce", name=op.f("pk_nonces")),
    )
    with op.batch_alter_table("nonces", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_nonces_expires_at"), ["expires_at"], unique=False)

    op.create_table(
        "policies",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("manifest_digest", sa.Text(), nullable=False),
        sa.Column("result_digest", sa.Text(), nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("published_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_policies")),
    )
    op.create_table(
        "relays",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_relays")),
    )
    op.create_table(
        "slots",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slots")),
        sa.UniqueConstraint("version", "number", name=op.f("uq_slots_version_number")),
    )
    with op.batch_alter_table("slots", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_slots_state_version"), ["state", "version"], unique=False)

    op.create_table(
        "steps",
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("assigned_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("reward_mean", sa.Double(), nullable=False),
        sa.Column("staleness_mean", sa.Double(), nullable=False),
        sa.Column("stats", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("step", name=op.f("pk_steps")),
    )
    op.create_table(
        "leases",
        sa.Column("lease", sa.Text(), nullable=False),
        sa.Column("slot_id", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("issued_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["node"], ["nodes.node"], name=op.f("fk_leases_node")),
        sa.ForeignKeyConstraint(["slot_id"], ["slots.id"], name=op.f("fk_leases_slot_id")),
        sa.PrimaryKeyConstraint("lease", name=op.f("pk_leases")),
    )
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_leases_node_state"), ["node", "state"], unique=False)
        batch_op.create_index(batch_op.f("ix_leases_slot_id"), ["slot_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_leases_state_expires_at"), ["state", "expires_at"], unique=False)

    op.create_table(
        "submissions",
        sa.Column("submission", sa.Text(), nullable=False),
        sa.Column("lease", sa.Text(), nullable=False),
        sa.Column("slot_id", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("body_bytes", sa.Integer(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("verifier", sa.Text(), nullable=True),
        sa.Column("claimed_until", sa.Double(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("tokens", sa.Integer(), nullable=True),
        sa.Column("log_index", sa.Integer(), nullable=True),
        sa.Column("decided_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["lease"], ["leases.lease"], name=op.f("fk_submissions_lease")),
        sa.ForeignKeyConstraint(["node"], ["nodes.node"], name=op.f("fk_submissions_node")),
        sa.ForeignKeyConstraint(["slot_id"], ["slots.id"], name=op.f("fk_submissions_slot_id")),
        sa.PrimaryKeyConstraint("submission", name=op.f("pk_submissions")),
        sa.UniqueConstraint("lease", name=op.f("uq_submissions_lease")),
    )
    with op.batch_alter_table("submissions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_submissions_body"), ["body"], unique=False)
        batch_op.create_index(batch_op.f("ix_submissions_node_state"), ["node", "state"], unique=False)
        batch_op.create_index(batch_op.f("ix_submissions_slot_id"), ["slot_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_submissions_state_received_at"), ["state", "received_at"], unique=False)

    op.create_table(
        "groups",
        sa.Column("slot_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("submission", sa.Text(), nullable=False),
        sa.Column("blob", sa.Text(), nullable=False),
        sa.Column("reward_mean", sa.Double(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["slot_id"], ["slots.id"], name=op.f("fk_groups_slot_id")),
        sa.ForeignKeyConstraint(["submission"], ["submissions.submission"], name=op.f("fk_groups_submission")),
        sa.PrimaryKeyConstraint("slot_id", name=op.f("pk_groups")),
        sa.UniqueConstraint("submission", name=op.f("uq_groups_submission")),
    )
    with op.batch_alter_table("groups", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_groups_step"), ["step"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("groups", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_groups_step"))

    op.drop_table("groups")
    with op.batch_alter_table("submissions", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_submissions_state_received_at"))
        batch_op.drop_index(batch_op.f("ix_submissions_slot_id"))
        batch_op.drop_index(batch_op.f("ix_submissions_node_state"))
        batch_op.drop_index(batch_op.f("ix_submissions_body"))

    op.drop_table("submissions")
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_leases_state_expires_at"))
        batch_op.drop_index(batch_op.f("ix_leases_slot_id"))
        batch_op.drop_index(batch_op.f("ix_leases_node_state"))

    op.drop_table("leases")
    op.drop_table("steps")
    with op.batch_alter_table("slots", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_slots_state_version"))

    op.drop_table("slots")
    op.drop_table("relays")
    op.drop_table("policies")
    with op.batch_alter_table("nonces", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_nonces_expires_at"))

    op.drop_table("nonces")
    op.drop_table("nodes")
    op.drop_table("log_nodes")
    op.drop_table("log_entries")
    op.drop_table("facts")
