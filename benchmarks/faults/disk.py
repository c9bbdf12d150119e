"""A file system that gets full: in memory, seen by this process and its children only, and gone with them.

It gets full as a disk does on which others write: what it holds stays, what is given up by one can be taken by
another, and beyond that every write fails with ENOSPC, after the part of it that still fits. No byte of the machine's
own disks is taken for it: the limit moves, by `mount -o remount,size=`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

MOUNT: Final = "/usr/bin/mount"
UNMOUNT: Final = "/usr/bin/umount"
_ATTEMPTS: Final = 20


class Disk:
    """A tmpfs of `size_bytes` at most on `folder`, which is made; use as a context manager.

    Needs a mount namespace (`private_mounts`).
    """

    def __init__(self, folder: Path, *, size_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._size_bytes = size_bytes

    def __enter__(self) -> Self:
        limits = f"size={self._size_bytes},mode=700"
        subprocess.run([MOUNT, "-t", "tmpfs", "-o", limits, "none", str(self.folder)], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([UNMOUNT, "--lazy", str(self.folder)], check=True)

    def fill(self, *, room_bytes: int) -> None:
        """Leave so much room, in whole pages, and no more; raises RuntimeError if others write too fast for that."""
        for _ in range(_ATTEMPTS):
            state = os.statvfs(self.folder)
            used = (state.f_blocks - state.f_bfree) * state.f_frsize
            if self._limit(used + room_bytes):  # refused if more is used by now
                return
        raise RuntimeError(f"{self.folder} did not get full")

    def free(self) -> None:
        """Give it its whole size back."""
        if not self._limit(self._size_bytes):
            raise RuntimeError(f"{self.folder} stays full")

    def _limit(self, size_bytes: int) -> bool:
        return _succeeds((MOUNT, "-o", f"remount,size={size_bytes}", str(self.folder)))


def private_mounts() -> tuple[str, ...] | None:
    """Return the command prefix that gives a program its own mount namespace; None where that is forbidden."""
    probe = f"{MOUNT} -t tmpfs none /mnt && {MOUNT} -o remount,size=1m /mnt"
    for command in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        if _succeeds((*command, "sh", "-c", probe)):
            return command
    return None


def _succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
