"""The datasets that the project generates: whoever follows the pages with them gets a run that can be won, and trusted.

A row that `dataset add` leaves out, or whose own solution earns nothing, would teach the policy noise; a held-out
question that a demonstration answers would make every figure of `benchmarks.curves` one of memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from sandboxing import needs_sandbox

from coordinator.commands.dataset import dataset
from node.datasets.format import Dataset
from node.graders import grade
from node.protocol.grading import MathGrader, UnitTestsGrader
from node.sandbox.root import PYTHON_VERSION
from tools import make_dataset
from tools.make_dataset import Generated, demonstrations, write_lines

drawn = cache(make_dataset.drawn)
ROWS = {"math": 2000, "code": 500}
MATH, CODE = MathGrader(evaluated=True), UnitTestsGrader(python=PYTHON_VERSION)


def added(name: str, folder: Path, *, grader: str) -> Dataset:
    """The dataset that `swarmproof dataset add` makes of the rows, of which it leaves none out."""
    source, to = folder / f"{name}.jsonl", folder / f"{name}.dataset"
    write_lines(source, (problem.row for problem in drawn(name, seed=0)[0]))
    options = ["--prompt", "question", "--answer", "answer", "--grader", grader, "--held-out", "20%", "--json"]
    done = CliRunner().invoke(dataset, ["add", str(source), *options, "--to", str(to)])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["rows"], said["skipped"]) == (ROWS[name], {})
    return Dataset.open(to)


@pytest.mark.parametrize(("name", "grader"), [("math", "math"), ("code", "unit-tests")])
def test_dataset_add_takes_every_row_and_no_held_out_question_is_trained_on(
    tmp_path: Path, name: str, grader: str
) -> None:
    made = added(name, tmp_path, grader=grader)
    asked = [made.row(index).prompt for index in range(made.header.rows)]
    learnt, held_out = set(asked[: made.header.leased]), set(asked[made.header.leased :])
    assert len(held_out) > ROWS[name] / 8
    assert not learnt & held_out
    others = drawn(name, seed=0)[1]
    shown = demonstrations(others, count=300, mistakes=0.1, guesses=0.1, seed=1)
    assert not {one["messages"][0]["content"] for one in shown} & (learnt | held_out)


def calculation(problem: Generated) -> object:
    """What a problem asks, read from its text alone: an equation is a difference, and a sum has no first number."""
    a, b = (int(number) for number in re.findall(r"\d+", problem.question))
    if problem.kind == "equation":
        return b, "-", a
    return frozenset((a, b)) if problem.kind == "sum" else (a, "-", b)


def outputs(problem: Generated) -> object:
    return tuple(case["output"] for case in problem.answer["cases"])


@pytest.mark.parametrize(("name", "asked"), [("math", calculation), ("code", outputs)])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_two_rows_ask_the_same_and_no_demonstration_asks_what_a_row_asks(
    name: str, asked: Callable[[Generated], object], seed: int
) -> None:
    """A held-out row that is a leased or demonstrated one in other words measures memory, whatever its text."""
    rows, others = drawn(name, seed=seed)
    questions = {asked(row) for row in rows}
    assert len(questions) == len(rows) == ROWS[name]
    assert others
    assert not questions & {asked(other) for other in others}


@pytest.mark.parametrize("name", ROWS)
def test_the_same_seed_gives_the_same_rows_and_another_one_others(name: str) -> None:
    def questions(seed: int) -> list[str]:
        return [problem.question for problem in drawn(name, seed=seed)[0]]

    assert questions(0) == questions(0)
    assert (
        questions(0)[:3]
        == {
            "math": ["What is 80-13?", "Solve x+13=41.", "Solve x+69=82."],
            "code": ["Write f(x): take 2, times 3.", "Write f(x): mod 6, add 3.", "Write f(x): mod 9, from 2."],
        }[name]
    )
    assert set(questions(0)) != set(questions(1))


def test_each_sum_that_is_worked_out_without_mistakes_earns_1() -> None:
    rows, others = drawn("math", seed=0)
    assert {grade(MATH, one.answer, one.solution) for one in rows} == {1.0}
    assert {grade(MATH, one.answer, one.work(0.0, Random(0))) for one in others} == {1.0}


def test_mistakes_and_guesses_leave_something_to_be_learnt() -> None:
    """A warm start on perfect demonstrations would leave reinforcement learning nothing to gain."""
    rows = drawn("math", seed=0)[0]

    def rewards(text: Random, *, how: str) -> float:
        texts = [one.guess(text) if how == "guess" else one.work(0.2, text) for one in rows]
        return sum(grade(MATH, one.answer, said) for one, said in zip(rows, texts, strict=True)) / len(rows)

    assert rewards(Random(0), how="guess") < 0.05
    assert 0.5 < rewards(Random(0), how="work") < 0.8


def cases(problem: Generated) -> str:
    return json.dumps(problem.answer)


@pytest.mark.system
@needs_sandbox
def test_each_function_earns_1_by_its_own_solution_and_nothing_by_a_constant() -> None:
    rows = drawn("code", seed=0)[0]
    assert {grade(CODE, cases(one), one.solution) for one in rows} == {1.0}
    worked = [grade(CODE, cases(one), one.work(0.0, Random(0))) for one in rows[:10]]
    assert set(worked) == {1.0}
    constant = UnitTestsGrader(python=PYTHON_VERSION, partial=True)
    assert max(grade(constant, cases(one), "f=lambda x:0") for one in rows[:20]) < 0.7
