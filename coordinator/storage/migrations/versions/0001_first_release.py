"""Create the schema of the first release, as `coordinator.storage.schema` has it until then.

Nothing is released yet, so no database has to be taken from one schema to another. The first release replaces
`create_all` by the tables as they are then, because a later schema.py must not change what this step makes.
"""

from __future__ import annotations

from alembic import op

from coordinator.storage.schema import metadata

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


_LATER = ("rejections", "final_counts", "profiles", "newcomers")
"""Tables that later steps make."""
_LATER_COLUMNS = {"submissions": ("envelope",), "heartbeats": ("trouble",)}
"""Columns that later steps add."""


def upgrade() -> None:
    own = [table for table in metadata.sorted_tables if table.name not in _LATER]
    metadata.create_all(op.get_bind(), tables=own)
    for table, columns in _LATER_COLUMNS.items():
        for column in columns:
            op.drop_column(table, column)


def downgrade() -> None:
    metadata.drop_all(op.get_bind())
