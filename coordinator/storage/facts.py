"""Facts about the run that every process shares, as text by name: its key, its spec, its blob store.

The digest of its teacher's file is one as well: no log entry names what only the trainer reads. So is the URL of the
trainer's origin, from which nodes fetch where there is no relay.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, insert, select, update

from coordinator.storage.schema import facts
from node.protocol.run import run_id_of

FACTS = facts.name
PUBLIC_KEY, SPEC, BLOBS = "public_key", "spec", "blobs"
TEACHER_DIGEST = "teacher_digest"
ORIGIN = "origin"


def read_facts(connection: Connection) -> dict[str, str]:
    """Return all facts by name; none before the run's first start."""
    if not connection.dialect.has_table(connection, facts.name):
        return {}
    return {row.name: row.value for row in connection.execute(select(facts.c.name, facts.c.value))}


def add_facts(connection: Connection, known: Mapping[str, str]) -> None:
    """Insert facts; raises IntegrityError for one that exists."""
    connection.execute(insert(facts), [{"name": name, "value": value} for name, value in known.items()])


def read_run_id(connection: Connection) -> str:
    """Return the run's id."""
    key: str = connection.execute(select(facts.c.value).where(facts.c.name == PUBLIC_KEY)).scalar_one()
    return run_id_of(bytes.fromhex(key))


def read_fact(connection: Connection, name: str) -> str | None:
    """Return one fact, None if it is not known."""
    found: str | None = connection.execute(select(facts.c.value).where(facts.c.name == name)).scalar()
    return found


def put_fact(connection: Connection, name: str, value: str) -> None:
    """Insert or replace one fact."""
    if connection.execute(update(facts).where(facts.c.name == name).values(value=value)).rowcount == 0:
        add_facts(connection, {name: value})
