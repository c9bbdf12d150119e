"""An environment whose problems are the rows of the run's own dataset (docs/protocol.md, section 5.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec import UnsetType

from node.datasets.format import Dataset, DatasetRow
from node.environments.base import DatasetChanged, EnvironmentFault, Problem
from node.errors import DatasetFault
from node.graders import grade
from node.protocol.run import EnvironmentSpec, ProblemsSpec

BETWEEN_MESSAGES = "\n\n"


@dataclass(frozen=True, slots=True)
class DatasetProblems:
    """Problem i is row i; `held_out` are the rows that no slot is drawn from."""

    name: str
    dataset: Dataset

    @property
    def held_out(self) -> range:
        """The indexes of the rows for evaluation."""
        return range(self.dataset.header.leased, self.dataset.header.rows)

    def problem(self, index: int) -> Problem:
        """Return row `index` as a problem; raises EnvironmentFault, and DatasetChanged where the file changed."""
        try:
            row = self.dataset.row(index)
        except DatasetFault as error:
            kind = DatasetChanged if error.code == DatasetChanged.code else EnvironmentFault
            raise kind(f"{self.name}: {error}", code=error.code) from error
        messages = _messages(row, system=self.dataset.header.system)
        texts = [message["content"] for message in messages] or [row.prompt or ""]
        has_system = bool(messages) and messages[0]["role"] == "system"
        return Problem(
            BETWEEN_MESSAGES.join(texts),
            {"answer": row.answer, "metadata": row.metadata},
            opening=len(texts[0] + BETWEEN_MESSAGES) if has_system else 0,
            messages=messages,
        )

    def reward(self, problem: Problem, completion: str) -> float:
        return grade(self.dataset.header.grader, problem.data["answer"], completion)


def load_rows(spec: EnvironmentSpec, datasets: Mapping[str, Path]) -> DatasetProblems:
    """Open the dataset of `spec`, whose file is one of `datasets` (by digest), and verify all of it.

    Raises DatasetFault if it is not there or not the run's, EnvironmentFault (bad_arguments) if the spec contradicts
    it.
    """
    if isinstance(spec.dataset, UnsetType) or not isinstance(spec.problems, ProblemsSpec):
        raise EnvironmentFault(f"{spec.name} names no dataset", code="bad_arguments")
    path = datasets.get(spec.dataset.digest)
    if path is None:
        raise DatasetFault(
            f"the dataset {spec.dataset.digest[:16]}… of {spec.name} is not here", code="dataset_missing"
        )
    if spec.arguments:
        raise EnvironmentFault(f"{spec.name} takes no arguments", code="bad_arguments")
    dataset = Dataset.open(path, spec.dataset)
    if spec.problems.count > dataset.header.leased:
        raise EnvironmentFault(
            f"{spec.name} has {dataset.header.leased} rows that are not held out, and problems.count is "
            f"{spec.problems.count}",
            code="bad_arguments",
        )
    return DatasetProblems(spec.name, dataset)


def _messages(row: DatasetRow, *, system: str) -> tuple[dict[str, str], ...]:
    """Return a row's conversation, () for a prompt without a system text."""
    if row.messages is None and not system:
        return ()
    turns = [("user", row.prompt or "")] if row.messages is None else [(one.role, one.content) for one in row.messages]
    if system:
        turns.insert(0, ("system", system))
    return tuple({"role": role, "content": content} for role, content in turns)
