"""How much of a node's work is measured, what is measured again when it is caught, and what it staked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.add_column(sa.Column("verified", sa.Integer(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("strikes", sa.Integer(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("address", sa.Text(), nullable=False, server_default=""))
    with op.batch_alter_table("submissions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("draw", sa.Double(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("spot", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("recheck", sa.Text(), nullable=True))
        batch_op.add_column(sa.Column("recheck_by", sa.Double(), nullable=True))
        batch_op.create_index("ix_submissions_recheck", ["recheck"], unique=False)
    op.create_table(
        "stakes",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("amount", sa.Integer(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_stakes"),
        sa.UniqueConstraint("node", "why", name="uq_stakes_node_why"),
    )
    op.create_index("ix_stakes_node", "stakes", ["node"], unique=False)


def downgrade() -> None:
    op.drop_table("stakes")
    with op.batch_alter_table("submissions", schema=None) as batch_op:
        batch_op.drop_index("ix_submissions_recheck")
        for name in ("recheck_by", "recheck", "spot", "draw"):
            batch_op.drop_column(name)
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        for name in ("address", "strikes", "verified"):
            batch_op.drop_column(name)
