"""How far the run is: the newest policy, and the next training step."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from coordinator.storage import work_statements as statements
from node.protocol.run import BatchSpec, RunSpec


@dataclass(frozen=True, slots=True)
class Progress:
    """The newest policy version (-1 before the first) and the first step without a batch."""

    head: int
    next_step: int

    @classmethod
    def of(cls, head: int | None, last_step: int | None) -> Progress:
        """Return the progress after policy `head` and step `last_step`; None before the first."""
        return cls(head=-1 if head is None else head, next_step=0 if last_step is None else last_step + 1)

    def floor(self, batch: BatchSpec) -> int:
        """Return the oldest policy version that a later step may still train on."""
        return max(0, self.next_step - batch.max_async)

    def last_chance(self, batch: BatchSpec) -> int:
        """Return the newest policy version that no step after the next one may train on."""
        return self.next_step - batch.max_async

    def is_over(self, spec: RunSpec) -> bool:
        """Return whether the last step has its groups."""
        return self.next_step >= spec.training.steps


def progress(connection: Connection) -> Progress:
    """Read the run's progress."""
    ((head, last_step),) = statements.PROGRESS.rows(connection)
    return Progress.of(head, last_step)
