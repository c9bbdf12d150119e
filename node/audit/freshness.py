"""Whether the log that an auditor is shown goes as far as the run (docs/protocol.md, section 8.4)."""

from __future__ import annotations

from node.audit.log import LogIndex
from node.audit.problems import AuditProblem
from node.protocol.run import PolicyHead, RunSpec


def check_head(log: LogIndex, head: PolicyHead | None) -> list[AuditProblem]:
    """Return a problem unless the log has the policy that a descriptor, signed before it was read, names as the newest.

    Otherwise an operator could go on with the run, and show an auditor the log of last week.
    """
    if head is None:
        return []
    policies = ((policy.version, policy.manifest_digest) for _, policy in log.policies)
    if (head.version, head.manifest_digest) in policies:
        return []
    detail = f"The run signed that policy {head.version} is its newest; the log that it shows does not have it."
    return [AuditProblem("unlogged_policy", detail)]


def is_over(log: LogIndex, spec: RunSpec) -> bool:
    """Return whether the log has the batch of the run's last step."""
    return log.newest_step >= spec.training.steps - 1
