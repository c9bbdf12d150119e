"""Tables of submissions: rows with what people read, the environment's name among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.dashboard.visible import visible
from coordinator.run.home import Home
from coordinator.storage.database import Connection
from coordinator.storage.listings import ListedSubmission
from coordinator.storage.steps import manifest_digests
from node.protocol.slots import slot_problem

ROWS: Final = 25
MOST_NAME: Final = 40


@dataclass(frozen=True, slots=True)
class SubmissionLine:
    """A submission with the name of its environment."""

    row: ListedSubmission
    environment: str


def lines_of(connection: Connection, rows: Sequence[ListedSubmission], *, home: Home) -> list[SubmissionLine]:
    """Return the rows with their environments, which follow from run, policy and slot."""
    names = [visible(one.name, most=MOST_NAME) for one in home.spec.environments]
    numbers = environments_of(connection, rows, home=home)
    return [SubmissionLine(row, names[number]) for row, number in zip(rows, numbers, strict=True)]


def environments_of(connection: Connection, rows: Iterable[ListedSubmission], *, home: Home) -> list[int]:
    """Return the place of each row's environment in the run's list."""
    rows = list(rows)
    if len(home.spec.environments) == 1:
        return [0] * len(rows)
    manifests = manifest_digests(connection, {row.version for row in rows if row.environment is None})
    return [
        slot_problem(home.spec, run_id=home.run_id, manifest_digest=manifests[row.version], slot=row.slot).environment
        if row.environment is None
        else row.environment
        for row in rows
    ]
