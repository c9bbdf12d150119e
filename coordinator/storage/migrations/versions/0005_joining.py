"""The descriptors that were signed, each version once, where each node's key is at work, what rejections took."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "descriptors",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("issued_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_descriptors"),
    )
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.add_column(sa.Column("instance", sa.Text(), nullable=False, server_default=""))
        batch_op.add_column(sa.Column("instance_name", sa.Text(), nullable=False, server_default=""))
        batch_op.add_column(sa.Column("instance_seen_at", sa.Double(), nullable=False, server_default="0"))
    with op.batch_alter_table("submissions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("recheck_index", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("void", sa.Boolean(), nullable=False, server_default=sa.false()))
        batch_op.create_index("ix_submissions_node_outcome_log_index", ["node", "outcome", "log_index"], unique=False)
        batch_op.create_index(
            "ix_submissions_node_recheck_recheck_index", ["node", "recheck", "recheck_index"], unique=False
        )


def downgrade() -> None:
    with op.batch_alter_table("submissions", schema=None) as batch_op:
        batch_op.drop_index("ix_submissions_node_recheck_recheck_index")
        batch_op.drop_index("ix_submissions_node_outcome_log_index")
        for name in ("void", "recheck_index"):
            batch_op.drop_column(name)
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.drop_column("instance_seen_at")
        batch_op.drop_column("instance_name")
        batch_op.drop_column("instance")
    op.drop_table("descriptors")
