"""Environments: a worker, the verifier and an auditor must get the same prompt and the same reward."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sandboxing import needs_sandbox

from node.environments import EnvironmentFault, load_environment
from node.environments.base import Environment, answer_in
from node.environments.reasoning_gym import LOOPING, MAX_ANSWER_CHARACTERS, MOST_COUNT, PLAIN, REVIEWED, WHY_REFUSED
from node.protocol.run import EnvironmentSpec, LengthSpec

LAST = 2**63 - 1


def environment(name: str, **arguments: str | float | bool) -> Environment:
    return load_environment(EnvironmentSpec(name=name, arguments=arguments))


@pytest.mark.parametrize(
    ("name", "arguments", "prompts"),
    [
        ("arithmetic", {}, ["Q:53+14=?\nA:", "Q:17+24=?\nA:", "Q:58+68=?\nA:", "Q:70+19=?\nA:"]),
        (
            "arithmetic",
            {"digits": 4},
            ["Q:1133+6944=?\nA:", "Q:4157+3444=?\nA:", "Q:5008+3668=?\nA:", "Q:5380+2629=?\nA:"],
        ),
        ("reverse", {}, ["Q:rev fadbh\nA:", "Q:rev hgcha\nA:", "Q:rev fab\nA:", "Q:rev cegce\nA:"]),
        ("terminal", {"rows": 2, "columns": 3}, [" @ \n * \n\n", "@  \n  *\n\n", "* @\n   \n\n", "   \n*@ \n\n"]),
    ],
)
def test_golden_prompts_do_not_change_between_releases(name, arguments, prompts):
    """Two releases that disagree here reject each other's honest rollouts as wrong_prompt."""
    source = environment(name, **arguments)
    assert [source.problem(index).prompt for index in (0, 1, 2**32, LAST)] == prompts


def test_prompts_cover_the_task():
    prompts = {environment("arithmetic").problem(index).prompt for index in range(4000)}
    terms = {int(text) for prompt in prompts for text in prompt[2:-5].split("+")}
    assert terms == set(range(10, 100))
    words = [environment("reverse").problem(index).data["word"] for index in range(4000)]
    assert {len(word) for word in words} == {3, 4, 5}
    assert {letter for word in words for letter in word} == set("abcdefgh")


def test_the_answer_after_the_last_thought_earns_one_and_nothing_else_does():
    source = environment("arithmetic")
    problem = source.problem(7)
    left, right = problem.data["terms"]
    right_answer = str(left + right)
    for completion in (
        f"<think>x</think>{right_answer}",
        f"</think>0</think> {right_answer}\n",
        f"</think>{right_answer}",
    ):
        assert source.reward(problem, completion) == 1.0
    for completion in (
        right_answer,
        f"<think>{right_answer}",
        f"</think>{right_answer}</think>",
        f"</think>{right_answer} or so",
        f"</think>+{right_answer}",
        "</think>",
        "",
    ):
        assert source.reward(problem, completion) == 0.0


@pytest.mark.parametrize("index", [0, 1, 2, 3, 2**32, LAST])
def test_the_terminal_rewards_enter_on_the_target_and_nothing_else(index):
    source = environment("terminal")
    problem = source.problem(index)
    (row, column), (target_row, target_column) = problem.data["start"], problem.data["target"]
    keys = ("j" if target_row > row else "k") * abs(target_row - row)
    keys += ("l" if target_column > column else "h") * abs(target_column - column)
    for completion in (
        f"{keys}\n",
        f"hl{keys}\n" if column else f"lh{keys}\n",
        f"{keys}\nhhjj",
        f"{keys}x\n",
        f"{keys}\n\n",
    ):
        assert source.reward(problem, completion) == 1.0, completion
    for completion in (
        "",
        "\n",
        keys,
        f"\n{keys}\n",
        f"{keys[:-1]}\n",
        f"{keys.upper()}\n",
        f"{'hl' * 32}{keys}\n",  # more keys than are looked at
        "\N{GRINNING FACE}\x00\ud800\n",
        "\n" * 10**6,
    ):
        assert source.reward(problem, completion) == 0.0, completion[:80]


def test_a_terminal_takes_no_length_targets():
    """The policy would see the request above the field and go there, where the reward's terminal has nothing."""
    spec = EnvironmentSpec(name="terminal", length=LengthSpec(targets=(8,)))
    with pytest.raises(EnvironmentFault, match="no length targets") as caught:
        load_environment(spec)
    assert caught.value.code == "bad_arguments"


def test_a_terminal_field_has_one_beginning_and_one_target_elsewhere():
    problems = [environment("terminal", rows=3, columns=4).problem(index) for index in range(1000)]
    for problem in problems:
        lines = problem.prompt.removesuffix("\n\n").split("\n")
        assert [len(line) for line in lines] == [4, 4, 4]
        row, column = problem.data["start"]
        assert lines[row][column] == "@"
        row, column = problem.data["target"]
        assert lines[row][column] == "*"
    assert len({(problem.data["start"], problem.data["target"]) for problem in problems}) == 12 * 11


def test_reverse_wants_the_word_backwards():
    source = environment("reverse")
    problem = source.problem(3)
    word = problem.data["word"]
    assert problem.prompt == f"Q:rev {word}\nA:"
    assert source.reward(problem, f"<think></think>{word[::-1]}") == 1.0
    assert source.reward(problem, f"<think></think>{word[::-1]}a") == 0.0


def test_arguments_change_the_problem():
    assert len(environment("arithmetic", digits=4).problem(1).prompt) == len("Q:1234+5678=?\nA:")
    assert len(environment("reverse", shortest=8, longest=8).problem(1).data["word"]) == 8


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("arithmetic", {"digits": 0}, "bad_arguments"),
        ("arithmetic", {"digits": "2"}, "bad_arguments"),
        ("arithmetic", {"digits": True}, "bad_arguments"),
        ("arithmetic", {"digit": 2}, "bad_arguments"),
        ("reverse", {"shortest": 5, "longest": 3}, "bad_arguments"),
        ("sorting", {}, "unknown_environment"),
        ("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2}, "bad_arguments"),
        ("reasoning_gym:chain_sum", {"nonsense": 1}, "bad_arguments"),
        ("reasoning_gym:chain_sum", {"seed": 1}, "bad_arguments"),
        ("reasoning_gym:chain_sum", {"package_version": "0.0.1"}, "package_version"),
        ("reasoning_gym:", {}, "refused_dataset"),
        ("reasoning_gym:no_such_dataset", {}, "refused_dataset"),
    ],
)
def test_a_wrong_environment_is_refused_with_a_code(name, arguments, code):
    with pytest.raises(EnvironmentFault) as caught:
        environment(name, **arguments)
    assert caught.value.code == code


@pytest.mark.parametrize("above", [True, False], ids=["relative", "absolute"])
def test_a_run_that_names_a_file_of_the_workers_machine_as_the_source_of_its_prompts(tmp_path, above):
    """Submissions carry their prompts: whoever signs a run would read its contributors' files, word by word."""
    secret = tmp_path / "token"
    secret.write_text("hunter2hunter2\n")
    package = Path(importlib.import_module("reasoning_gym.data").__file__).parent
    named = os.path.relpath(secret, package) if above else str(secret)
    with pytest.raises(EnvironmentFault, match="data_file") as caught:
        pytest.fail(environment("reasoning_gym:spell_backward", data_file=named, max_word_len=99).problem(0).prompt)
    assert caught.value.code == "bad_arguments"


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        ("rotten_oranges", {"min_n": 10**7, "max_n": 10**7}),
        ("maze", {"min_grid_size": 10**6, "max_grid_size": 10**6}),
        ("chain_sum", {"max_terms": 1e15}),
        ("gcd", {"min_numbers": -(10**15)}),
    ],
)
def test_a_run_that_asks_for_a_problem_larger_than_the_workers_machine(dataset, arguments):
    """The worker makes the problem in its own process: it would take all memory, or not even end by a signal."""
    with pytest.raises(EnvironmentFault, match="is at most") as caught:
        environment(f"reasoning_gym:{dataset}", **arguments)
    assert caught.value.code == "bad_arguments"


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        ("base_conversion", {"min_base": 16, "max_base": 16}),  # both bases are the same one
        ("base_conversion", {"min_base": 16}),
        ("base_conversion", {"max_base": 2}),
        ("modulo_grid", {"max_divisor": 1}),  # no remainder is 1 or more
        ("arc_1d", {"max_size": 31}),  # at 300, some problem in hundreds needs more than nine colours
        ("arc_1d", {"min_size": 8}),
    ],
)
def test_a_run_that_asks_for_a_problem_that_is_drawn_again_without_end(dataset, arguments):
    with pytest.raises(EnvironmentFault, match="without a package") as caught:
        environment(f"reasoning_gym:{dataset}", **arguments)
    assert caught.value.code == "bad_arguments"


def test_the_bounds_of_values_of_a_dataset_that_draws_again_may_be_chosen():
    source = environment("reasoning_gym:base_conversion", min_value=7, max_value=8, max_base=16)
    assert {source.problem(index).data["entry"]["metadata"]["decimal_value"] for index in range(40)} == {7, 8}


def test_a_minimum_above_the_maximum_is_refused_before_the_dataset_sees_it():
    with pytest.raises(EnvironmentFault, match="min_dist is more than max_dist") as caught:
        environment("reasoning_gym:maze", min_dist=11)
    assert caught.value.code == "bad_arguments"


OWN_LIMITS = {"train": 1, "max_rotation": 25, "max_animals": 37, "max_angle": 179, "max_num_rules": 20}
"""What datasets take at most, where that is less than what a run may ask for."""

TOO_LARGE = frozenset(
    {"caesar_cipher", "products", "sentence_reordering", "simple_geometry", "spell_backward", "word_sorting"}
)
"""Datasets with no problem whose minima are the largest maxima: no word, polygon or number is such."""


@pytest.mark.parametrize("dataset", sorted((PLAIN | REVIEWED) - LOOPING))
@pytest.mark.timeout(30)
def test_the_extreme_settings_that_a_run_may_choose_make_a_problem_in_seconds(dataset):
    config = importlib.import_module("reasoning_gym.factory").DATASETS[dataset][1]
    usual = {field.name: field.default for field in dataclasses.fields(config) if field.type is int}
    usual = {key: value for key, value in usual.items() if key not in ("seed", "size")}
    largest = {
        key: 2**53 - 1 if key.endswith("_value") else OWN_LIMITS.get(key, max(MOST_COUNT, 10 * value))
        for key, value in usual.items()
        if not key.startswith("min_")
    }
    ranges = {key: key.replace("min_", "max_", 1) for key in usual if key.startswith("min_") and key != "min_value"}
    smallest = {most: usual[least] for least, most in ranges.items()}
    for settings in (*({key: value} for key, value in largest.items()), largest, smallest):
        source = environment(f"reasoning_gym:{dataset}", **settings)
        assert all(source.problem(index).prompt for index in range(4)), settings
    narrowest = largest | {least: largest[most] for least, most in ranges.items()}
    if dataset in TOO_LARGE:
        with pytest.raises(EnvironmentFault) as caught:
            environment(f"reasoning_gym:{dataset}", **narrowest)
        assert caught.value.code == "problem_failed"
    else:
        assert environment(f"reasoning_gym:{dataset}", **narrowest).problem(1).prompt


def test_an_unknown_setting_is_the_datasets_to_refuse():
    with pytest.raises(EnvironmentFault, match="unexpected keyword argument 'nonsense'"):
        environment("reasoning_gym:chain_sum", nonsense=10**9)


def test_a_package_without_an_offered_dataset(monkeypatch):
    """A newer one may have renamed it."""
    monkeypatch.delitem(importlib.import_module("reasoning_gym.factory").DATASETS, "gcd")
    with pytest.raises(EnvironmentFault, match="gcd is not in the installed version") as caught:
        environment("reasoning_gym:gcd")
    assert caught.value.code == "bad_arguments"


def test_every_setting_of_an_offered_dataset_that_takes_any_text_was_read():
    """A newer package may add one that is a path or a pattern."""
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    free = {
        field.name for name in PLAIN | REVIEWED for field in dataclasses.fields(datasets[name][1]) if field.type is str
    }
    assert free == {"data_file", "delimiter"}


@pytest.mark.parametrize("dataset", sorted(WHY_REFUSED))
def test_code_in_an_answer_never_reaches_a_scorer_that_evaluates_it(dataset):
    with pytest.raises(EnvironmentFault) as caught:
        environment(f"reasoning_gym:{dataset}")
    assert caught.value.code == "refused_dataset"
    assert dataset not in PLAIN | REVIEWED


def test_a_dataset_whose_scorer_a_newer_package_replaced_is_refused(monkeypatch):
    """The list was read for one version; a later one may bring `eval` to a scorer that was plain."""
    from reasoning_gym.algorithmic.string_splitting import StringSplittingDataset

    monkeypatch.setattr(StringSplittingDataset, "score_answer", lambda *_: 1.0)
    with pytest.raises(EnvironmentFault, match="in a new way") as caught:
        environment("reasoning_gym:string_splitting")
    assert caught.value.code == "refused_dataset"


def test_a_machine_without_the_package_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(EnvironmentFault, match=r"\[reasoning-gym\]") as caught:
        environment("reasoning_gym:chain_sum")
    assert caught.value.code == "package_missing"


PRINT_PROBLEMS = """
import json, sys
from node.environments import load_environment
from node.protocol.run import EnvironmentSpec
names = sys.argv[1].split()
print(json.dumps({name: [load_environment(EnvironmentSpec(name=name)).problem(index).prompt for index in range(8)]
                  for name in names}))
"""


def test_every_offered_problem_is_the_same_in_another_process():
    """Problems that follow Python's salted string hash would make honest rollouts wrong_prompt."""
    names = ["arithmetic", "reverse", "code", *(f"reasoning_gym:{name}" for name in sorted(PLAIN | REVIEWED))]
    runs = [
        subprocess.run(
            [sys.executable, "-c", PRINT_PROBLEMS, " ".join(names)],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for salt in ("1", "2")
    ]
    first, second = (json.loads(run) for run in runs)
    assert first == second
    assert all(len(set(prompts)) > 1 for prompts in first.values())


HOSTILE = [
    "",
    "9" * 100_000,
    "9" * (MAX_ANSWER_CHARACTERS - 1),
    "1e999999999",
    "-1e-999999999",
    "NaN",
    "sNaN",
    "inf",
    "[" * 4000,
    "{" * 4000 + '"a":1',
    '"' * 4000,
    "(" * 2000 + ")" * 2000,
    "__import__('os')._exit(1)",
    "().__class__.__mro__[-1].__subclasses__()",
    "\x00\ud800\u202e" * 500,
    "\U0001d7d7" * 100,
    "\u0663" * 50,
    "\u0301" * 4000,
    ", " * 2000,
    "\n" * 4000 + "x",
    "1," * 2000,
    "None",
    "</think>" * 500,
]


@pytest.mark.parametrize(
    "name",
    [
        "arithmetic",
        "reverse",
        pytest.param("code", marks=needs_sandbox),
        *(f"reasoning_gym:{x}" for x in sorted(PLAIN | REVIEWED)),
    ],
)
def test_hostile_completions_earn_a_finite_reward_and_raise_nothing(name):
    """An exception here would let one completion stop the verifier, or the auditor."""
    source = environment(name)
    problem = source.problem(11)
    for text in HOSTILE:
        for completion in (text, f"<think></think>{text}", f"</think>{text}</think>{text}"):
            assert 0.0 <= source.reward(problem, completion) <= 1.0


@pytest.mark.parametrize("dataset", sorted(PLAIN | REVIEWED))
def test_the_right_answer_earns_one(dataset):
    source = environment(f"reasoning_gym:{dataset}")
    problem = source.problem(5)
    assert source.reward(problem, f"<think>so</think>\n{problem.data['entry']['answer']}\n") == 1.0
    assert source.reward(problem, problem.data["entry"]["answer"]) == 0.0
    assert source.reward(problem, "</think>\u2603") < 0.2


def test_a_scorer_that_fails_or_exceeds_its_range_cannot_pay_out(caplog):
    """A scorer's bug must neither stop the verifier nor print rewards above one."""
    source = environment("reasoning_gym:chain_sum")
    problem = source.problem(5)

    def reward_where_the_scorer_does(score):
        return source.reward(replace(problem, data={**problem.data, "score": score}), "</think>1")

    def fail(*_):
        raise RecursionError

    assert reward_where_the_scorer_does(lambda *_: 7) == 1.0
    assert reward_where_the_scorer_does(lambda *_: -7) == 0.0
    assert reward_where_the_scorer_does(lambda *_: float("nan")) == 0.0
    assert reward_where_the_scorer_does(fail) == 0.0
    assert "failed to score" in caplog.text


def test_the_answer_is_what_follows_the_last_mark():
    assert answer_in("a</think>b</think> c \n") == "c"
    assert answer_in("</think>") == ""
    assert answer_in("no mark") is None
