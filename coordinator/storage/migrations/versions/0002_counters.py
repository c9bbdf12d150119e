"""Count what only grows in tables of its own: ended leases, settled slots, each node's rejections by reason.

Pages and metrics counted these rows at each look, which took longer with every submission.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_FILL = (
    """INSERT INTO final_counts ("of", state, number)
        SELECT 'leases', state, count(*) FROM leases
        WHERE state IN ('returned', 'expired', 'overtaken') GROUP BY state""",
    """INSERT INTO final_counts ("of", state, number)
        SELECT 'slots', state, count(*) FROM slots WHERE state IN ('used', 'stale', 'set_aside') GROUP BY state""",
    """INSERT INTO rejections (node, reason, rejected)
        SELECT node, coalesce(reason, ''), count(*) FROM submissions WHERE outcome = 'rejected'
        GROUP BY node, coalesce(reason, '')""",
)


def upgrade() -> None:
    op.create_table(
        "rejections",
        sa.Column("node", sa.Text, sa.ForeignKey("nodes.node", name="fk_rejections_node"), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("rejected", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("node", "reason", name="pk_rejections"),
    )
    op.create_table(
        "final_counts",
        sa.Column("of", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("of", "state", name="pk_final_counts"),
    )
    for statement in _FILL:
        op.execute(statement)


def downgrade() -> None:
    op.drop_table("final_counts")
    op.drop_table("rejections")
