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
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.modelling import long_memory
from benchmarks.modelling.exact import decode_difference
from benchmarks.modelling.verified import PolicyTrial
from benchmarks.report import say
from benchmarks.warm_start import save_warmed_up
from coordinator.calibration.cheats import FORGERIES, ForgedFrameEngine
from coordinator.lab.processes.layout import family_run_toml
from node.protocol.run import parse_run_toml

FAMILY = "frame-action"
GROUPS_AT_ONCE = 32
COMPARED_ROLLOUTS = 64


def measure_frames(options: argparse.Namespace) -> dict[str, float]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.safetensors"
        save_warmed_up(path, options.warm_start, family=FAMILY, seed=options.seed)
        found = measure_trial(PolicyTrial(parse_run_toml(family_run_toml(FAMILY)), path), options)
    return found | long_memory.measure(steps=options.steps or long_memory.STEPS)


def measure_trial(trial: PolicyTrial, options: argparse.Namespace) -> dict[str, float]:
    """Measure honest work of at least `--chunks` chunks, and each forgery."""
    drawn = trial.draw_chunks(options.chunks, at_once=GROUPS_AT_ONCE)
    texts = [[*rollout.prompt_ids, *rollout.completion_ids] for group in drawn for rollout in group][:COMPARED_ROLLOUTS]
    found = {
        "decode_vs_prefill_fp32_frame_action": max(
            decode_difference(trial.policy.model, torch.tensor([ids])) for ids in texts
        ),
        "frames_honest_groups": len(drawn),
        **{f"frames_{figure}": value for figure, value in trial.honest(drawn).items()},
    }
    shares = {}
    for name, forge in FORGERIES.items():
        shares[name] = trial.caught(options.cheat_groups, make=partial(ForgedFrameEngine, forge=forge))
        say(f"{name}: {shares[name]:.3f}")
    found |= {f"forged_{name}_detected": share for name, share in shares.items()}
    return found | {"forged_frame_detected": min(shares.values())}
