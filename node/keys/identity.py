"""A node's identity: one Ed25519 key (RFC 8032) in a file that only its owner can read.

The file holds the 32-byte seed in hexadecimal and a newline. A node's id is its public key in hexadecimal; a
run's id is a digest of the run's public key (`node.protocol.run.run_id_of`).
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.errors import IdentityError
from shardcast.files import sync_folder

_MAX_FILE_BYTES = 128
_SEED = re.compile(rb"([0-9a-f]{64})\n?")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_OF_A_CREDENTIAL = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO
"""The service reads it through an ACL, whose mask appears as the group's permissions."""


def load_or_create_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in `path`, created if missing; raises IdentityError."""
    try:
        return load_key(path)
    except IdentityError as error:
        if error.code != "key_missing":
            raise
    try:
        return create_key(path)
    except IdentityError as error:
        if error.code != "key_exists":
            raise
    return load_key(path)


def create_key(path: Path) -> Ed25519PrivateKey:
    """Create a key in `path` as `write_key` does, and return it."""
    key = Ed25519PrivateKey.generate()
    write_key(path, key)
    return key


def write_key(path: Path, key: Ed25519PrivateKey) -> None:
    """Write `key` to `path`, mode 0600, atomically; raises IdentityError, `key_exists` if there is one already."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_private(temporary, key.private_bytes_raw().hex().encode() + b"\n")
            _link_new(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise IdentityError(f"The key file {path} could not be made: {error.strerror}.", code="key_path") from error


def check_absent(path: Path) -> None:
    """Raise IdentityError, `key_exists`, if `path` exists."""
    if os.path.lexists(path):
        raise _exists(path)


def load_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in `path`; raises IdentityError, `key_missing` if there is no such file."""
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(_read_private(path).decode()))


def node_id(key: Ed25519PrivateKey) -> str:
    """Return the node's id: its public key in hexadecimal."""
    return key.public_key().public_bytes_raw().hex()


def _is_credential(path: Path) -> bool:
    """Return whether systemd handed the file to this service alone (LoadCredential=)."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return folder is not None and path.parent == Path(folder)


def write_private(path: Path, data: bytes) -> None:
    """Create `path` with mode 0600 and sync it to disk; raises OSError, also if it exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link_new(temporary: Path, path: Path) -> None:
    try:
        path.hardlink_to(temporary)
    except FileExistsError as error:
        raise _exists(path) from error


def _exists(path: Path) -> IdentityError:
    return IdentityError(f"{path} exists already; a key is never replaced, name another file.", code="key_exists")


def _read_private(path: Path) -> bytes:
    """Return the content of a regular file without access for others; raises IdentityError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise IdentityError(
            f"There is no key file {path}; make one with: swarmproof keys new {path}", code="key_missing"
        ) from error
    except OSError as error:
        raise IdentityError(f"The key file {path} cannot be read: {error.strerror}.", code="key_path") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise IdentityError(f"{path} is not a file; name the key file.", code="not_a_key")
        match = _SEED.fullmatch(os.read(descriptor, _MAX_FILE_BYTES + 1))
        if match is None:  # said before its rights: nobody is to change those of another program's file
            raise IdentityError(
                f"{path} is not a key file (64 hexadecimal digits); restore it from a backup, or name another.",
                code="not_a_key",
            )
        if mode & (_OTHERS_OF_A_CREDENTIAL if _is_credential(path) else _OTHERS):
            raise IdentityError(
                f"Other users can read or change the key file {path}; run: chmod 600 {path}", code="key_exposed"
            )
        return match[1]
    finally:
        os.close(descriptor)
