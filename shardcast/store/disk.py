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
    """Warns that a store of `versions` whole versions will not fit, before the one that would be too many."""

    def __init__(self, root: Path, *, versions: int, quota_bytes: int | None = None) -> None:
        self._root, self._versions, self._quota_bytes = root, versions, quota_bytes
        self._short = frozenset[str]()

    def note(self, result_bytes: int) -> None:
        """Compare room and need before each version, as others may fill the disk; log what becomes too small."""
        need, used, short = self._versions * result_bytes, disk_use(self._root), dict[str, str]()
        room = used["whole"] + used["incoming"] + shutil.disk_usage(self._root).free
        if self._quota_bytes is not None and self._quota_bytes < need:
            short["quota"] = f"the quota is {_size(self._quota_bytes)}: raise it"
        if room < need:
            advice = f"free {_size(need - room)}, or move the folder to a larger one"
            short["disk"] = f"the disk of {self._root} has room for {_size(room)}: {advice}"
        asked = f"{self._versions} whole versions of {_size(result_bytes)} take {_size(need)}"
        for what, why in short.items():
            if what not in self._short:
                logger.warning("%s, but %s", asked, why)
        self._short = frozenset(short)


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
