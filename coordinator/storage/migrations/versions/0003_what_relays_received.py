"""What relays got from each other, and where they are: who should fetch from whom."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("relays", schema=None) as batch_op:
        batch_op.add_column(sa.Column("received", sa.Text(), nullable=False, server_default="[]"))
        batch_op.add_column(sa.Column("place", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    with op.batch_alter_table("relays", schema=None) as batch_op:
        batch_op.drop_column("place")
        batch_op.drop_column("received")
