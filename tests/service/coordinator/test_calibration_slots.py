"""Calibration draws as workers of the run do: limits of other lengths and chunks would be another run's."""

from __future__ import annotations

from pathlib import Path

import pytest
from narrow_run import FAR_INSIDE, LIMITS, loaded, policy_file, sharp_model

from coordinator.calibration.attempts import Attempts
from coordinator.calibration.measure import measure
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.workers import HonestWorker
from node.engines.torch import TorchEngine
from node.policy.file import Policy, render_completion, render_reply
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec, ThinkingSpec
from node.protocol.submission import Rollout
from node.verification.prefill import TransformersPrefill

WORKER = HonestWorker("torch", lambda spec, _: TorchEngine(spec))
THOUGHT, LONGEST = 5, 24


def run_of(**own: object) -> RunSpec:
    return RunSpec(
        name="limits of its own",
        environments=(EnvironmentSpec(name="arithmetic", max_new_tokens=LONGEST, **own),),  # type: ignore[arg-type]
        sampling=SamplingSpec(group_size=4, max_new_tokens=48),
        proofs=ProofSpec(chunk_tokens=8),
        limits=LIMITS,
    )


THINKING = run_of(thinking=ThinkingSpec(tokens=THOUGHT, end="</think>"))


@pytest.fixture(autouse=True)
def _same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.calibration.slots.secrets.token_hex", lambda size: "0b" * size)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that seldom ends a turn by itself."""
    return policy_file(sharp_model(3), tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(path: Path) -> Policy:
    return loaded(path)


async def drawn(spec: RunSpec, path: Path, policy: Policy) -> tuple[SyntheticSlots, list[list[Rollout]]]:
    slots = SyntheticSlots(spec, policy)
    return slots, await WORKER.draw(spec, path, slots, groups=4, in_flight=(4,))


async def test_a_completion_is_no_longer_than_its_environment_allows(path: Path, policy: Policy) -> None:
    _, groups = await drawn(run_of(), path, policy)
    assert max(len(one.completion_ids) for group in groups for one in group) == LONGEST


async def test_a_turn_ends_with_a_stop_string(path: Path, policy: Policy) -> None:
    def texts(groups: list[list[Rollout]]) -> list[str]:
        return [render_completion(policy, one.completion_ids) for group in groups for one in group]

    _, free = await drawn(run_of(), path, policy)
    often = max({letter for text in texts(free) for letter in text}, key="".join(texts(free)).count)
    _, stopped = await drawn(run_of(stop=(often,)), path, policy)
    assert any(text.endswith(often) for text in texts(stopped))
    assert not any(often in text[:-1] for text in texts(stopped))


async def test_the_end_of_a_long_thought_is_drawn_over_and_measured(path: Path, policy: Policy) -> None:
    slots, groups = await drawn(THINKING, path, policy)
    replies = [slots.replies(group) for group in groups]
    end_ids = tuple(render_reply(policy, "</think>"))
    assert {said for own in replies for said in own if said} == {((THOUGHT, end_ids),)}
    prefill = TransformersPrefill(policy)
    measured = measure(prefill, groups, replies, spec=THINKING)
    assert max(max(one.margins) for group in measured for one in group) < FAR_INSIDE.token_margin
    with pytest.raises(Refusal) as refused:
        measure(prefill, groups, spec=THINKING)
    assert refused.value.reason is Reason.WRONG_PROOF_COUNT


async def test_cheats_prove_what_stands_behind_a_thought(path: Path, policy: Policy, tmp_path: Path) -> None:
    """Otherwise their proofs would be refused by number, and say nothing of the limits."""
    slots = SyntheticSlots(THINKING, policy)
    attempts = Attempts(THINKING, policy=policy, path=path, folder=tmp_path, slots=slots, groups=1, threads=1)
    for groups in (await attempts._prove_int4(), await attempts._best()):
        replies = [slots.replies(group) for group in groups]
        assert any(said for own in replies for said in own)
        measure(TransformersPrefill(policy), groups, replies, spec=THINKING)
