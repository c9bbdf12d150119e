"""Count the slots that were opened: for each lease all slots in flight were counted, thousands with as many workers.

Those in final states are counted anew: how many slots may be leased now depends on both.
"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""DELETE FROM final_counts WHERE "of" = 'slots'""")
    op.execute(
        """INSERT INTO final_counts ("of", state, number)
        SELECT 'slots', state, count(*) FROM slots WHERE state IN ('used', 'stale', 'set_aside') GROUP BY state"""
    )
    # No row where there are none: a backup is restored into tables without rows.
    op.execute(
        """INSERT INTO final_counts ("of", state, number)
        SELECT 'slots', 'opened', counted.number FROM (SELECT count(*) AS number FROM slots) AS counted
        WHERE counted.number > 0"""
    )


def downgrade() -> None:
    op.execute("""DELETE FROM final_counts WHERE "of" = 'slots' AND state = 'opened'""")
