"""What a trainer's own choice of experts does to its ratios, beside meeting those of a verifier's prefill.

Completions are drawn by the torch engine, prefilled as a verifier does, whose log-probabilities are what a ratio is
over, and computed by the trainer from the float32 weights that were rounded to that policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.workers import make_workers
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import Execution, train_step
from coordinator.training.head import final_states, head_logprobs, output_head
from coordinator.training.lora import load_trained
from coordinator.training.optimizers import make_optimizer
from coordinator.training.packing import PackedRow, Scored, pack
from coordinator.training.world import SINGLE_PROCESS
from node.policy.experts import routers
from node.policy.file import Policy, load_policy, save_policy
from node.policy.layout import cast
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.packed_attention import packed_attention
from node.policy.routing import choices_of_lines, noted_choices, replayed_choices
from node.protocol.run import RunSpec
from node.verification.readings import reads_twice


@dataclass(frozen=True, slots=True)
class Read:
    """A row's log-probabilities [N], and the experts that its tokens met [layers, L, k]."""

    logprobs: Tensor
    experts: Tensor


def measure_replay(
    model: PreTrainedModel, *, spec: RunSpec, autocast: torch.dtype | None, groups: int, steps: int
) -> list[dict[str, float]]:
    """Compare a trainer's ratios with and without replay, with the weights of `model` and after `steps` on all groups.

    `model` is in float32, and stays as it is.

    `spec` gives the run's dtype, readings, sampling and learning rate, `autocast` is the trainer's. One half of each
    group has a reward of 1, so that there is a gradient.
    """
    dtype = getattr(torch, spec.model.dtype)
    with tempfile.TemporaryDirectory() as folder:
        exact, path = Path(folder, "float32"), Path(folder, "policy")
        save_policy(model, make_tokenizer(), exact)
        save_policy(cast(copy.deepcopy(model), dtype), make_tokenizer(), path)
        verifier = load_policy(path, dtype=dtype)
        drawn = asyncio.run(_draw(spec, path, verifier, groups))
        trainer = load_trained(exact, lora=None, seed=0, recompute=False, world=SINGLE_PROCESS)
    reader = (verifier.in_float32() if reads_twice(spec) else verifier).model
    rows = [
        pack([Scored(one, 1.0, (0,) * len(one.completion_ids)) for one in group], row_tokens=2**20)[0]
        for group in drawn
    ]
    truth = [_prefilled(reader, row, spec) for row in rows]
    found = [{"steps": 0.0} | _compared(trainer.model, rows, truth, spec, autocast)]
    if steps:
        _train(trainer, drawn, truth, spec=spec, execution=Execution(autocast=autocast), steps=steps)
        found.append({"steps": float(steps)} | _compared(trainer.model, rows, truth, spec, autocast))
    return found


async def _draw(spec: RunSpec, path: Path, policy: Policy, groups: int) -> list[list[Sample]]:
    worker = make_workers(["torch"], threads=1)[0]
    drawn = await worker.draw(spec, path, SyntheticSlots(spec, policy), groups=groups)
    return [
        [Sample(tuple(one.prompt_ids), tuple(one.completion_ids), tuple(one.logprobs)) for one in group]
        for group in drawn
    ]


def _train(
    trainer: Policy,
    drawn: Sequence[Sequence[Sample]],
    truth: Sequence[Read],
    *,
    spec: RunSpec,
    execution: Execution,
    steps: int,
) -> None:
    groups = []
    for samples, known in zip(drawn, truth, strict=True):
        parts = known.logprobs.split([len(one.completion_ids) for one in samples])
        own = tuple(replace(one, logprobs=tuple(part.tolist())) for one, part in zip(samples, parts, strict=True))
        groups.append(Group(0, tuple(float(2 * at < len(samples)) for at in range(len(samples))), own))
    optimizer = make_optimizer(trainer.model, spec.training)
    for step in range(steps):
        train_step(trainer.model, optimizer, groups, spec=spec, step=step, execution=execution)
    trainer.model.eval()


@torch.no_grad()
def _prefilled(model: PreTrainedModel, row: PackedRow, spec: RunSpec) -> Read:
    """Prefill a row's samples as lines of their own, padded behind their ends, as a verifier does."""
    assert row.layout is not None
    with noted_choices(routers(model)) as noted:
        states_SWD = model.base_model(input_ids=row.ids[0][row.layout.columns], use_cache=False).last_hidden_state
    states_ND = states_SWD.flatten(0, 1)[row.layout.flat_index][row.predicts]
    logprobs = head_logprobs(states_ND, output_head(model), row.targets, temperature=spec.sampling.temperature)
    return Read(logprobs, torch.stack([chosen for (chosen,) in noted])[:, row.layout.flat_index])


@torch.no_grad()
def _trained(
    model: PreTrainedModel, row: PackedRow, spec: RunSpec, autocast: torch.dtype | None, *, replayed: Tensor | None
) -> Read:
    choices = None if replayed is None else choices_of_lines(list(replayed), lines=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(packed_attention(model))
        stack.enter_context(torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False))
        if choices is not None:
            stack.enter_context(replayed_choices(model, choices[0], torch.ones(row.ids.numel(), dtype=torch.bool)))
        noted = stack.enter_context(noted_choices(routers(model)))
        states_ND = final_states(model, row)
    logprobs = head_logprobs(states_ND, output_head(model), row.targets, temperature=spec.sampling.temperature)
    return Read(logprobs, torch.stack([chosen for (chosen,) in noted]))


def _compared(
    model: PreTrainedModel,
    rows: Sequence[PackedRow],
    truth: Sequence[Read],
    spec: RunSpec,
    autocast: torch.dtype | None,
) -> dict[str, float]:
    own = [_trained(model, row, spec, autocast, replayed=None) for row in rows]
    again = [
        _trained(model, row, spec, autocast, replayed=known.experts) for row, known in zip(rows, truth, strict=True)
    ]
    is_other = [
        (a.experts.sort(-1).values != b.experts.sort(-1).values).any(-1) for a, b in zip(own, truth, strict=True)
    ]
    has_other = torch.cat([each.any(0)[row.predicts] for each, row in zip(is_other, rows, strict=True)])
    found = {
        "other_experts": float(torch.cat([each.flatten() for each in is_other]).double().mean()),
        "tokens_with_any": float(has_other.double().mean()),
    }
    for name, one in (("own", own), ("replayed", again)):
        log_ratio = torch.cat([a.logprobs - b.logprobs for a, b in zip(one, truth, strict=True)]).double()
        found |= {
            f"{name}_rms": float(log_ratio.square().mean().sqrt()),
            f"{name}_rms_with_other": float(log_ratio[has_other].square().mean().sqrt()) if has_other.any() else 0.0,
            f"{name}_largest": float(log_ratio.abs().max()),
            f"{name}_kl": float((log_ratio.exp() - log_ratio - 1).mean()),
        }
    return found
