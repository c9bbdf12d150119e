"""A run's data folder, database and blob store, shared by the operator's processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import BadConfiguration, OlderDatabase, OtherRelease
from coordinator.run.chat import as_begun, changed_keys
from coordinator.run.history import KeptHistory
from coordinator.storage import locks, log
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Connection, Database, sqlite_url, without_password
from coordinator.storage.facts import BLOBS, PUBLIC_KEY, SPEC, add_facts, read_facts
from coordinator.storage.faults import DatabaseAway
from coordinator.storage.open_blobs import open_blobs
from coordinator.storage.schema_check import outdated_revision, schema_difference, unknown_revision
from node.datasets.folder import DATASETS, find_datasets
from node.protocol.messages import RunEntry
from node.protocol.run import RunSpec, run_id_of
from shardcast.errors import Malformed
from shardcast.wire import decode, encode

logger = logging.getLogger(__name__)

MAX_SPEC_BYTES = 256 * 1024
_POLL_SECONDS = 0.2
DATABASE_URL_FILE = "database"
"""File in the data folder with the URL, without password, of an external database."""


@dataclass(frozen=True)
class Home:
    """A run's key, rules and storage."""

    public_key: bytes
    spec: RunSpec
    database: Database
    blobs: BlobStore
    folder: Path

    @property
    def run_id(self) -> str:
        """The run id, a digest of the public key."""
        return run_id_of(self.public_key)

    @property
    def datasets(self) -> dict[str, Path]:
        """The files that every node has, as far as they are in the data folder, by digest; not verified."""
        return find_datasets(self.folder / DATASETS, self.spec.files)

    @property
    def dataset_files(self) -> dict[str, Path]:
        """As `datasets`, and the files of answers, which go to nobody else."""
        return find_datasets(self.folder / DATASETS, self.spec.dataset_files)


def create_home(
    folder: Path,
    *,
    public_key: bytes,
    spec: RunSpec,
    database_url: str | None = None,
    blobs_url: str | None = None,
    wait_seconds: float = 0.0,
    before_first: Callable[[RunSpec], RunSpec] = lambda spec: spec,
) -> Home:
    """Open the run's home, creating it on the first start; wait for the database up to `wait_seconds`.

    The first start fixes the spec, as the log's first entry, and the blob store, which later starts may leave out;
    `before_first` is called before, may raise to begin no run, and returns the spec with data in the place of names.
    Raises BadConfiguration if the home is another run's or the spec or store has changed, OtherRelease if this one
    cannot read it, HistoryLost if the log does not continue the checkpoint that is kept in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    database = _database(folder, database_url)
    try:
        _wait_for(database, seconds=wait_seconds)
        with database.read() as connection:
            known = read_facts(connection)
        if known:
            check_release(database, folder, unknown_revision)
        spec = as_begun(spec, _recorded(known, folder)) if known else before_first(spec)
        _migrate(database)
        check_release(database, folder, schema_difference)
        blobs = _initialise(database, folder, public_key=public_key, spec=spec, blobs_url=blobs_url)
    except BaseException:
        database.close()
        raise
    if database_url is not None:
        (folder / DATABASE_URL_FILE).write_text(without_password(database_url))
    return Home(public_key=public_key, spec=spec, database=database, blobs=blobs, folder=folder)


def _migrate(database: Database) -> None:
    """Migrate the database, and say so where it holds a run: of a large one that takes a while."""
    with database.read() as connection:
        outdated = outdated_revision(connection)
    if outdated is not None:
        logger.info("migrating: %s", outdated)
    database.migrate()
    if outdated is not None:
        logger.info("the database is migrated")


def _initialise(
    database: Database, folder: Path, *, public_key: bytes, spec: RunSpec, blobs_url: str | None
) -> BlobStore:
    """Record the run, or check that the recorded one is this one; return its blob store."""
    text = encode(spec)
    decode(RunSpec, text, max_bytes=MAX_SPEC_BYTES)  # nodes could not read a larger one
    run_id = run_id_of(public_key)
    with database.read() as connection:
        known = read_facts(connection)
        store = _store_url(known, given=blobs_url)
    blobs = open_blobs(store or None, folder, create=not known)
    blobs.begin(text)  # before the run is recorded: its store must accept writes
    with database.write() as connection:
        locks.exclusive(connection)
        known = read_facts(connection)
        if known.get(PUBLIC_KEY, public_key.hex()) == public_key.hex():
            KeptHistory(folder, run_id=run_id, signer=public_key).check(connection)
        if not known:
            add_facts(connection, {PUBLIC_KEY: public_key.hex(), SPEC: text.decode(), BLOBS: store})
            log.append(connection, RunEntry(run_id=run_id, spec_digest=spec.digest))
        elif known[PUBLIC_KEY] != public_key.hex():
            raise BadConfiguration(f"{folder} holds the run of another key; give another --data, or that key")
        elif known[SPEC].encode() != text:
            raise BadConfiguration(
                f"run.toml differs from the one that the run in {folder} was started with: "
                f"{'; '.join(changed_keys(spec, _recorded(known, folder)))}. Give the old file, or another --data and "
                "a new key for a new run"
            )
    return blobs


def _database(folder: Path, url: str | None) -> Database:
    """Open the database; raises BadConfiguration without a URL if the run uses an external one."""
    url_file = folder / DATABASE_URL_FILE
    if url is None and url_file.exists():
        raise BadConfiguration(f"the run in {folder} is in another database: --database-url {url_file.read_text()}")
    return Database(url or sqlite_url(folder))


def _wait_for(database: Database, *, seconds: float) -> None:
    """Wait until the database can be read; raises BadConfiguration after `seconds`."""
    deadline, logged = time.monotonic() + seconds, False
    while True:
        try:
            with database.read():
                return
        except DatabaseAway as error:
            if time.monotonic() >= deadline:
                raise BadConfiguration(f"--database-url cannot be reached: {error.orig}") from error
            if not logged:
                logger.info("waiting up to %.0f s for the database: %s", seconds, error.orig)
                logged = True
        time.sleep(_POLL_SECONDS)


def open_home(folder: Path, *, database_url: str | None = None, wait_seconds: float = 0.0) -> Home:
    """Open a home that the coordinator created, waiting for it up to `wait_seconds`.

    Raises BadConfiguration, and OtherRelease where this one cannot read it.
    """
    deadline, logged = time.monotonic() + wait_seconds, False
    if database_url is not None:
        with closing(Database(database_url)) as database:
            _wait_for(database, seconds=wait_seconds)
    while True:
        home = find_home(folder, database_url)
        if home is not None:
            return home
        if time.monotonic() >= deadline:
            raise BadConfiguration(f"no run in {folder}; start `swarmproof coordinator` with this --data first")
        if not logged:
            logger.info("waiting up to %.0f s for a coordinator to start the run in %s", wait_seconds, folder)
            logged = True
        time.sleep(_POLL_SECONDS)


def find_home(folder: Path, database_url: str | None) -> Home | None:
    """Open the home in `folder` if there is one; creates nothing.

    Raises BadConfiguration, DatabaseAway, and OtherRelease where this one cannot read it.
    """
    if (
        database_url is None
        and not (folder / DATABASE_URL_FILE).exists()
        and not (folder / "swarmproof.sqlite3").exists()
    ):
        return None
    database = _database(folder, database_url)
    with database.read() as connection:
        known = read_facts(connection)
    if not known:
        database.close()
        return None
    try:
        spec = _recorded(known, folder)  # first: a coordinator migrates no run whose rules it cannot read
        check_release(database, folder, schema_difference)
    except OtherRelease:
        database.close()
        raise
    return Home(
        public_key=bytes.fromhex(known[PUBLIC_KEY]),
        spec=spec,
        database=database,
        blobs=open_blobs(_store_url(known, given=None) or None, folder),
        folder=folder,
    )


def check_release(database: Database, folder: Path, check: Callable[[Connection], str | None]) -> None:
    """Raise OtherRelease with what `check` says of the run's database, if anything.

    Of an earlier release's, which a coordinator of this one migrates, it is OlderDatabase.
    """
    with database.read() as connection:
        difference = check(connection)
        outdated = None if difference is None else outdated_revision(connection)
    if outdated is not None:
        raise OlderDatabase(f"the run in {folder} is of an earlier release of swarmproof: {outdated}")
    if difference is not None:
        raise OtherRelease(f"the run in {folder} is of another release of swarmproof: {difference}")


def _recorded(known: dict[str, str], folder: Path) -> RunSpec:
    try:
        return decode(RunSpec, known[SPEC].encode(), max_bytes=MAX_SPEC_BYTES)
    except Malformed as error:
        raise OtherRelease(f"the run in {folder} is of another release of swarmproof: its rules: {error}") from error


def _store_url(known: dict[str, str], *, given: str | None) -> str:
    """Return the URL of the run's blob store, "" for the data folder; raises BadConfiguration if it would change."""
    given = given.rstrip("/") if given else given
    if not known:
        return given or ""
    recorded = known.get(BLOBS, "")
    if given is not None and given != recorded:
        place = recorded or "its data folder"
        raise BadConfiguration(f"the run's blobs are in {place} since it began: leave --blobs out")
    return recorded
