"""Index only the leases that are active, or ended in vain, where only these are looked for.

Each that was issued and each that was used wrote a page of the index by node, another one for nearly every lease.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_Indexes = Mapping[tuple[str, ...], str | None]
"""Conditions by columns."""

_BEFORE: _Indexes = {("node", "state"): None, ("ended_at",): None}
_AFTER: _Indexes = {("node",): "state = 'active'", ("ended_at",): "ended_at IS NOT NULL"}


def upgrade() -> None:
    _replace(_BEFORE, _AFTER)


def downgrade() -> None:
    _replace(_AFTER, _BEFORE)


def _replace(old: _Indexes, new: _Indexes) -> None:
    # The first step makes the tables as schema.py has them, so that the new ones may be there.
    for columns in {**old, **new}:
        op.drop_index(_name(columns), "leases", if_exists=True)
    for columns, condition in new.items():
        where = None if condition is None else sa.text(condition)
        op.create_index(_name(columns), "leases", list(columns), sqlite_where=where, postgresql_where=where)


def _name(columns: tuple[str, ...]) -> str:
    return f"ix_leases_{'_'.join(columns)}"
