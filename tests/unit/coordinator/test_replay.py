"""A trainer's tokens meet the experts that they met where the verifier's log-probabilities are from.

In 16 bits the trainer's routers choose others for some percent of the tokens, whose ratios then say nothing of what
training changed (docs/adr/0037-routing-is-replayed.md).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from benchmarks import workload
from benchmarks.modelling.family_policies import random_family_model
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.workers import make_workers
from coordinator.storage.verdicts import QueueItem
from coordinator.training.group_size import max_group_bytes
from coordinator.training.groups import Group, encode_group
from coordinator.training.grpo import Execution, score, train_step
from coordinator.training.lora import load_trained
from coordinator.training.optimizers import make_optimizer
from coordinator.training.packing import pack
from coordinator.training.world import SINGLE_PROCESS
from coordinator.verifier.claimed import group_of
from node.policy.experts import routers
from node.policy.file import save_policy
from node.policy.layout import cast
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.reading import OpenPolicy
from node.policy.routing import noted_choices
from node.protocol.admission import Outcome, Verdict
from node.protocol.run import LimitsSpec, RunSpec
from node.protocol.submission import Rollout
from node.verification.deviations import RowMeasured, SpanMeasured
from node.verification.judge import JudgedClaim
from node.verification.measure import Measurement
from node.verification.prefill import Prefill
from node.verification.readings import read_by_transformers
from node.verification.streamed import StreamedPrefill

ROWS = 4


@dataclass(frozen=True)
class Measured:
    """A group of a policy with experts in bfloat16, and the group that training reads of it."""

    folder: Path
    spec: RunSpec
    rollouts: list[Rollout]
    group: Group

    def grouped(
        self, prefill: Prefill, rows: tuple[int, ...] = tuple(range(ROWS)), *, spec: RunSpec | None = None
    ) -> Group:
        """Have `rows` measured by a prefill, and return what is trained on."""
        return grouped(self.rollouts, prefill, rows, spec=spec or self.spec)


def grouped(rollouts: list[Rollout], prefill: Prefill, rows: tuple[int, ...], *, spec: RunSpec) -> Group:
    measuring = Measurement([rollouts], spec=spec, rows=[rows])
    measuring.measure(prefill, 0)
    verdict = Verdict(outcome=Outcome.ADMITTED, rewards=[1.0] * (ROWS // 2) + [0.0] * (ROWS // 2), tokens=1)
    judged = JudgedClaim(verdict=verdict, rollouts=rollouts, replies=[()] * ROWS, rows=measuring.result(0))
    item: Any = msgspec.defstruct("Claimed", [("version", int)])(0)
    claimed: QueueItem = item
    return group_of(claimed, judged, spec=spec)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("policy")
    model = random_family_model("qwen3_moe")
    save_policy(model, make_tokenizer(), folder / "exact")
    save_policy(cast(model, torch.bfloat16), make_tokenizer(), folder / "policy")
    spec = workload.make_spec(dtype="bfloat16", tokens=12)
    sampling = msgspec.structs.replace(spec.sampling, group_size=ROWS)
    training = msgspec.structs.replace(spec.training, minibatches=1, warmup_steps=0)
    spec = msgspec.structs.replace(spec, sampling=sampling, training=training)
    prefill: Any = read_by_transformers(folder / "policy", spec=spec)
    worker = make_workers(["torch"], threads=1)[0]
    slots = SyntheticSlots(spec, prefill.blueprint)
    (rollouts,) = asyncio.run(worker.draw(spec, folder / "policy", slots, groups=1, in_flight=(1,)))
    return Measured(folder, spec, rollouts, grouped(rollouts, prefill, tuple(range(ROWS)), spec=spec))


def trained_choices(found: Measured, group: Group, *, recompute: bool = False) -> list[Tensor]:
    """Train a step on a group, and return what the routers' tokens met in each forward pass [L, k]."""
    policy = load_trained(found.folder / "exact", lora=None, seed=0, recompute=recompute, world=SINGLE_PROCESS)
    optimizer = make_optimizer(policy.model, found.spec.training)
    with noted_choices(routers(policy.model)) as noted:
        train_step(policy.model, optimizer, [group], spec=found.spec, step=0, execution=Execution(row_tokens=4096))
    return [chosen for layer in noted for chosen in layer]


def flipped(group: Group) -> Group:
    """The group with another expert in each place, as if rounding had turned every choice."""
    return msgspec.structs.replace(group, experts=tuple(bytes((one + 1) % 4 for one in each) for each in group.experts))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_goes_through_the_experts_of_the_verifiers_prefill(measured: Measured, recompute: bool) -> None:
    for group in (measured.group, flipped(measured.group)):
        (row,) = pack(score(group, spec=measured.spec, step=0), row_tokens=4096)
        assert row.experts is not None
        known = row.experts.is_known
        assert int((~known).sum()) == ROWS, "only the last token of each sample is nobody's input"
        passes = trained_choices(measured, group, recompute=recompute)
        layers = len(passes) // (1 + recompute)
        expected = row.experts.choices.view(len(known), layers, -1)
        for at, chosen in enumerate(passes):
            assert torch.equal(chosen[known], expected[known, at // (1 + recompute)])


def test_what_is_kept_of_a_group_is_within_its_bound_and_of_runs_in_16_bits_alone(measured: Measured) -> None:
    """In float32 the trainer chooses alike: bytes of every token would be kept for nothing, and old blobs differ."""
    assert len(encode_group(measured.group)) < max_group_bytes(measured.spec)
    prefill = read_by_transformers(measured.folder / "policy", spec=measured.spec)
    wide = msgspec.structs.replace(measured.spec, model=msgspec.structs.replace(measured.spec.model, dtype="float32"))
    assert measured.grouped(prefill, spec=wide).experts == ()


def test_rows_that_nobody_measured_choose_for_themselves(measured: Measured) -> None:
    prefill = read_by_transformers(measured.folder / "policy", spec=measured.spec)
    group = measured.grouped(prefill, (2,))
    assert [bool(each) for each in group.experts] == [False, False, True, False]
    (row,) = pack(score(group, spec=measured.spec, step=0), row_tokens=4096)
    assert row.experts is not None
    own = row.layout.columns[2, : len(group.rollouts[2].prompt_ids) + len(group.rollouts[2].completion_ids) - 1]
    assert set(row.experts.is_known.nonzero().flatten().tolist()) == set(own.tolist())


def test_a_policy_that_is_read_layer_by_layer_tells_the_same_choices(measured: Measured) -> None:
    prefill = StreamedPrefill(OpenPolicy(measured.folder / "policy"), dtype=torch.bfloat16)
    assert measured.grouped(prefill).experts == measured.group.experts


def test_a_token_has_the_experts_of_the_policy_that_drew_what_follows() -> None:
    """A later policy reads all again: of what those before it had as input, its choices explain no log-probability."""
    one = SpanMeasured([0.0], [0.0], [0.0], [], logprobs=[-1.0], margins=[0.0], experts=b"abcd")
    later = msgspec.structs.replace(one, experts=b"ABCDEF")
    unknown = msgspec.structs.replace(one, experts=b"")
    limits = LimitsSpec()
    assert RowMeasured.of([one, later], [-1.0, -1.0], limits=limits).experts == b"abcdEF"
    assert RowMeasured.of([one, unknown], [-1.0, -1.0], limits=limits).experts == b"", "of one engine nothing is known"
