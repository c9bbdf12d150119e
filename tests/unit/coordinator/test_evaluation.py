"""Evaluation: numbers that an operator compares policies by, and that anybody can repeat."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch
from blake3 import blake3
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from talking import SPEC as TALKING
from talking import talkative_file

from coordinator.training.evaluation import EvaluationSettings, TaskSet, confidence, evaluate_policy, held_out
from node.cli import main
from node.engines.base import Interrupted
from node.engines.torch import TorchEngine
from node.environments import load_environment
from node.environments.base import Environment, Problem
from node.policy.file import load_policy, render_completion, save_policy
from node.policy.models.tiny_llama import EOS, make_model, make_tokenizer
from node.protocol.run import EnvironmentSpec, LengthSpec, RunSpec, SamplingSpec, run_id_of
from node.protocol.slots import slot_problem
from node.protocol.submission import Rollout
from node.protocol.turns import StopStrings, TurnRules
from node.sandbox import SandboxFailed
from shardcast import Origin

SPEC = RunSpec(
    name="t",
    environments=(EnvironmentSpec(name="arithmetic", weight=3), EnvironmentSpec(name="reverse")),
    sampling=SamplingSpec(max_new_tokens=6),
)
RUN_TOML = """
name = "t"
[model]
initial = "random-tiny"
[sampling]
max_new_tokens = 6
[[environments]]
name = "arithmetic"
weight = 3
[[environments]]
name = "reverse"
"""
FEW = EvaluationSettings(problems=3)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "policy.safetensors"
    save_policy(make_model(0), make_tokenizer(), path)
    return path


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML)
    return path


# -- which problems


def test_held_out_problems_are_those_of_the_document():
    def by_document(number: int) -> int:
        parts = ((7).to_bytes(8, "big"), (1).to_bytes(4, "big"), number.to_bytes(4, "big"))
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return int.from_bytes(blake3(framed, derive_key_context="swarmproof/1 held out").digest()[:8], "big") // 2

    assert held_out(seed=7, environment=1, count=3) == [by_document(number) for number in range(3)]
    assert held_out(seed=7, environment=1, count=1) == held_out(seed=7, environment=1, count=5)[:1]


def test_neither_slots_nor_other_seeds_or_environments_lead_to_a_held_out_problem():
    """Whoever could lease what is measured would be paid for training on it."""
    seen = [held_out(seed=seed, environment=place, count=200) for seed in (0, 1) for place in (0, 1)]
    where = {"run_id": "11" * 32, "manifest_digest": "22" * 32}
    seen.append([slot_problem(SPEC, slot=slot, **where).problem for slot in range(200)])
    assert len({index for indexes in seen for index in indexes}) == 1000


# -- the numbers


@pytest.mark.parametrize(
    ("mean", "count", "low", "high"),
    # Of 8 right in 10, and of none and of all of them, as in Brown, Cai and DasGupta (Statistical Science 16, 2001).
    [(0.8, 10, 0.4902, 0.9433), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.5, 100, 0.4038, 0.5962)],
)
def test_the_interval_is_wilsons(mean, count, low, high):
    assert confidence(mean, count) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def tasks(environment: Environment, policy: Path, *, problems: int, samples: int) -> TaskSet:
    settings = EvaluationSettings(problems=problems, samples=samples)
    return TaskSet(environment, load_policy(policy, dtype=torch.float32), settings, 0)


def completion(text: str, *, ends: bool = True) -> Rollout:
    ids = make_tokenizer().backend_tokenizer.encode(text).ids + [EOS] * ends
    return Rollout(
        seed=bytes(16),
        prompt_ids=[5],
        completion_ids=ids,
        logprobs=[-1.0] * len(ids),
        segment_versions=[0],
        segment_tokens=[len(ids)],
        proofs=[],
    )


def test_rewards_and_lengths_are_the_means_of_what_was_drawn(policy):
    source = load_environment(SPEC.environments[0])
    work = tasks(source, policy, problems=2, samples=2)
    first, second = (source.problem(index) for index in held_out(seed=0, environment=0, count=2))
    right = [f"</think>{problem.data['answer']}" for problem in (first, second)]
    assert [len(request.prompt_ids) for request in work.requests(SPEC.sampling)] == [len("Q:12+34=?\nA:")] * 4
    assert len({request.seed for request in work.requests(SPEC.sampling)}) == 4
    work.note(
        work.judge([completion(right[0]), completion("wrong", ends=False), completion(right[1]), completion(right[1])])
    )
    found = work.measured(SPEC)
    assert (found.reward, found.problems, found.completions, found.unjudged) == (0.75, 2, 4, 0)
    assert (found.low, found.high) == confidence(0.75, 2)
    lengths = [len(right[0]) - 6, 5, len(right[1]) - 6, len(right[1]) - 6]  # </think> is 8 characters and one token
    assert work.lengths == lengths
    assert found.tokens_mean == sum(lengths) / 4
    assert found.tokens_most == max(lengths)
    assert found.cut_off == 0.25


def test_a_turn_cut_off_just_behind_a_stop_string_is_cut_off(policy):
    """Its last token ends no turn: what stands before it was the end of the turn before."""
    loaded = load_policy(policy, dtype=torch.float32)
    stop = StopStrings(("ab",), lambda ids: render_completion(loaded, list(ids)))
    work = TaskSet(Doubtful(), loaded, EvaluationSettings(problems=1, samples=3), 0, rules=TurnRules(stop=stop))
    found = work.judge([completion(text, ends=False) for text in ("abc", "cab", "abcab")])
    assert [one.is_cut_off for one in found] == [True, False, False]


def test_length_targets_count_in_an_evaluation_as_in_the_run(policy):
    length = LengthSpec(targets=(20,), penalty=0.01)
    source = load_environment(EnvironmentSpec(name="arithmetic", length=length))
    work = tasks(source, policy, problems=1, samples=1)
    (index,) = held_out(seed=0, environment=0, count=1)
    work.note(work.judge([completion(f"</think>{source.problem(index).data['asked'].data['answer']}")]))
    assert work.measured(SPEC).reward == pytest.approx(1 - 0.01 * (20 - work.lengths[0]))


@dataclass(frozen=True)
class Doubtful:
    """An environment whose rewards this machine cannot always tell."""

    name: str = "doubtful"

    def problem(self, index: int) -> Problem:
        return Problem("?")

    def reward(self, problem: Problem, completion: str) -> float:
        if completion == "slow":
            raise SandboxFailed("a right answer took 0.6 s", code="sandbox_doubt")
        return 1.0


def test_an_environments_own_rules_hold_in_an_evaluation_as_in_the_run(policy):
    """Otherwise `swarmproof problems` would keep problems by completions that no worker draws."""
    settings = EvaluationSettings(problems=4, samples=4)
    own = EnvironmentSpec(name="arithmetic", max_new_tokens=5, stop=tuple("01234567"))
    too_long = EnvironmentSpec(name="arithmetic", max_prompt_tokens=len("Q:12+34=?\nA:") - 1)
    spec = msgspec.structs.replace(SPEC, environments=(own, too_long, SPEC.environments[0]))
    stopped, nothing, free = evaluate_policy(policy, spec=spec, settings=settings).environments
    assert (stopped.tokens_most, free.tokens_most) == (5, 6)
    assert stopped.cut_off < free.cut_off
    assert nothing.completions == 0


def test_what_cannot_be_judged_here_is_counted_apart_and_not_as_wrong(policy):
    work = tasks(Doubtful(), policy, problems=2, samples=2)
    work.note(work.judge([completion("slow"), completion("x"), completion("slow"), completion("slow")]))
    found = work.measured(SPEC)
    assert (found.reward, found.problems, found.completions, found.unjudged) == (1.0, 1, 4, 3)
    nothing = tasks(Doubtful(), policy, problems=1, samples=1)
    nothing.judge([completion("slow")])
    assert (nothing.measured(SPEC).reward, nothing.measured(SPEC).low) == (None, None)


# -- a policy, measured


def test_the_same_seed_gives_the_same_numbers_and_another_one_others(policy):
    first = evaluate_policy(policy, spec=SPEC, settings=FEW)
    assert evaluate_policy(policy, spec=SPEC, settings=FEW) == first
    assert [one.name for one in first.environments] == ["arithmetic", "reverse"]
    assert first.reward == 0.0
    assert all(one.completions == 3 and one.tokens_most <= 6 for one in first.environments)
    longer = msgspec.structs.replace(SPEC, environments=SPEC.environments[:1], sampling=SamplingSpec(max_new_tokens=48))
    lengths = [
        evaluate_policy(policy, spec=longer, settings=replace(FEW, problems=8, seed=seed)).environments[0].tokens_mean
        for seed in (0, 1)
    ]
    assert lengths[0] != lengths[1]


def test_greedy_takes_the_likeliest_token_whatever_the_seed(policy):
    drawn = []

    class Recording(TorchEngine):
        async def generate(self, requests, **options):
            drawn.extend(await super().generate(requests, **options))
            return drawn[-len(requests) :]

    found = evaluate_policy(policy, spec=SPEC, settings=replace(FEW, temperature=0, make_engine=Recording))
    assert found.temperature == 0.0
    loaded = load_policy(policy, dtype=torch.float32)
    for rollout in drawn:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids[:-1]]])
        logits = loaded.model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 :]
        assert logits.argmax(-1).tolist() == rollout.completion_ids
    assert len(drawn) == 6


def test_a_conversation_is_evaluated_with_all_its_turns(tmp_path):
    """With the first turn alone, a policy that uses its tool would seem to have no answer."""
    path = talkative_file(tmp_path)
    lengths = []
    for turns in (1, 4):
        sampling = msgspec.structs.replace(TALKING.sampling, max_turns=turns)
        spec = msgspec.structs.replace(TALKING, sampling=sampling)
        lengths.append(evaluate_policy(path, spec=spec, settings=replace(FEW, problems=8)).environments[0].tokens_mean)
    assert lengths[1] > 1.5 * lengths[0]


def test_a_trainer_that_is_stopped_does_not_wait_for_an_evaluation(policy):
    with pytest.raises(Interrupted):
        evaluate_policy(policy, spec=SPEC, settings=FEW, stop=lambda: True)


def test_an_evaluation_without_an_end_is_refused():
    with pytest.raises(ValueError, match="1,000,000"):
        EvaluationSettings(problems=100_000, samples=11)


# -- the command


def evaluate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["evaluate", *map(str, arguments)])


def test_a_policy_file_a_folder_and_the_runs_first_policy_are_measured_alike(policy, run_file, tmp_path):
    """All three are the same weights here, so all three must give the same numbers."""
    model, tokenizer = make_model(0), make_tokenizer()
    folder = tmp_path / "hugging-face"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    asked = ("--run", run_file, "--problems", 3, "--json")
    results = [evaluate(*asked, *more) for more in ((), ("--policy", policy), ("--policy", folder))]
    assert [result.exit_code for result in results] == [0, 0, 0], results[-1].output
    first, second, third = (json.loads(result.stdout) for result in results)
    assert first == second == third
    assert first["environments"][0]["completions"] == 3


def test_a_version_that_a_trainer_published_is_measured_beside_it(policy, run_file, tmp_path):
    """The trainer holds its folder's lock as long as it runs, which is when an operator asks."""
    key = Ed25519PrivateKey.generate()
    other = tmp_path / "other.safetensors"
    save_policy(make_model(1), make_tokenizer(), other)
    origin = Origin(tmp_path / "trainer" / "origin", key, run_id_of(key.public_key().public_bytes_raw()))
    try:
        origin.publish(policy, version=0)
        origin.publish(other, version=1)
        asked = ("--run", run_file, "--problems", 2, "--json")
        by_trainer = [evaluate(*asked, "--trainer", tmp_path / "trainer", *more) for more in (("--version", 0), ())]
        by_file = [evaluate(*asked, "--policy", path) for path in (policy, other)]
        assert [one.stdout for one in by_trainer] == [one.stdout for one in by_file]
        unknown = evaluate(*asked, "--trainer", tmp_path / "trainer", "--version", 9)
    finally:
        origin.close()
    assert unknown.exit_code == 1
    assert "holds policies 0 to 1, not 9" in unknown.output


def test_the_table_is_plain_where_no_terminal_is(run_file):
    result = evaluate("--run", run_file, "--problems", 2, "--temperature", 0)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "greedy" in result.stdout
    assert "by the run's weights: 0.000" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "{here}", "--trainer", "{here}"), "--policy or --trainer"),
        (("--version", "3"), "--trainer's"),
        (("--temperature", "0.001"), "above 0.01"),
        (("--problems", "100000", "--samples", "1024"), "1,000,000"),
        (("--trainer", "{here}"), "holds no published policy"),
        (("--policy", "{here}"), "config.json"),
        (("--policy", "{here}/run.toml"), "is no policy file"),
    ],
)
def test_a_mistake_is_explained(run_file, arguments, said):
    result = evaluate("--run", run_file, *(each.format(here=run_file.parent) for each in arguments))
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert "hint:" in result.output
