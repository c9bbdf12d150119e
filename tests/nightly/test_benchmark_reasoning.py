"""The benchmark of what training gains: that its parts mean what they say, and that it runs to the end.

What would break for whom: whoever reads a gain that came from a warm start with wrong demonstrations, from problems
that were learned, or from rewards that are not the environment's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from random import Random

import pytest
from locations import ROOT

from benchmarks.reasoning import HELD_OUT, LEARNED, TASKS, WARM, Pool, Task, prompt_of, shared_beginning, tokenizer_with
from node.environments.reasoning_gym import INSTRUCTION, ReasoningGym, load_dataset
from node.policy.models.tiny_llama import UNK, make_tokenizer

pytest.importorskip("reasoning_gym")


@pytest.fixture(params=TASKS, ids=[task.dataset for task in TASKS])
def task(request: pytest.FixtureRequest) -> Task:
    return request.param


@pytest.fixture
def environment(task: Task) -> ReasoningGym:
    return load_dataset(task.dataset, task.settings)


def test_a_demonstration_without_mistakes_is_right_and_one_with_many_is_not(
    task: Task, environment: ReasoningGym
) -> None:
    pool, rng = Pool(environment, "test", 500), Random(0)
    problems = [pool.problem(at) for at in range(500)]
    right = [task.demonstrate(problem.data["entry"], 0.0, rng) for problem in problems]
    assert all(environment.reward(problem, text) == 1.0 for problem, text in zip(problems, right, strict=True))
    wrong = [task.demonstrate(problem.data["entry"], 0.9, rng) for problem in problems]
    rewards = [environment.reward(problem, text) for problem, text in zip(problems, wrong, strict=True)]
    assert sum(rewards) / len(rewards) < 0.5
    guessed = [f"<think></think>{task.guess(problem.data['entry'], rng)}" for problem in problems]
    rewards = [environment.reward(problem, text) for problem, text in zip(problems, guessed, strict=True)]
    assert sum(rewards) / len(rewards) < 0.4


def test_a_prompt_is_the_environments_own(task: Task, environment: ReasoningGym) -> None:
    problem = environment.problem(7)
    assert prompt_of(problem.data["entry"]) == problem.prompt


def test_the_tokenizer_knows_every_prompt_and_demonstration(task: Task, environment: ReasoningGym) -> None:
    pool, rng = Pool(environment, "test", 300), Random(0)
    shared = shared_beginning([pool.entry(at)["question"] for at in range(200)])
    tokenizer, plain = tokenizer_with([shared, INSTRUCTION]), make_tokenizer()
    saved = len(plain(shared)["input_ids"]) - 1 + len(plain(INSTRUCTION)["input_ids"]) - 1
    for at in range(300):
        entry = pool.entry(at)
        text = prompt_of(entry) + task.demonstrate(entry, 0.1, rng)
        ids = tokenizer(text)["input_ids"]
        assert UNK not in ids
        assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == text
        assert len(ids) == len(plain(text)["input_ids"]) - saved


def test_what_is_measured_was_drawn_with_seeds_of_its_own(task: Task, environment: ReasoningGym) -> None:
    drawn = {name: [Pool(environment, f"{name} 0", 50).entry(at) for at in range(50)] for name in (WARM, LEARNED)}
    held_out = [Pool(environment, f"{HELD_OUT} 0", 50).entry(at) for at in range(50)]
    assert all([entry["question"] for entry in held_out] != [e["question"] for e in other] for other in drawn.values())


@pytest.mark.timeout(300)
def test_the_benchmark_runs_to_the_end() -> None:
    command = [sys.executable, "-m", "benchmarks.reasoning", "--json", "--seeds", "1", "--steps", "1"]
    command += ["--problems", "16", "--warm-start", "0.02"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = json.loads(ended.stdout.splitlines()[-1])
    assert line["benchmark"] == "reasoning"
    assert [row["dataset"] for row in line["rows"]] == [task.dataset for task in TASKS]
    assert all(0 <= row["before"] <= 1 and len(row["rewards"]) == 1 for row in line["rows"])
    assert {"gain_min", "seconds", "chain_sum_gain", "count_bits_after"} <= line["figures"].keys()
