"""A run's public log, and what has to be true of that of honest workers whatever was killed meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from coordinator.lab.processes.local_http import get
from node.protocol.admission import Outcome
from node.protocol.messages import BatchEntry, LogEntry, VerdictEntry
from shardcast.wire import decode


def read_leaves(url: str) -> list[bytes]:
    """All entries that the coordinator at `url` shows, as they are signed."""
    leaves: list[bytes] = []
    while page := get(f"{url}/v1/log/entries?start={len(leaves)}&end=100000", seconds=60.0):
        leaves += page.splitlines()
    return leaves


def check_entries(leaves: Sequence[bytes], *, steps: int) -> None:
    """Raise AssertionError unless each submission was judged once, and admitted, and each step has its batch."""
    entries = [decode(LogEntry, leaf, max_bytes=2**20) for leaf in leaves]  # type: ignore[arg-type]
    verdicts = [entry for entry in entries if isinstance(entry, VerdictEntry)]
    assert {entry.outcome for entry in verdicts} == {Outcome.ADMITTED}
    assert max(Counter(entry.submission for entry in verdicts).values()) == 1
    assert max(Counter((entry.version, entry.slot) for entry in verdicts).values()) == 1
    batches = [entry for entry in entries if isinstance(entry, BatchEntry)]
    assert [batch.step for batch in batches] == list(range(steps))
    assert max(Counter(one for batch in batches for one in batch.submissions).values()) == 1
