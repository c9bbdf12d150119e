"""A worker with real vLLM against a real coordinator, verified by transformers: honest work in, everything else out.

The dishonest worker is the same daemon with the same engine, given other weights than the run's: noisy ones,
quantised ones, and those of one training step ago.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from swarm import running, small_spec
from waiting import eventually

from coordinator.calibration.cheats import alter
from coordinator.storage.schema import slots, submissions
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import train_step
from coordinator.training.optimizers import make_optimizer
from node.client.http import Backoff
from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.engines.vllm import VllmEngine
from node.engines.vllm_prefill import VllmVerifier
from node.engines.vllm_settings import VllmSettings
from node.joining.session import JoinSettings
from node.policy.file import load_policy, save_policy
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec, ProofSpec, TrainingSpec
from node.submission.reader import read_rollouts
from node.worker.daemon import WorkerSettings, run_worker

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("forked_vllm"),
]

SPEC = small_spec()
SPEC = msgspec.structs.replace(
    SPEC,
    sampling=msgspec.structs.replace(SPEC.sampling, max_new_tokens=120, max_version_lead=1),
    batch=msgspec.structs.replace(SPEC.batch, groups_per_step=4),
    # One step of the smallest rate that the demonstration was tried with.
    training=TrainingSpec(learning_rate=5e-5, warmup_steps=1, minibatches=1),
)
SECONDS = 90.0


class BorrowedEngine(VllmEngine):
    """One vLLM for all tests, because it takes long to start; `instead` is what it loads whatever it is given."""

    instead: Path | None = None

    async def load(self, path: Path, *, version: int) -> None:
        await super().load(self.instead or path, version=version)

    async def close(self) -> None:
        """A worker that ends closes its engine; the next test wants it."""

    async def really_close(self) -> None:
        await super().close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(forked_vllm, tmp_path_factory):
    engine = BorrowedEngine(SPEC, VllmSettings(cpu_threads=1, kv_cache_gib=0.1), state=tmp_path_factory.mktemp("vllm"))
    yield engine
    await engine.really_close()


@asynccontextmanager
async def served(*arguments, **options):
    """`running`, whose threads have loops of their own, from a test that has one too."""
    run = running(*arguments, **options)
    swarm = await asyncio.to_thread(run.__enter__)
    try:
        yield swarm
    finally:
        await asyncio.to_thread(run.__exit__, None, None, None)


@dataclass
class Judged:
    version: int
    outcome: Outcome
    reason: Reason | None
    detail: str
    rows: list


def judged(swarm):
    """Every verdict of the run so far."""
    query = (
        select(slots.c.version, submissions.c.outcome, submissions.c.reason, submissions.c.detail, submissions.c.body)
        .join(slots, slots.c.id == submissions.c.slot_id)
        .where(submissions.c.outcome.is_not(None))
    )
    home = swarm.home
    with home.database.read() as connection:
        return [
            Judged(
                row.version,
                Outcome(row.outcome),
                row.reason and Reason(row.reason),
                row.detail,
                read_rollouts(home.blobs.path(row.body), spec=home.spec),
            )
            for row in connection.execute(query)
        ]


async def work(swarm, vllm, folder, *, verdicts=1, meanwhile=None):
    """Let the daemon work until the run has so many verdicts, or `meanwhile` is done."""
    stop = asyncio.Event()
    settings = WorkerSettings(
        join=JoinSettings(run_id=swarm.home.run_id, coordinators=(swarm.url,)),
        state=folder / "worker",
        backoff=Backoff(first_seconds=0.02, max_seconds=0.1),
    )
    daemon = asyncio.create_task(
        run_worker(settings, key=Ed25519PrivateKey.generate(), make_engine=lambda _: vllm, stop=stop)
    )
    try:
        await (meanwhile() if meanwhile is not None else eventually(lambda: len(judged(swarm)) >= verdicts))
    finally:
        stop.set()
        await asyncio.wait_for(daemon, SECONDS)
    return judged(swarm)


async def test_what_an_honest_worker_draws_with_vllm_is_admitted(tmp_path, tiny_policy_path, vllm):
    vllm.instead = None
    async with served(tmp_path, tiny_policy_path, spec=SPEC) as swarm:
        found = await work(swarm, vllm, tmp_path, verdicts=4)
    assert {one.outcome for one in found} == {Outcome.ADMITTED}, [one.detail for one in found]
    assert all(row.segment_versions == [0] for one in found for row in one.rows)


async def test_a_policy_that_arrives_while_vllm_draws_is_gone_on_with_and_admitted(tmp_path, tiny_policy_path, vllm):
    vllm.instead = None
    policies = [changed(tiny_policy_path, tmp_path / f"later-{index}", change) for index, change in enumerate(CHANGES)]
    async with served(tmp_path, tiny_policy_path, spec=SPEC) as swarm:

        async def publish_until_one_arrives_in_flight():
            for version in range(1, 30):
                start = vllm.tokens
                await eventually(lambda start=start: vllm.tokens > start + 100)
                await asyncio.to_thread(swarm.publish, policies[version % 2], version=version)
                await eventually(lambda version=version: any(one.version == version for one in judged(swarm)))
                if any(len(row.segment_versions) == 2 for one in judged(swarm) for row in one.rows):
                    return

        found = await work(swarm, vllm, tmp_path, meanwhile=publish_until_one_arrives_in_flight)
    assert {one.outcome for one in found} == {Outcome.ADMITTED}, [one.detail for one in found]
    crossed = [row.segment_versions for one in found for row in one.rows if len(row.segment_versions) == 2]
    assert crossed
    assert all(later == earlier + 1 for earlier, later in crossed)


def changed(path, target, change):
    policy = load_policy(path, dtype=torch.float32)
    with torch.no_grad():
        for weight in policy.model.parameters():
            if weight.ndim == 2:
                weight.copy_(change(weight))
    save_policy(policy.model, policy.tokenizer, target)
    return target


def noise(weight):
    return weight * (1 + 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))


def int8(weight):
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
    return (weight / scale).round() * scale


CHANGES = [noise, int8]
REASONS = {Reason.PROOF_MISMATCH, Reason.WRONG_TOKEN, Reason.WRONG_LOGPROB}


@pytest.mark.parametrize("change", CHANGES)
async def test_the_same_worker_with_other_weights_is_rejected(tmp_path, tiny_policy_path, vllm, change):
    vllm.instead = changed(tiny_policy_path, tmp_path / "other", change)
    async with served(tmp_path, tiny_policy_path, spec=SPEC) as swarm:
        await vllm.load(vllm.instead, version=0)
        found = await work(swarm, vllm, tmp_path, verdicts=2)
    assert {one.outcome for one in found} == {Outcome.REJECTED}
    assert {one.reason for one in found} <= REASONS


async def test_the_same_worker_with_the_policy_of_one_training_step_ago_is_rejected(tmp_path, tiny_policy_path, vllm):
    vllm.instead = tiny_policy_path
    await vllm.load(tiny_policy_path, version=0)
    newer = await one_training_step(tiny_policy_path, tmp_path / "newer", vllm)
    async with served(tmp_path, newer, spec=SPEC) as swarm:
        found = await work(swarm, vllm, tmp_path, verdicts=2)
    assert {one.outcome for one in found} == {Outcome.REJECTED}
    assert {one.reason for one in found} <= REASONS


async def one_training_step(path, target, vllm):
    """The policy in `path` after a step of GRPO on completions of its own, half of which were rewarded."""
    policy = load_policy(path, dtype=torch.float32)
    requests = [SampleRequest((5, 6, 7), bytes([index]) * 16) for index in range(8)]
    group = Group(
        version=0,
        rewards=(1.0, 0.0) * 4,
        rollouts=tuple(
            Sample(tuple(row.prompt_ids), tuple(row.completion_ids), tuple(row.logprobs))
            for row in await vllm.generate(requests)
        ),
    )
    train_step(policy.model, make_optimizer(policy.model, SPEC.training), [group], spec=SPEC, step=0)
    save_policy(policy.model, policy.tokenizer, target)
    return target


async def test_an_operators_verifier_with_vllm_admits_honest_work_and_rejects_other_weights(tmp_path, tiny_policy_path):
    """For a policy that only vLLM can hold; the work is the torch engine's."""
    other = changed(tiny_policy_path, tmp_path / "other", noise)
    cheat = TorchEngine(SPEC)
    await cheat.load(other, version=0)

    def make_prefills(spec, _share):
        return VllmVerifier(spec, VllmSettings(cpu_threads=1, kv_cache_gib=0.1), state=tmp_path / "verifier-vllm")

    async with served(tmp_path, tiny_policy_path, spec=SPEC, make_prefills=make_prefills) as swarm:
        peer, liar = await asyncio.to_thread(swarm.peer), await asyncio.to_thread(swarm.peer)
        lease = await asyncio.to_thread(peer.lease)
        honest = await asyncio.to_thread(swarm.honest, lease)
        receipt = await asyncio.to_thread(swarm.judge, peer, honest, lease)
        assert receipt.outcome is Outcome.ADMITTED, receipt.detail
        lease = await asyncio.to_thread(liar.lease)
        forged = await cheat.generate(swarm.requests(lease))
        receipt = await asyncio.to_thread(swarm.judge, liar, forged, lease)
        assert receipt.outcome is Outcome.REJECTED
        assert receipt.reason in REASONS
    await cheat.close()


async def test_a_verifier_with_vllm_takes_second_looks(tmp_path, tiny_policy_path):
    """Without them, weights in eight bits are within the limits of a run that was never calibrated."""
    spec = msgspec.structs.replace(
        SPEC,
        limits=LimitsSpec(second_looks=1.0, suspects=("int8",)),
        proofs=ProofSpec(scheme="sketch/1", sketch_step=0.01),
    )
    cheat = TorchEngine(spec)
    alter(tiny_policy_path, tmp_path / "int8", int8)
    await cheat.load(tmp_path / "int8", version=0)

    def make_prefills(spec, _share):
        return VllmVerifier(spec, VllmSettings(cpu_threads=1, kv_cache_gib=0.1), state=tmp_path / "verifier-vllm")

    async with served(tmp_path, tiny_policy_path, spec=spec, make_prefills=make_prefills) as swarm:
        peer, liar = await asyncio.to_thread(swarm.peer), await asyncio.to_thread(swarm.peer)
        lease = await asyncio.to_thread(liar.lease)
        forged = await cheat.generate(swarm.requests(lease))
        receipt = await asyncio.to_thread(swarm.judge, liar, forged, lease)
        assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.PROOF_MISMATCH)
        assert receipt.detail.startswith("All rows together: int8_gain is ")
        lease = await asyncio.to_thread(peer.lease)
        honest = await asyncio.to_thread(swarm.honest, lease)
        receipt = await asyncio.to_thread(swarm.judge, peer, honest, lease)
        assert receipt.outcome is Outcome.ADMITTED, receipt.detail
    await cheat.close()
