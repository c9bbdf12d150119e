"""Datasets of reasoning-gym in a process of their own, where those are offered too whose scorers evaluate answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from environment_rooms import Room, guest_command, room

from node.environments import EnvironmentFault
from node.environments.base import Conversation
from node.environments.guest.reasoning_gym import WHY_REFUSED
from node.environments.isolated import load_isolated
from node.environments.reasoning_gym import PLAIN, REVIEWED
from node.protocol.environment_spec import EnvironmentSpec

NEW = [
    "binary_matrix",
    "boxnet",
    "complex_arithmetic",
    "countdown",
    "decimal_arithmetic",
    "dice",
    "family_relationships",
    "knights_knaves",
    "n_queens",
    "polynomial_equations",
    "power_function",
    "prime_factorization",
    "propositional_logic",
    "self_reference",
    "simple_integration",
    "spiral_matrix",
    "sudoku",
    "time_intervals",
    "tower_of_hanoi",
]
ATTACKS = (
    "__import__('os')._exit(1)",
    "().__class__.__mro__[-1].__subclasses__()",
    "[x for x in ().__class__.__base__.__subclasses__()]",
    "{'a': exec('import os; os._exit(1)')}",
    "[" * 4000,
    "\x00\ud800\u202e" * 500,
    "9" * 100_000,
)


@pytest.fixture(scope="module")
def gym() -> Iterator[Room]:
    shared = Room(guest_command(room("reasoning-gym").python), first="reasoning_gym:chain_sum")
    yield shared
    shared.process.close()


@pytest.mark.parametrize("dataset", NEW)
def test_hostile_answers_earn_next_to_nothing_and_change_nothing(gym: Room, dataset: str) -> None:
    """The scorer and the right answers are in the same process: code in one answer could pay all that follow."""
    assert dataset not in PLAIN | REVIEWED
    source = gym.load(f"reasoning_gym:{dataset}")
    assert not isinstance(source, Conversation)
    problem, pid = source.problem(3), gym.process.pid
    before = source.reward(problem, "</think>1")
    for attack in ATTACKS:
        assert source.reward(problem, f"</think>{attack}") <= 0.2
    assert source.reward(problem, "</think>1") == before
    assert gym.process.pid == pid


def test_the_right_answer_earns_one_behind_the_thoughts_only(gym: Room) -> None:
    source = gym.load("reasoning_gym:chain_sum", max_terms=2, min_terms=2)
    problem = source.problem(5)
    question = problem.prompt.partition("\n")[0]
    formula = question.partition(":")[2].partition("=")[0]
    answer = str(eval(formula))
    assert source.reward(problem, f"<think>so</think>\n{answer}\n") == 1.0
    assert source.reward(problem, answer) == 0.0
    assert source.reward(problem, f"</think>{answer}9") < 1.0


def test_problems_are_those_of_the_nodes_own_process(gym: Room) -> None:
    """A run may change from one to the other, and its problems stay what they were."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    from node.environments.reasoning_gym import ReasoningGym

    own = ReasoningGym("gcd", {}, reasoning_gym)
    source = gym.load("reasoning_gym:gcd")
    for index in (0, 7, 2**63 - 1):
        assert source.problem(index).prompt == own.problem(index).prompt


@pytest.mark.parametrize(
    ("dataset", "arguments", "code"),
    [
        *((dataset, {}, "refused_environment") for dataset in sorted(WHY_REFUSED)),
        ("chain_sum", {"seed": 1}, "bad_arguments"),
        ("chain_sum", {"nonsense": 1}, "bad_arguments"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "bad_arguments"),
        ("no_such_dataset", {}, "bad_arguments"),
    ],
)
def test_what_nobody_could_repeat_or_ask_for_is_refused(gym: Room, dataset: str, arguments: dict, code: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        gym.load(f"reasoning_gym:{dataset}", **arguments)
    assert caught.value.code == code


def test_an_interpreter_without_the_package_says_so() -> None:
    with pytest.raises(EnvironmentFault, match="no package reasoning-gym") as caught:
        load_isolated(EnvironmentSpec(name="reasoning_gym:gcd"), guest_command("/usr/bin/python3"), None)
    assert caught.value.code == "package_missing"
