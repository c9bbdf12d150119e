"""Whether the log that an auditor is shown goes as far as the run (docs/protocol.md, section 8.4)."""

from __future__ import annotations

from collections.abc import Iterable

from node.audit.log import AuditProblem
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry
from node.protocol.run import PolicyHead, RunSpec


def check_head(entries: Iterable[LogEntry | None], head: PolicyHead | None) -> list[AuditProblem]:
    """Return a problem unless the log has the policy that a descriptor, signed before it was read, names as the newest.

    Otherwise an operator could go on with the run, and show an auditor the log of last week.
    """
    if head is None:
        return []
    policies = ((entry.version, entry.manifest_digest) for entry in entries if isinstance(entry, PolicyEntry))
    if (head.version, head.manifest_digest) in policies:
        return []
    detail = f"The run signed that policy {head.version} is its newest; the log that it shows does not have it."
    return [AuditProblem("unlogged_policy", detail)]


def is_over(entries: Iterable[LogEntry | None], spec: RunSpec) -> bool:
    """Return whether the log has the batch of the run's last step."""
    return any(isinstance(entry, BatchEntry) and entry.step >= spec.training.steps - 1 for entry in entries)
