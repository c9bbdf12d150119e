"""What a folder of versions takes of its disk, and whether there is room for what it is to hold."""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

KINDS: Final = {
    "whole": ("versions",),
    "deltas": ("deltas", "rewinds"),
    "incoming": ("downloads", "incoming"),
}
"""Folders of a store (`shardcast.store.versions`) by what is in them."""


def disk_use(root: Path) -> dict[str, int]:
    """Return the bytes of the store in `root` by kind; what has not arrived yet counts as far as it is reserved."""
    return {kind: sum(_folder_bytes(root / name) for name in folders) for kind, folders in KINDS.items()}


def _folder_bytes(folder: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # not made yet
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                total += path.stat().st_size
    return total


class RoomCheck:
    """Warns that a store of `versions` whole versions will not fit, a version or more before its disk is full."""

    def __init__(self, root: Path, *, versions: int, quota_bytes: int | None = None) -> None:
        self._root, self._versions, self._quota_bytes = root, versions, quota_bytes
        self._is_short = False

    def note(self, result_bytes: int) -> None:
        """Compare room and need before each version, as others may fill the disk; log when it becomes too small."""
        need, was_short = self._versions * result_bytes, self._is_short
        room = sum(disk_use(self._root).values()) + shutil.disk_usage(self._root).free
        quota_bytes = need if self._quota_bytes is None else self._quota_bytes
        self._is_short = min(room, quota_bytes) < need
        if was_short or not self._is_short:
            return
        asked = f"{self._versions} whole versions of {_size(result_bytes)} take {_size(need)}"
        if quota_bytes < need:
            logger.warning("%s, but the quota is %s: raise it", asked, _size(quota_bytes))
        if room < need:
            advice = f"free {_size(need - room)}, or move the folder to a larger one"
            logger.warning("%s, but the disk of %s has room for %s: %s", asked, self._root, _size(room), advice)


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
