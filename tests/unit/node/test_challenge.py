"""What an asker makes of an answer to a challenge: honest work passes, and whatever else is named."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.control.challenge import appraise_challenge
from node.control.report import challenge_lines
from node.engines.torch import TorchEngine
from node.protocol.challenge import challenge_spec
from node.protocol.control import AskChallenge, ChallengeBody
from node.protocol.run import EnvironmentSpec, LimitsSpec, RunSpec
from node.protocol.submission import Rollout
from node.submission.reader import read_rollouts
from node.submission.writer import write_rollouts
from node.verification.prefill import Prefill
from node.verification.readings import read_by_transformers
from node.worker.engine import ChallengeUnavailable, EngineHost
from node.worker.policies import HeldPolicy

SPEC = RunSpec(
    name="test",
    environments=(EnvironmentSpec(name="arithmetic"),),
    limits=LimitsSpec(token_margin=1e-3, logprob_error=1e-3, exponent_mismatches=8.0, mantissa_mean=1.0),
)
RUN_ID, NONCE, MANIFEST = "1" * 64, "2" * 32, "3" * 64
NODE = Ed25519PrivateKey.from_private_bytes(b"\2" * 32).public_key().public_bytes_raw()
ASK = AskChallenge(samples=3, max_tokens=20)


class Feed:
    """Holds one policy."""

    def __init__(self, path):
        self.held = HeldPolicy(manifest_digest=MANIFEST, path=path)

    def get(self, version):
        return self.held if version == 0 else None

    async def file(self, version):
        return self.held.path if version == 0 else None


@dataclass(frozen=True)
class Scene:
    host: EngineHost
    body: ChallengeBody
    prefill: Prefill

    def rollouts(self) -> list[Rollout]:
        return read_rollouts(self.body.rollouts, spec=challenge_spec(SPEC, ASK))


@pytest.fixture(scope="module")
def scene(tiny_policy_path):
    async def drawn():
        host = EngineHost(TorchEngine(SPEC), Feed(tiny_policy_path), spec=SPEC, run_id=RUN_ID)
        with pytest.raises(ChallengeUnavailable):
            await host.challenge(ASK, node=NODE, nonce=NONCE)
        await host.load(0, slots=0)
        return host, await host.challenge(ASK, node=NODE, nonce=NONCE)

    host, body = asyncio.run(drawn())
    return Scene(host, body, read_by_transformers(tiny_policy_path, spec=SPEC))


def appraised(body: ChallengeBody, prefill: Prefill | None, **changes: object):
    where = {"spec": SPEC, "run_id": RUN_ID, "node": NODE, "nonce": NONCE, "seconds": 2.0} | changes
    return appraise_challenge(body, ASK, prefill=prefill, **where)


def forged(scene: Scene, rollouts: list[Rollout]) -> ChallengeBody:
    return msgspec.structs.replace(scene.body, rollouts=write_rollouts(rollouts))


async def test_a_prompt_beyond_its_environments_limit_is_unavailable_and_no_lie(tiny_policy_path) -> None:
    """The asker refuses every answer to it: an honest node would look as if it had failed."""
    spec = msgspec.structs.replace(SPEC, environments=(EnvironmentSpec(name="arithmetic", max_prompt_tokens=4),))
    host = EngineHost(TorchEngine(spec), Feed(tiny_policy_path), spec=spec, run_id=RUN_ID)
    await host.load(0, slots=0)
    with pytest.raises(ChallengeUnavailable, match="1 to 4 are allowed"):
        await host.challenge(ASK, node=NODE, nonce=NONCE)


@pytest.mark.parametrize("measured", [True, False])
def test_honest_work_passes(scene: Scene, measured: bool) -> None:
    shown = appraised(scene.body, scene.prefill if measured else None)
    assert (shown.fault, shown.rows, shown.measured) == (None, 3, measured)
    tokens = [len(rollout.completion_ids) for rollout in scene.rollouts()]
    assert max(tokens) <= 20
    assert shown.tokens_per_second == sum(tokens) / 2.0
    said = " ".join(challenge_lines(shown))
    assert ("form" in said) is not measured


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize(
    "changes", [{"nonce": "4" * 32}, {"node": bytes(32)}, {"run_id": "5" * 64}], ids=lambda changes: next(iter(changes))
)
def test_an_answer_made_for_somebody_else_or_earlier(scene: Scene, changes: dict, measured: bool) -> None:
    shown = appraised(scene.body, scene.prefill if measured else None, **changes)
    assert shown.fault.startswith(("wrong_seed", "wrong_prompt"))


def test_invented_tokens_need_a_policy_to_be_seen(scene: Scene) -> None:
    """Only their form is right: that is what an asker without a policy is told."""
    first, *others = scene.rollouts()
    invented = 40 if first.completion_ids[0] != 40 else 41  # neither ends nor pads
    tokens = [invented, *first.completion_ids[1:]]
    body = forged(scene, [msgspec.structs.replace(first, completion_ids=tokens), *others])
    assert appraised(body, None).fault is None
    assert appraised(body, scene.prefill).fault.split(":")[0] in {"wrong_token", "proof_mismatch", "wrong_logprob"}


def test_too_few_rows_and_a_file_that_is_none(scene: Scene) -> None:
    assert appraised(forged(scene, scene.rollouts()[:2]), None).fault.startswith("wrong_group_size")
    junk = msgspec.structs.replace(scene.body, rollouts=b"\x28\xb5\x2f\xfd junk")
    shown = appraised(junk, None)
    assert shown.fault.startswith("malformed_submission")
    assert "not what was asked for" in " ".join(challenge_lines(shown))


def test_log_probabilities_that_are_no_numbers(scene: Scene) -> None:
    first, *others = scene.rollouts()
    body = forged(scene, [msgspec.structs.replace(first, logprobs=[float("nan")] * len(first.logprobs)), *others])
    assert appraised(body, None).fault.startswith("logprob_not_finite")
