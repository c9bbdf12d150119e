"""Identity of a worker instance, to detect one key in use on two machines.

An instance is a state folder on a machine: the folder's persistent secret survives restarts, while a copy of the folder
on a machine with another machine id or host name is another instance.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.client.http import printable
from node.errors import StateError
from node.keys.identity import write_private
from shardcast.files import sync_folder
from shardcast.wire import derive

MAX_NAME: Final = 64
_SECRET_BYTES: Final = 32
_CONTEXT: Final = "swarmproof/1 instance"
_MACHINE_ID: Final = Path("/etc/machine-id")


@dataclass(frozen=True, slots=True)
class Instance:
    """A unique id (32 hexadecimal digits) and the machine's host name, printable."""

    id: str
    name: str


def load_instance(folder: Path, *, machine_id: Path = _MACHINE_ID) -> Instance:
    """Return the instance of a state folder, creating its secret if missing; raises StateError.

    The id is derived under the secret, so it does not reveal the machine id (as machine-id(5) asks).
    """
    host = socket.gethostname()
    derived = derive(_CONTEXT, _secret(folder / "instance"), _read(machine_id), host.encode("utf-8", "surrogateescape"))
    return Instance(id=derived.hex()[:32], name=printable(host)[:MAX_NAME])


def _secret(path: Path) -> bytes:
    """Return the secret, created if missing; the folder's lock makes that safe."""
    try:
        if not path.exists():
            temporary = path.with_name(path.name + ".tmp")
            temporary.unlink(missing_ok=True)
            write_private(temporary, secrets.token_bytes(_SECRET_BYTES))
            temporary.rename(path)
            sync_folder(path.parent)
        secret = path.read_bytes()[: _SECRET_BYTES + 1]
    except OSError as error:
        raise StateError(f"{path} cannot be used: {error.strerror}.") from error
    if len(secret) != _SECRET_BYTES:
        raise StateError(f"{path} is damaged; remove it, and it is made anew.", code="damaged_state")
    return secret


def _read(machine_id: Path) -> bytes:
    """Return the file's content; b"" if it is missing or unreadable."""
    try:
        return machine_id.read_bytes().strip()
    except OSError:
        return b""
