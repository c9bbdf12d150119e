"""The manifest of a backup, and the sums of its files."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Annotated, Final, Literal, cast

from blake3 import blake3
from msgspec import Meta, structs

from coordinator.errors import CoordinatorError
from node.protocol.messages import Text
from shardcast.errors import Malformed
from shardcast.files import read_bounded, write_atomically
from shardcast.wire import Count, Digest, Wire, decode, digest, encode

MANIFEST: Final = "manifest.json"
TABLES: Final = "tables"
BLOBS: Final = "blobs"
LOCK: Final = "lock"

MAX_MANIFEST_BYTES: Final = 16 * 1024 * 1024
MAX_MISSING: Final = 100_000

Name = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,62}\Z")]
"""Of a table or a column; nothing that leads out of a folder."""

_NO_CHECKSUM: Final = "0" * 64


class BackupError(CoordinatorError):
    """A backup is damaged, or cannot be restored here; nothing was changed."""

    code = "bad_backup"


class TableFile(Wire, frozen=True):
    """The file of one table: its columns as they are in each row, and size and BLAKE3 of the file as it lies there."""

    name: Name
    columns: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=256)]
    rows: Count
    size_bytes: Count
    digest: Digest


class Manifest(Wire, frozen=True):
    """What a backup is: of which run, at which size and Merkle root of its log (hexadecimal), and its files.

    `revision` is the schema's, `made_at` the time of the snapshot in Unix seconds. `missing` are blobs that the run's
    own store did not have. `checksum` is the BLAKE3 of all this with 64 zeros in its place.
    """

    format: Literal["veriswarm backup/1"]
    software: Text
    revision: Annotated[str, Meta(pattern=r"^[0-9a-z_]{1,32}\Z")]
    run_id: Digest
    log_size: Count
    log_root: Digest
    made_at: Count
    generation: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    tables: Annotated[tuple[TableFile, ...], Meta(max_length=64)]
    missing: Annotated[tuple[Digest, ...], Meta(max_length=MAX_MISSING)]
    checksum: Digest = _NO_CHECKSUM


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Make `manifest` the one of the backup in `folder`, with its checksum, which it is returned with."""
    whole = structs.replace(manifest, checksum=_checksum(manifest))
    write_atomically(folder / MANIFEST, encode(whole))
    return whole


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the backup in `folder`; raises BackupError."""
    path = folder / MANIFEST
    try:
        manifest = decode(Manifest, read_bounded(path, max_bytes=MAX_MANIFEST_BYTES), max_bytes=MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise BackupError(f"{folder} holds no complete backup: there is no {MANIFEST}") from error
    except Malformed as error:
        raise BackupError(f"{path} is damaged, or of another release: {error}") from error
    if manifest.checksum != _checksum(manifest):
        raise BackupError(f"{path} is damaged: its checksum is not that of its content")
    return manifest


def table_path(folder: Path, generation: str, table: str) -> Path:
    """Where the rows of `table` lie in the backup in `folder`."""
    return folder / TABLES / generation / f"{table}.jsonl.zst"


def blob_path(folder: Path, name: str) -> Path:
    """Where blob `name`, which must be a digest, lies in the backup in `folder`."""
    return folder / BLOBS / name[:2] / name


def _checksum(manifest: Manifest) -> str:
    return digest(encode(structs.replace(manifest, checksum=_NO_CHECKSUM)))


class Summed:
    """A file whose bytes are summed up as they pass, in one direction."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hasher = file, blake3()
        self.size_bytes = 0

    @property
    def digest(self) -> str:
        """BLAKE3 of what has passed."""
        return self._hasher.hexdigest()

    def read(self, size: int = -1) -> bytes:
        """As a file's."""
        return self._pass(self._file.read(size))

    def write(self, data: bytes) -> int:
        """As a file's, which takes all of it."""
        self._file.write(self._pass(bytes(data)))
        return len(data)

    def as_file(self) -> IO[bytes]:
        """This, for those who only read it or only write it."""
        return cast("IO[bytes]", self)

    def _pass(self, data: bytes) -> bytes:
        self._hasher.update(data)
        self.size_bytes += len(data)
        return data
