"""The frame-based action model: exactness, who is caught that shows it other frames, and what long sequences are worth.

The policy is the warm-started one of `model.initial` = "frame-action", and the rules are the demonstration's.

- `decode_vs_prefill_fp32_frame_action`: hidden states of decoding step by step beside those of one prefill, over whole
  completions at the terminal (the states of random tokens would be of frames on which nothing happens);
- `frames_honest_rejected` of `frames_honest_groups`: groups of 8 that the torch engine drew, measured by the verifier's
  prefill; what drift of the node over all of them leads to counts too;
- `forged_frame_detected`: the worst kind's share of groups that are rejected whatever their node did before. The kinds:
  the target drawn one column further; the cursor drawn so; nothing drawn near the target; the target moved in the first
  frame alone, and all others right. Each worker's tokens, log-probabilities and proofs fit the frames that it showed;
- `frame_action_loss_slope`, `frame_action_loss_r2`: `long_memory`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.modelling import long_memory
from benchmarks.modelling.verified import SLOTS_AT_ONCE
from coordinator.calibration.cheats import FORGERIES, ForgedFrameEngine
from coordinator.calibration.fit import Group
from coordinator.calibration.measure import draw, measure
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.trial import try_groups
from coordinator.lab.processes.layout import family_run_toml
from coordinator.training.warm_start import warm_start
from node.engines.torch import TorchEngine
from node.policy.file import Policy, load_policy, save_policy
from node.protocol.run import RunSpec, parse_run_toml
from node.protocol.submission import Rollout
from node.verification.prefill import TransformersPrefill

FAMILY = "frame-action"
FORGED_GROUPS = 100
GROUPS_AT_ONCE = 32


def measure_frames(options: argparse.Namespace) -> dict[str, float]:
    """All of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.safetensors"
        save_policy(*warm_start(FAMILY, seed=options.seed), path)
        found = FrameTrial(path).measure(chunks=options.chunks)
    return found | long_memory.measure()


class FrameTrial:
    """A frame-based policy's file, and the demonstration's rules for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spec = parse_run_toml(family_run_toml(FAMILY))
        self._policy = load_policy(path, dtype=torch.float32)
        self._slots, self._prefill = SyntheticSlots(self._spec, self._policy), TransformersPrefill(self._policy)

    def measure(self, *, chunks: int, forged_groups: int = FORGED_GROUPS) -> dict[str, float]:
        """Figures of honest work, of at least so many chunks, and of each forgery."""
        drawn: list[list[Rollout]] = []
        while sum(len(rollout.proofs) for group in drawn for rollout in group) < chunks:
            drawn += self._drawn(TorchEngine, GROUPS_AT_ONCE)
        groups = self._measured(drawn)
        caught = try_groups(groups, self._spec.limits)
        every = [one for group in groups for one in group]
        found = {
            "decode_vs_prefill_fp32_frame_action": stepped(
                self._policy, [one for group in drawn for one in group][:64]
            ),
            "frames_honest_groups": len(groups),
            "frames_honest_chunks": sum(len(one.exponent_mismatches) for one in every),
            "frames_honest_rejected": caught.rejected_groups + caught.drifted_groups,
            "frames_honest_exponents": max(max(one.exponent_mismatches) for one in every),
            "frames_honest_mantissa": max(max(one.mantissa_means) for one in every),
            "frames_honest_margin": max(max(one.margins) for one in every),
            "frames_honest_logprob": max(max(one.errors) for one in every),
            "frames_honest_sketch": max(max(one.sketch_distances) for one in every),
        }
        for name, forge in FORGERIES.items():
            forged = self._measured(self._drawn(partial(ForgedFrameEngine, forge=forge), forged_groups))
            found[f"forged_{name}_detected"] = try_groups(forged, self._spec.limits).group_share
            print(f"{name}: {found[f'forged_{name}_detected']:.3f}", file=sys.stderr, flush=True)
        return found | {"forged_frame_detected": min(found[f"forged_{name}_detected"] for name in FORGERIES)}

    def _measured(self, drawn: list[list[Rollout]]) -> list[Group]:
        return list(measure(self._prefill, drawn, spec=self._spec))

    def _drawn(self, make: Callable[[RunSpec], TorchEngine], count: int) -> list[list[Rollout]]:
        return asyncio.run(self._draw(make(self._spec), count))

    async def _draw(self, engine: TorchEngine, count: int) -> list[list[Rollout]]:
        await engine.load(self._path, version=0)
        try:
            asked = [self._slots.requests(slot) for slot in self._slots.allocate(count)]
            return await draw(engine, asked, at_once=SLOTS_AT_ONCE)
        finally:
            await engine.close()


@torch.inference_mode()
def stepped(policy: Policy, rollouts: list[Rollout]) -> float:
    """The largest difference of a hidden state between decoding and a prefill."""
    base: Any = policy.model.base_model
    worst = 0.0
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        whole, state = base(input_ids=ids).last_hidden_state, None
        for column, expected in zip(ids.split(1, dim=1), whole.split(1, dim=1), strict=True):
            output = base(input_ids=column, state=state, use_cache=True)
            state, worst = output.state, max(worst, float((output.last_hidden_state - expected).abs().max()))
    return worst
