"""Keep counts of the slots that nodes which are not proven have in flight."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "newcomers",
        sa.Column("place", sa.Text, nullable=False),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("taken", "rows")),
        sa.Column("counted_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("place", name="pk_newcomers"),
    )


def downgrade() -> None:
    op.drop_table("newcomers")
