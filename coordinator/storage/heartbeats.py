"""Who of the operator's processes was there last, and when: what tells a run that works from one that has stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from coordinator.storage.schema import heartbeats

FORGET_SECONDS: Final = 7 * 24 * 3600.0
_INSERT: Final[Mapping[str, Any]] = MappingProxyType({"sqlite": sqlite.insert, "postgresql": postgresql.insert})


class Role(StrEnum):
    """A part of the operator's without which a run comes to a halt, or to disorder."""

    TRAINER = "trainer"
    VERIFIER = "verifier"
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last sign of life of one process, in Unix seconds, and what it waited for then: a code of `trouble_of`."""

    role: Role
    name: str
    seen_at: float
    trouble: str = ""


def beat(connection: Connection, role: Role, name: str, *, now: float, trouble: str = "") -> None:
    """Note that the process `name` is there, and what it waits for; forgets those that have been away for a week."""
    values = {"role": role.value, "name": name, "seen_at": now, "trouble": trouble}
    added: Any = _INSERT[connection.dialect.name](heartbeats).values(values)
    key, newer = list(heartbeats.primary_key), {one: added.excluded[one] for one in ("seen_at", "trouble")}
    connection.execute(added.on_conflict_do_update(index_elements=key, set_=newer))
    connection.execute(delete(heartbeats).where(heartbeats.c.seen_at < now - FORGET_SECONDS))


def last_beat(connection: Connection, role: Role, name: str) -> float | None:
    """Return when the process `name` last gave a sign of life, None if it never did."""
    row = select(heartbeats.c.seen_at).where(heartbeats.c.role == role.value, heartbeats.c.name == name)
    return connection.execute(row).scalar()


def read_heartbeats(connection: Connection) -> list[Heartbeat]:
    """Return the last sign of life of every process, the newest first."""
    rows = connection.execute(select(heartbeats).order_by(heartbeats.c.seen_at.desc()))
    return [Heartbeat(Role(row.role), row.name, row.seen_at, row.trouble) for row in rows]
