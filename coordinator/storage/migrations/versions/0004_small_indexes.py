"""Index only the submissions that wait, or have a verdict or a second one, where only these are looked for.

An upload wrote a page of each of these indexes, and since they are by node, another one for nearly every submission.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_INDEXES = {
    ("node", "state"): "outcome IS NULL",
    ("node", "outcome", "log_index"): "outcome IS NOT NULL",
    ("node", "recheck", "recheck_index"): "recheck IS NOT NULL",
    ("recheck",): "recheck IS NOT NULL",
}


def upgrade() -> None:
    for columns, condition in _INDEXES.items():
        _replace(columns, sa.text(condition))


def downgrade() -> None:
    for columns in _INDEXES:
        _replace(columns, None)


def _replace(columns: tuple[str, ...], where: sa.TextClause | None) -> None:
    name = f"ix_submissions_{'_'.join(columns)}"
    op.drop_index(name, "submissions")
    op.create_index(name, "submissions", list(columns), sqlite_where=where, postgresql_where=where)
