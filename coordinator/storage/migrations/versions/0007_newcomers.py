"""Keep counts of what nodes that are not proven have in flight, and find nodes by their place."""

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
    # The first step makes the tables as schema.py has them, so that it may be there.
    op.create_index("ix_nodes_place", "nodes", ["place"], if_not_exists=True)


def downgrade() -> None:
    op.drop_index("ix_nodes_place", "nodes")
    op.drop_table("newcomers")
