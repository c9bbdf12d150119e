"""Where stored state is not what follows from the log, and how two values are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.storage.derived_rows import is_waiting
from coordinator.storage.schema import SubmissionState
from node.client.http import printable
from node.protocol.evidence import Drift
from shardcast.errors import PeerFault
from shardcast.manifest import open_manifest
from shardcast.wire import decode

MAX_DRIFT_BYTES = 1024
SAME = 1e-9
"""Relative difference of two machines' logarithms, as an audit allows."""
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not what it has to be; `can_repair`: `derived` can be written in its place."""

    table: str
    key: str
    column: str
    stored: str
    derived: str
    can_repair: bool

    @property
    def sentence(self) -> str:
        """One line for people."""
        where = f"{self.table} {self.key} {self.column}".strip()
        lost = "" if self.can_repair else "; cannot be derived here"
        return f"{where}: stored {self.stored}, derived {self.derived}{lost}"


def shown(value: object) -> str:
    """Return a stored value for a line of text: short, and harmless in a terminal."""
    if isinstance(value, bytes):
        return f"{value[:16].hex()}{'…' if len(value) > 16 else ''} ({len(value)} bytes)"
    if isinstance(value, tuple):
        return "/".join(map(shown, value))
    text = "nothing" if value is None else printable(str(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def is_same(table: str, column: str, stored: Any, derived: Any, *, run_id: str, public_key: bytes) -> bool:
    """Return whether a stored value says what was derived."""
    if (table, column) == ("policies", "manifest"):
        return bool(_manifest_digest(stored, run_id=run_id, public_key=public_key) == derived)
    special = _SPECIAL.get((table, column))
    if special is not None:
        return special(stored, derived)
    if isinstance(derived, float) and isinstance(stored, float):
        return math.isclose(stored, derived, rel_tol=SAME)
    return bool(stored == derived)


def _same_state(stored: str, derived: str) -> bool:
    # A verifier may be making the group of a judged submission anew, and its files may be removed.
    return is_waiting(stored) or (derived == SubmissionState.DONE and stored in (derived, SubmissionState.EXPIRED))


def _same_second(stored: float | None, derived: int) -> bool:
    """The log has whole seconds."""
    return stored is not None and math.isfinite(stored) and int(stored) == derived


def _same_end(stored: float | None, derived: int | None) -> bool:
    """Whether there is a policy of the step; of its time the log knows only what came before."""
    return (stored is None) == (derived is None)


def _same_drift(stored: bytes | None, derived: bytes | None) -> bool:
    if stored is None or derived is None or stored == derived:
        return stored == derived
    try:
        one, other = (decode(Drift, bytes(each), max_bytes=MAX_DRIFT_BYTES) for each in (stored, derived))
    except PeerFault:
        return False
    names = Drift.__struct_fields__
    return all(math.isclose(getattr(one, name), getattr(other, name), rel_tol=SAME, abs_tol=SAME) for name in names)


def _manifest_digest(envelope: bytes, *, run_id: str, public_key: bytes) -> str | None:
    try:
        return open_manifest(bytes(envelope), run_id=run_id, publisher_key=public_key).digest
    except PeerFault:
        return None


_SPECIAL: Mapping[tuple[str, str], Callable[[Any, Any], bool]] = {
    ("submissions", "state"): _same_state,
    ("submissions", "decided_at"): _same_second,
    ("steps", "finished_at"): _same_end,
    ("nodes", "drift"): _same_drift,
}
