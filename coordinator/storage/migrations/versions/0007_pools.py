"""Pools of problems: which candidate a slot is for, and what the last group on each problem earned."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

COLUMNS = ("candidate", "environment", "problem")


def upgrade() -> None:
    op.create_table(
        "problem_means",
        sa.Column("environment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("problem", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("mean", sa.Double(), nullable=False),
        sa.Column("head", sa.Integer(), nullable=False),
        sa.Column("before", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("environment", "problem", name="pk_problem_means"),
    )
    with op.batch_alter_table("slots", schema=None) as batch_op:
        for name in COLUMNS:
            batch_op.add_column(sa.Column(name, sa.Integer(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("slots", schema=None) as batch_op:
        for name in COLUMNS:
            batch_op.drop_column(name)
    op.drop_table("problem_means")
