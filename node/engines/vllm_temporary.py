"""A private folder for vLLM's temporary files, removed with the engine.

vLLM's processes meet at sockets and a file in the temporary folder, and lock a file per loaded policy. They clean up
only when they shut down in order, which they seldom have time for: a long-running worker would fill the folder.
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

PREFIX = ".swarmproof-"
LONGEST_BASE = 107 - 37 - len(f"/{PREFIX}abcdefgh")
"""A Unix socket path has at most 107 bytes, of which vLLM's names take 37 (unix(7))."""

SOCKETS = "VLLM_RPC_BASE_PATH"

_environment = threading.Lock()
"""Serialises changes of the process-wide environment: concurrent starts would restore each other's folders."""


class TemporaryFolder:
    """A locked folder of one engine; construction also removes the folders of killed processes.

    It lies in `VLLM_RPC_BASE_PATH`, else the temporary folder; if that has too long a name, in /tmp. Raises OSError.
    """

    def __init__(self) -> None:
        base = Path(os.environ.get(SOCKETS) or tempfile.gettempdir())
        if len(os.fsencode(base)) > LONGEST_BASE:
            base = Path("/tmp")  # noqa: S108  (a private folder is made in it)
        _sweep(base)
        fresh = Path(tempfile.mkdtemp(prefix=".", dir=base))
        self._lock = _lock(fresh)
        # Renamed to the swept prefix only once it is locked.
        self.path = fresh.rename(base / f"{PREFIX}{fresh.name[1:]}")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Point processes started inside the context to this folder; one engine at a time."""
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
        """Remove the folder and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(folder: Path) -> int:
    """Lock a folder until the descriptor is closed or this process dies; raises OSError.

    No file in it is opened: others may write into the temporary folder, and a file could be a link.
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
