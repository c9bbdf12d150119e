"""An environment whose problems are the rows of the run's own dataset (docs/protocol.md, section 5.5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from msgspec import UnsetType

from node.datasets.format import Dataset, DatasetRow
from node.environments.base import DatasetChanged, EnvironmentFault, Problem
from node.errors import DatasetFault
from node.graders import grade
from node.protocol.run import EnvironmentSpec, FileSpec, ProblemsSpec

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
            {"answer": row.answer, "metadata": row.metadata} if self.dataset.has_answers else {},
            opening=len(texts[0] + BETWEEN_MESSAGES) if has_system else 0,
            messages=messages,
        )

    def check_answers(self) -> None:
        """Raise DatasetFault "answers_missing" where the operator keeps the answers and they are not here."""
        if not self.dataset.has_answers:
            raise DatasetFault(f"the file of answers of {self.name} is not here", code="answers_missing")

    def reward(self, problem: Problem, completion: str) -> float:
        self.check_answers()
        return grade(self.dataset.header.grader, problem.data["answer"], completion)


def load_rows(spec: EnvironmentSpec, datasets: Mapping[str, Path]) -> DatasetProblems:
    """Open the dataset of `spec`, whose file is one of `datasets` (by digest), and verify all of it.

    Of a dataset whose answers the operator keeps, the file of answers where it is there, and else that of prompts.
    Raises DatasetFault if it is not there or not the run's, EnvironmentFault (bad_arguments) if the spec contradicts
    it.
    """
    if isinstance(spec.dataset, UnsetType) or not isinstance(spec.problems, ProblemsSpec):
        raise EnvironmentFault(f"{spec.name} names no dataset", code="bad_arguments")
    answers = spec.dataset.answers
    wanted = answers if isinstance(answers, FileSpec) and answers.digest in datasets else spec.dataset
    path = datasets.get(wanted.digest)
    if path is None:
        raise DatasetFault(f"the dataset {wanted.digest[:16]}… of {spec.name} is not here", code="dataset_missing")
    if spec.arguments:
        raise EnvironmentFault(f"{spec.name} takes no arguments", code="bad_arguments")
    dataset = Dataset.open(path, wanted)
    if wanted is answers and _digest(dataset.prompts()) != spec.dataset.digest:
        raise DatasetFault(f"the answers of {spec.name} are to other prompts than the run's", code="answers_differ")
    if dataset.has_answers != (wanted is answers or isinstance(answers, UnsetType)):
        fault = "has answers, which the rules keep apart" if dataset.has_answers else "has no answers"
        raise DatasetFault(f"{path} {fault}", code="dataset_malformed")
    if bool(dataset.header.salt) != (wanted is answers):
        fault = "is a file of answers, which must not travel" if dataset.header.salt else "has answers without a salt"
        raise DatasetFault(f"{path} {fault}", code="dataset_malformed")
    if spec.problems.count > dataset.header.leased:
        raise EnvironmentFault(
            f"{spec.name} has {dataset.header.leased} rows that are not held out, and problems.count is "
            f"{spec.problems.count}",
            code="bad_arguments",
        )
    return DatasetProblems(spec.name, dataset)


def _digest(pieces: Iterable[bytes]) -> str:
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _messages(row: DatasetRow, *, system: str) -> tuple[dict[str, str], ...]:
    """Return a row's conversation, () for a prompt without a system text."""
    if row.messages is None and not system:
        return ()
    turns = [("user", row.prompt or "")] if row.messages is None else [(one.role, one.content) for one in row.messages]
    if system:
        turns.insert(0, ("system", system))
    return tuple({"role": role, "content": content} for role, content in turns)
