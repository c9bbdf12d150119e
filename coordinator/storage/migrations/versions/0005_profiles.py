"""Keep what nodes say of themselves, nickname and hardware, in a table of its own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "profiles",
        sa.Column("node", sa.Text, sa.ForeignKey("nodes.node", name="fk_profiles_node"), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("nickname", "folded", "device", "engine", "dtype")),
        sa.PrimaryKeyConstraint("node", name="pk_profiles"),
    )
    op.create_index("ix_profiles_folded", "profiles", ["folded"])


def downgrade() -> None:
    op.drop_table("profiles")
