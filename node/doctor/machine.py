"""Checks of this machine's resources: memory, disk, shared memory, open files, key file and port.

Needs are lower bounds: a machine with less cannot work, one with more may still be slow.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from node.doctor.policy import Footprint
from node.doctor.report import Check, fine, problem, size, warning
from node.errors import IdentityError
from node.keys.identity import load_key

LEAST_BYTES: Final = {"torch": 500_000_000, "vllm": 1_600_000_000}
"""An engine's processes without a policy, measured with torch 2.13 and vLLM 0.32 on a CPU."""
COPIES: Final = {"torch": 2, "vllm": 1}
"""Of the weights: torch loads the next policy beside the one in use, vLLM over it."""
LEAST_DISK_BYTES: Final = 1_000_000_000
LEAST_SHARED_BYTES: Final = 251_658_260
"""The larger of the two queues between vLLM's processes: it refuses to start with less free, though it fills little."""
SWAP_BYTES: Final = 256 * 1024 * 1024
LEAST_FILES, ENOUGH_FILES = 256, 1024


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be used without swapping; a container's limit counts (cgroup v2)."""
    free: int = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
        # The inactive page cache counts as used, but is reclaimable.
        reclaimable = int(dict(line.split() for line in lines)["inactive_file"])
        free = min(free, max(0, limit - used + reclaimable))
    return free


def check_memory(need: int, *, free: int, what: str) -> Check:
    """Check that `need` bytes of memory are free for `what`."""
    said = f"{size(free)} of memory are free, and {what} takes {size(need)} at least."
    if free < need:
        return problem("memory", said, advice="Close other programs, or use a machine with more memory.")
    return fine("memory", said)


def memory_needed(engine: str, footprint: Footprint | None, *, tokens: int, dtype_bytes: int | None) -> int:
    """Return the bytes for the engine's processes, its weights and the keys and values of one sequence."""
    if footprint is None:
        return LEAST_BYTES[engine]
    weights = COPIES[engine] * footprint.weight_bytes(dtype_bytes)
    return LEAST_BYTES[engine] + weights + footprint.sequence_bytes(tokens, dtype_bytes)


def check_gpu_memory(need: int, *, free: int) -> Check:
    """Check that weights and one sequence fit into the GPU with most memory free."""
    said = f"{size(free)} of GPU memory are free; weights and one sequence take {size(need)}."
    if free < need:
        return problem("gpu_memory", said, advice="Close what else uses the GPU (nvidia-smi), or use a larger one.")
    return fine("gpu_memory", said)


def check_swap(used: int) -> Check:
    """Check that little swap is in use: a swapping worker misses its leases."""
    if used > SWAP_BYTES:
        said = f"{size(used)} of swap are in use: this machine is short of memory, and slow."
        return warning("swap", said, advice="Close other programs, or lease fewer slots (--slots).")
    return fine("swap", f"{size(used)} of swap are in use.")


def check_shared_memory(free: int | None, *, need: int, certain: bool) -> Check:
    """Check /dev/shm for vLLM's processes; `certain` if they always use it."""
    if free is None:
        return warning("shared_memory", "There is no /dev/shm.", advice="Mount a tmpfs there; vLLM's processes use it.")
    said = f"Of shared memory (/dev/shm) {size(free)} are free; vLLM's processes want {size(need)}."
    if free < need:
        blame = problem if certain else warning
        return blame(
            "shared_memory", said, advice="In a container: start it with --shm-size=1g. Else mount a larger /dev/shm."
        )
    return fine("shared_memory", said)


def free_shared_memory() -> int | None:
    """Return the bytes free in /dev/shm, None if there is none."""
    folder = Path("/dev/shm")  # noqa: S108  (looked at, not written to)
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def check_disk(state: Path, *, need: int, what: str) -> Check:
    """Check that the state folder (or its nearest existing parent) is writable with `need` bytes free."""
    folder = next(path for path in (state.absolute(), *state.absolute().parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        said = f"{folder} is no folder that you can write to."
        return problem("disk", said, advice="Name another folder with --state.")
    free = shutil.disk_usage(folder).free
    said = f"{size(free)} of disk are free under {folder}; {what} takes {size(need)}."
    if free < need:
        return problem("disk", said, advice="Make room, or name a folder on another disk with --state.")
    return fine("disk", said)


def check_open_files(soft: int | None = None) -> Check:
    """Check that a process may hold enough files and connections open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if soft is None else soft
    if limit == resource.RLIM_INFINITY or limit >= ENOUGH_FILES:
        return fine("open_files", "A process may hold enough files open.")
    blame = problem if limit < LEAST_FILES else warning
    said = f"A process may hold {limit} files and connections open; {ENOUGH_FILES} are enough."
    return blame("open_files", said, advice="Run ulimit -Sn 4096 first, or set LimitNOFILE=4096:65536 in its unit.")


def check_key(path: Path) -> Check:
    """Check that the key file is valid, and that only its owner can read or replace it."""
    try:
        load_key(path)
    except IdentityError as error:
        if error.code == "key_missing":
            return fine("key", f"There is no key {path} yet; the first start makes it.")
        said, advice = _KEY_FAULTS[error.code]
        return problem("key", said.format(path), advice=advice.format(path))
    mode = path.parent.stat().st_mode
    if mode & 0o022 and not mode & 0o1000:
        said = f"Other users can replace the key: they may write to {path.parent}."
        return warning("key", said, advice=f"Run chmod go-w {path.parent}")
    return fine("key", f"The key {path} is its owner's alone.")


_KEY_FAULTS: Final = {
    "key_exposed": ("Other users can read or change the key {}.", "Run chmod 600 {}; make a new key if they did."),
    "not_a_key": ("{} is no key file.", "Restore it from a backup, or name another with --key."),
    "key_path": ("The key {} cannot be read.", "Look at its owner and at the folders above it."),
}


@dataclass(frozen=True, slots=True)
class Occupant:
    """The process that listens on a port; None for unknown."""

    pid: int | None
    name: str | None

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})" if self.name else "another process"


def check_port(host: str, port: int) -> Check:
    """Check that a relay could listen at `host`:`port`."""
    try:
        _bind(host, port)
    except PermissionError:
        said = f"Port {port} is reserved for the system."
        return problem("port", said, advice="Choose one above 1023 with --port.")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            said = f"Port {port} of {host} is in use by {occupant(port)}."
            return problem("port", said, advice="Stop it, or choose another with --port.")
        said = f"Nothing can listen at {host}: {(error.strerror or str(error)).lower()}."
        return problem("port", said, advice="Give an address of this machine with --host, or 0.0.0.0 for all.")
    return fine("port", f"Port {port} of {host} is free.")


def _bind(host: str, port: int) -> None:
    """Bind and listen as the relay does, then close."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(1)


def occupant(port: int) -> Occupant:
    """Return the process that listens on `port`; those of other users stay unknown."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            # An address is (host, port); psutil's own type allows an empty one.
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return Occupant(connection.pid, psutil.Process(connection.pid).name())
    return Occupant(None, None)
