"""Crash-safe file operations."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from shardcast.errors import LocalFault, Malformed

TEMPORARY_SUFFIX = ".tmp"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data` atomically: a crash leaves the old content or the new.

    Raises LocalFault, e.g. with code "disk_full".
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise as_local_fault(error, path) from error


def sync_folder(folder: Path) -> None:
    """Fsync `folder`, so that created and renamed entries are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Fsync the file or folder `path`, so that what is in it is durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; thread-safe."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        if written <= 0:
            raise LocalFault("disk accepted no more bytes: check free space")
        view, offset = view[written:], offset + written


def read_bounded(path: Path, *, max_bytes: int) -> bytes:
    """Read all of `path`; raises Malformed when it is longer than `max_bytes`."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise Malformed(f"{path} is longer than {max_bytes} bytes", code="oversized")
    return data


def as_local_fault(error: OSError, path: Path) -> LocalFault:
    """Convert `error` to a LocalFault that says what to do."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return LocalFault(f"no space left for {path}: free some space, or keep fewer versions", code="disk_full")
    if error.errno == errno.EROFS:
        return LocalFault(f"{path} is on a read-only disk: mount it writable", code="read_only")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return LocalFault(f"{path}: {error.strerror or error}", code="no_access")
    return LocalFault(f"{path}: {error.strerror or error}")


class FolderLock:
    """Exclusive use of a folder by one process; the kernel releases it when the process dies."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "lock").open("wb")
        except OSError as error:
            raise as_local_fault(error, folder) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise LocalFault(f"{folder} is in use by another process", code="in_use") from error

    def release(self) -> None:
        self._file.close()
