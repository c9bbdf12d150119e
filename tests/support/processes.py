"""What tests ask about processes that other programs start and end."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """Return whether there is such a process, and more of it than its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends between opening and reading
        return False
