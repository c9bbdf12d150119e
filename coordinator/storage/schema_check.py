"""Whether a database has the tables and columns of this release.

Before the first release the schema changes without a migration, so that the recorded revision alone does not tell.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect

from coordinator.storage.schema import metadata
from coordinator.storage.whole_tables import known_revisions, newest_revision, revision


def unknown_revision(connection: Connection) -> str | None:
    """Return, as a clause, that this release cannot migrate the database; None if it can."""
    recorded = revision(connection)
    return None if recorded in known_revisions() else f"its database has the schema {recorded}"


def outdated_revision(connection: Connection) -> str | None:
    """Return, as a clause, that a coordinator of this release would migrate the database; None if there is nothing to
    migrate, or no way to.
    """
    recorded, newest = revision(connection), newest_revision()
    is_older = recorded != newest and recorded in known_revisions()
    return f"its database has the schema {recorded}, and this release's is {newest}" if is_older else None


def schema_difference(connection: Connection) -> str | None:
    """Return what keeps this release from using the database, as a clause such as "its database has no table gaps";
    None if nothing does. Columns that it does not know and that may stay empty are no matter.
    """
    if (other := unknown_revision(connection) or outdated_revision(connection)) is not None:
        return other
    found = inspect(connection)
    present = set(found.get_table_names())
    for table in metadata.sorted_tables:
        if table.name not in present:
            return f"its database has no table {table.name}"
        columns = {each["name"]: each for each in found.get_columns(table.name)}
        for column in table.columns:
            if column.name not in columns:
                return f"its database's table {table.name} has no column {column.name}"
        for name, each in columns.items():
            if name not in table.columns and not each["nullable"] and each["default"] is None:
                return f"its database's table {table.name} has a column {name}"
    return None
