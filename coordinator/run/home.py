"""A run's home on the operator's side: the data folder with the database, the blobs and the run's facts."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import BadConfiguration
from coordinator.storage import locks, log
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database, sqlite_url, without_password
from coordinator.storage.facts import BLOBS, PUBLIC_KEY, SPEC, add_facts, read_facts
from coordinator.storage.faults import DatabaseAway
from coordinator.storage.open_blobs import open_blobs
from node.protocol.messages import RunEntry
from node.protocol.run import RunSpec, run_id_of
from shardcast.wire import decode, encode

logger = logging.getLogger(__name__)

MAX_SPEC_BYTES = 256 * 1024
_POLL_SECONDS = 0.2
ELSEWHERE = "database"
"""A file of the data folder: the URL, without its password, of the database that is not in it."""


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


def create_home(
    folder: Path,
    *,
    public_key: bytes,
    spec: RunSpec,
    database_url: str | None = None,
    blobs_url: str | None = None,
    wait_seconds: float = 0.0,
) -> Home:
    """Open the run's home, making it on the first start; raises BadConfiguration if it is another run's.

    A database that is still starting is waited for up to `wait_seconds`.

    The spec is fixed by the log's first entry: a changed run.toml is refused, not applied. So is the store of blobs,
    by the first start; later ones need not name it, and the other processes find it in the database.
    """
    folder.mkdir(parents=True, exist_ok=True)
    database = _database(folder, database_url)
    try:
        _wait_for(database, seconds=wait_seconds)
        database.migrate()
        blobs = _begin(database, folder, public_key=public_key, spec=spec, blobs_url=blobs_url)
    except BaseException:
        database.close()
        raise
    if database_url is not None:
        (folder / ELSEWHERE).write_text(without_password(database_url))
    return Home(public_key=public_key, spec=spec, database=database, blobs=blobs, folder=folder)


def _begin(database: Database, folder: Path, *, public_key: bytes, spec: RunSpec, blobs_url: str | None) -> BlobStore:
    """Begin the run, or see that it is this one; where its blobs are."""
    text = encode(spec)
    decode(RunSpec, text, max_bytes=MAX_SPEC_BYTES)  # what nodes could not read must not start a run
    run_id = run_id_of(public_key)
    with database.read() as connection:
        store = _store_url(read_facts(connection), given=blobs_url)
    blobs = open_blobs(store or None, folder)
    blobs.begin(text)  # a run whose store takes nothing must not be begun
    with database.write() as connection:
        locks.alone(connection)
        known = read_facts(connection)
        if not known:
            add_facts(connection, {PUBLIC_KEY: public_key.hex(), SPEC: text.decode(), BLOBS: store})
            log.append(connection, RunEntry(run_id=run_id, spec_digest=spec.digest))
        elif known[PUBLIC_KEY] != public_key.hex():
            raise BadConfiguration(f"{folder} holds the run of another key; give another --data, or that key")
        elif known[SPEC].encode() != text:
            raise BadConfiguration(
                f"run.toml differs from the one that the run in {folder} was started with; give the old file, or "
                "another --data and a new key for a new run"
            )
    return blobs


def _database(folder: Path, url: str | None) -> Database:
    """Raises BadConfiguration for a process that was not told where the run is: it would begin another one here."""
    elsewhere = folder / ELSEWHERE
    if url is None and elsewhere.exists():
        raise BadConfiguration(f"the run in {folder} is in another database: --database-url {elsewhere.read_text()}")
    return Database(url or sqlite_url(folder))


def _wait_for(database: Database, *, seconds: float) -> None:
    """Raises BadConfiguration for a database that nobody reaches for so long."""
    deadline, said = time.monotonic() + seconds, False
    while True:
        try:
            with database.read():
                return
        except DatabaseAway as error:
            if time.monotonic() >= deadline:
                raise BadConfiguration(f"--database-url cannot be reached: {error.orig}") from error
            if not said:
                logger.info("waiting for the database")
                said = True
        time.sleep(_POLL_SECONDS)


def open_home(folder: Path, *, database_url: str | None = None, wait_seconds: float = 0.0) -> Home:
    """Open a home that the coordinator made, waiting for it up to `wait_seconds`; raises BadConfiguration."""
    deadline = time.monotonic() + wait_seconds
    said = False
    if database_url is not None:
        with closing(Database(database_url)) as database:
            _wait_for(database, seconds=wait_seconds)
    while True:
        home = _try_open(folder, database_url)
        if home is not None:
            return home
        if time.monotonic() >= deadline:
            raise BadConfiguration(f"no run in {folder}; start `swarmproof coordinator` with this --data first")
        if not said:
            logger.info("waiting for a run in %s", folder)
            said = True
        time.sleep(_POLL_SECONDS)


def _try_open(folder: Path, database_url: str | None) -> Home | None:
    if database_url is None and not (folder / ELSEWHERE).exists() and not (folder / "swarmproof.sqlite3").exists():
        return None
    database = _database(folder, database_url)
    with database.read() as connection:
        known = read_facts(connection)
    if not known:
        database.close()
        return None
    spec = decode(RunSpec, known[SPEC].encode(), max_bytes=MAX_SPEC_BYTES)
    return Home(
        public_key=bytes.fromhex(known[PUBLIC_KEY]),
        spec=spec,
        database=database,
        blobs=open_blobs(_store_url(known, given=None) or None, folder),
        folder=folder,
    )


def _store_url(known: dict[str, str], *, given: str | None) -> str:
    """Where the blobs of a run are, "" for its folder. A run does not move: half of its evidence would stay behind."""
    given = given.rstrip("/") if given else given
    if not known:
        return given or ""
    begun = known.get(BLOBS, "")
    if given is not None and given != begun:
        raise BadConfiguration(f"the run's blobs are in {begun or 'its data folder'} since it began: leave --blobs out")
    return begun
