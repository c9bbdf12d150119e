"""Which machine a worker is: so that one key at work on two of them is seen, and named.

An instance is a state folder on a machine. The folder's secret is made once and kept, so a restart is the same
instance; a copy of the folder on another machine is another one, as long as the two differ in machine id or host name.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.client.http import printable
from node.errors import StateError
from shardcast.files import sync_folder
from shardcast.wire import derive

MAX_NAME: Final = 64
_SECRET_BYTES: Final = 32
_CONTEXT: Final = "swarmproof/1 instance"
_MACHINE_ID: Final = Path("/etc/machine-id")


@dataclass(frozen=True, slots=True)
class Instance:
    """What a worker says of itself: 32 hexadecimal digits that nobody else has, and what people call its machine."""

    id: str
    name: str


def instance_of(folder: Path, *, machine_id: Path = _MACHINE_ID) -> Instance:
    """Return the instance that works in the state folder `folder`, its secret made if missing. Raises StateError.

    What is sent tells nothing of the machine id (machine-id(5) asks for that): it is derived under the secret.
    """
    host = socket.gethostname()
    derived = derive(_CONTEXT, _secret(folder / "instance"), _read(machine_id), host.encode("utf-8", "surrogateescape"))
    return Instance(id=derived.hex()[:32], name=printable(host)[:MAX_NAME])


def _secret(path: Path) -> bytes:
    """Return the secret, made if missing; the folder is locked, so nobody else makes it at the same time."""
    try:
        if not path.exists():
            _make(path)
        secret = path.read_bytes()[: _SECRET_BYTES + 1]
    except OSError as error:
        raise StateError(f"{path} cannot be used: {error.strerror}.") from error
    if len(secret) != _SECRET_BYTES:
        raise StateError(f"{path} is damaged; remove it, and it is made anew.", code="damaged_state")
    return secret


def _make(path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path.parent)


def _read(machine_id: Path) -> bytes:
    """Return the file's content; b"" where there is none or it may not be read."""
    try:
        return machine_id.read_bytes().strip()
    except OSError:
        return b""
