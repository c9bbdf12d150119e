"""Manifest of a backup, and the digests of its files."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Annotated, Final, Literal, cast

from blake3 import blake3
from msgspec import UNSET, Meta, UnsetType, structs

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
MAX_DATASETS: Final = 1000

Name = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,62}\Z")]
"""Name of a table or column; cannot escape a folder."""

_NO_CHECKSUM: Final = "0" * 64


class BackupError(CoordinatorError):
    """A backup is damaged, or cannot be restored here; nothing was changed."""

    code = "bad_backup"


class TableFile(Wire, frozen=True):
    """File of one table: the columns of each row, and size and BLAKE3 of the compressed file."""

    name: Name
    columns: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=256)]
    rows: Count
    size_bytes: Count
    digest: Digest


class BackupManifest(Wire, frozen=True):
    """Content of a backup: its run, size and Merkle root of the log (hexadecimal), and its files.

    `revision` is the schema's, `made_at` the snapshot's time in Unix seconds. `missing` lists blobs absent from the
    run's own store. `datasets` lists those that the backup holds; UNSET for none.
    `checksum` is the BLAKE3 of the manifest with 64 zeros in its place.
    """

    format: Literal["swarmproof backup/1"]
    software: Text
    revision: Annotated[str, Meta(pattern=r"^[0-9a-z_]{1,32}\Z")]
    run_id: Digest
    log_size: Count
    log_root: Digest
    made_at: Count
    generation: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    tables: Annotated[tuple[TableFile, ...], Meta(max_length=64)]
    missing: Annotated[tuple[Digest, ...], Meta(max_length=MAX_MISSING)]
    datasets: Annotated[tuple[Digest, ...], Meta(max_length=MAX_DATASETS)] | UnsetType = UNSET
    checksum: Digest = _NO_CHECKSUM


def write_manifest(folder: Path, manifest: BackupManifest) -> BackupManifest:
    """Write the manifest with its checksum and return it."""
    whole = structs.replace(manifest, checksum=_checksum(manifest))
    write_atomically(folder / MANIFEST, encode(whole))
    return whole


def read_manifest(folder: Path) -> BackupManifest:
    """Read the manifest of the backup in `folder`; raises BackupError."""
    path = folder / MANIFEST
    try:
        manifest = decode(
            BackupManifest, read_bounded(path, max_bytes=MAX_MANIFEST_BYTES), max_bytes=MAX_MANIFEST_BYTES
        )
    except FileNotFoundError as error:
        raise BackupError(f"{folder} holds no complete backup: {MANIFEST} is missing") from error
    except Malformed as error:
        raise BackupError(f"{path} is damaged, or of another release: {error}") from error
    if manifest.checksum != _checksum(manifest):
        raise BackupError(f"{path} is damaged: its checksum does not match")
    return manifest


def table_path(folder: Path, generation: str, table: str) -> Path:
    """Return the path of a table's rows in the backup in `folder`."""
    return folder / TABLES / generation / f"{table}.jsonl.zst"


def blob_path(folder: Path, name: str) -> Path:
    """Return the path of blob `name` (a digest) in the backup in `folder`."""
    return folder / BLOBS / name[:2] / name


def _checksum(manifest: BackupManifest) -> str:
    return digest(encode(structs.replace(manifest, checksum=_NO_CHECKSUM)))


class HashingFile:
    """File wrapper that hashes and counts the bytes read or written through it, in one direction."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hasher = file, blake3()
        self.size_bytes = 0

    @property
    def digest(self) -> str:
        """BLAKE3 of the bytes so far."""
        return self._hasher.hexdigest()

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes; all with -1."""
        return self._update(self._file.read(size))

    def write(self, data: bytes) -> int:
        """Write all of `data`; return its length."""
        self._file.write(self._update(bytes(data)))
        return len(data)

    def as_file(self) -> IO[bytes]:
        """Return this object typed as a file, for users that only read or only write."""
        return cast("IO[bytes]", self)

    def _update(self, data: bytes) -> bytes:
        self._hasher.update(data)
        self.size_bytes += len(data)
        return data
