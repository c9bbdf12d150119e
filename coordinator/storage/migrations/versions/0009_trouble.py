"""Let a process say with its sign of life that it waits for its disk or the database."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("heartbeats", sa.Column("trouble", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("heartbeats", "trouble")
