"""A run's home on the operator's side: the data folder with the database, the blobs and the run's facts."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, insert, select

from coordinator.errors import BadConfiguration
from coordinator.storage import log
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database, sqlite_url
from coordinator.storage.schema import facts
from node.protocol.messages import RunEntry
from node.protocol.run import RunSpec, run_id_of
from shardcast.wire import decode, encode

logger = logging.getLogger(__name__)

MAX_SPEC_BYTES = 256 * 1024
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Home:
    """What every operator process of a run shares."""

    public_key: bytes
    spec: RunSpec
    database: Database
    blobs: BlobStore
    folder: Path

    @property
    def run_id(self) -> str:
        """The run's id, a digest of its public key."""
        return run_id_of(self.public_key)


def create_home(folder: Path, *, public_key: bytes, spec: RunSpec, database_url: str | None = None) -> Home:
    """Open the run's home, making it on the first start; raises BadConfiguration if it is another run's.

    The spec is fixed by the log's first entry: a changed run.toml is refused, not applied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    database = Database(database_url or sqlite_url(folder))
    database.migrate()
    blobs = BlobStore(folder / "blobs")
    text = encode(spec)
    decode(RunSpec, text, max_bytes=MAX_SPEC_BYTES)  # what nodes could not read must not start a run
    run_id = run_id_of(public_key)
    with database.write() as connection:
        known = _facts(connection)
        if not known:
            connection.execute(
                insert(facts),
                [{"name": "public_key", "value": public_key.hex()}, {"name": "spec", "value": text.decode()}],
            )
            log.append(connection, RunEntry(run_id=run_id, spec_digest=spec.digest))
        elif known["public_key"] != public_key.hex():
            raise BadConfiguration(f"{folder} holds the run of another key; give another --data, or that key")
        elif known["spec"].encode() != text:
            raise BadConfiguration(
                f"run.toml differs from the one that the run in {folder} was started with; give the old file, or "
                "another --data and a new key for a new run"
            )
    blobs.put(text)
    return Home(public_key=public_key, spec=spec, database=database, blobs=blobs, folder=folder)


def open_home(folder: Path, *, database_url: str | None = None, wait_seconds: float = 0.0) -> Home:
    """Open a home that the coordinator made, waiting for it up to `wait_seconds`; raises BadConfiguration."""
    deadline = time.monotonic() + wait_seconds
    said = False
    while True:
        home = _try_open(folder, database_url)
        if home is not None:
            return home
        if time.monotonic() >= deadline:
            raise BadConfiguration(f"no run in {folder}; start `veriswarm coordinator` with this --data first")
        if not said:
            logger.info("waiting for a run in %s", folder)
            said = True
        time.sleep(_POLL_SECONDS)


def _try_open(folder: Path, database_url: str | None) -> Home | None:
    if database_url is None and not (folder / "veriswarm.sqlite3").exists():
        return None
    database = Database(database_url or sqlite_url(folder))
    with database.read() as connection:
        known = _facts(connection) if connection.dialect.has_table(connection, "facts") else {}
    if not known:
        database.close()
        return None
    spec = decode(RunSpec, known["spec"].encode(), max_bytes=MAX_SPEC_BYTES)
    return Home(
        public_key=bytes.fromhex(known["public_key"]),
        spec=spec,
        database=database,
        blobs=BlobStore(folder / "blobs"),
        folder=folder,
    )


def _facts(connection: Connection) -> dict[str, str]:
    rows = connection.execute(select(facts.c.name, facts.c.value))
    return {row.name: row.value for row in rows}
