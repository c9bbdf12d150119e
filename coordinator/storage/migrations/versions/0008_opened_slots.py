"""Count the slots that were opened: for each lease all slots in flight were counted, thousands with as many workers."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # No row where there are none: a backup is restored into tables without rows.
    op.execute(
        """INSERT INTO final_counts ("of", state, number)
        SELECT 'slots', 'opened', count(*) FROM slots HAVING count(*) > 0"""
    )


def downgrade() -> None:
    op.execute("""DELETE FROM final_counts WHERE "of" = 'slots' AND state = 'opened'""")
