"""What vLLM puts into the temporary folder, kept in a folder of its own that goes when the engine does.

Its processes meet at sockets and at a file there, and lock a file for each policy that they load. They remove these
when they end in order, which they are seldom given the time for: a worker that runs for weeks would fill the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

PREFIX = ".veriswarm-"
LONGEST_BASE = 107 - 37 - len(f"/{PREFIX}abcdefgh")
"""The path of a Unix socket has 107 bytes at most, of which vLLM's names take 37 (unix(7))."""

SOCKETS = "VLLM_RPC_BASE_PATH"

_environment = threading.Lock()
"""The environment is the whole process's: two starts at once would restore each other's folders."""


class TemporaryFolder:
    """A locked folder of one engine, beside which those of processes that were killed are swept away.

    It lies where `VLLM_RPC_BASE_PATH` says, else in the temporary folder; if that has too long a name, in /tmp. Raises
    OSError.
    """

    def __init__(self) -> None:
        base = Path(os.environ.get(SOCKETS) or tempfile.gettempdir())
        if len(os.fsencode(base)) > LONGEST_BASE:
            base = Path("/tmp")  # noqa: S108  (a folder of one's own is made in it)
        _sweep(base)
        fresh = Path(tempfile.mkdtemp(prefix=".", dir=base))
        self._lock = _lock(fresh)
        # It takes the name that others sweep once they can see that it is in use.
        self.path = fresh.rename(base / f"{PREFIX}{fresh.name[1:]}")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The processes that are started meanwhile put their temporary files here; one engine at a time."""
        wanted = {
            "TMPDIR": str(self.path),
            SOCKETS: str(self.path),
            # What was compiled once is worth keeping; PyTorch's default lies in the temporary folder.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            or str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")),
        }
        with _environment:
            before = {name: os.environ.get(name) for name in wanted}
            os.environ.update(wanted)
            try:
                yield
            finally:
                for name, value in before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value

    def remove(self) -> None:
        """Remove it with all that was left in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(folder: Path) -> int:
    """Lock a folder until the descriptor is closed or this process dies; raises OSError.

    Nothing in it is opened for that: others may write into the temporary folder, and a file could be a link.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        # In use, another user's, or swept by another process just now.
        with contextlib.suppress(OSError):
            lock = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
