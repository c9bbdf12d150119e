"""Signed descriptors, stored so that no version is signed twice."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, insert, select

from coordinator.storage.schema import descriptors

KEPT = 100


@dataclass(frozen=True, slots=True)
class StoredDescriptor:
    """A signed version; `content` holds the issuer's digests of what it says."""

    version: int
    content: str
    envelope: bytes
    issued_at: float


def newest_descriptor(connection: Connection) -> StoredDescriptor | None:
    """Return the newest version, None before the first."""
    row = connection.execute(select(descriptors).order_by(descriptors.c.version.desc()).limit(1)).first()
    return None if row is None else StoredDescriptor(row.version, row.content, bytes(row.envelope), row.issued_at)


def add_descriptor(connection: Connection, issued: StoredDescriptor) -> None:
    """Store a new version and delete all but the newest KEPT."""
    connection.execute(insert(descriptors).values(asdict(issued)))
    kept = select(descriptors.c.version).order_by(descriptors.c.version.desc()).offset(KEPT).limit(1)
    oldest = connection.execute(kept).scalar()
    connection.execute(delete(descriptors).where(descriptors.c.version <= (-1 if oldest is None else oldest)))
