"""What an audit disagrees with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_PROBLEMS: Final = 1000
"""Where the log has as many, it is not read on."""
MAX_DETAIL_CHARACTERS: Final = 500


@dataclass(frozen=True, slots=True)
class AuditProblem:
    """One point on which the audit disagrees with the coordinator; `code` is stable."""

    code: str
    detail: str
    log_index: int | None = None
