"""Keep a submission's signed request in its row, and not in a file of its own.

Earlier submissions keep theirs as blobs: a million files would have to be read for it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("submissions", sa.Column("envelope", sa.LargeBinary))


def downgrade() -> None:
    op.drop_column("submissions", "envelope")
