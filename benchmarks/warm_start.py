"""The warm start of `model.initial`, or a share of it (`--warm-start`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from coordinator.training.warm_start import DEFAULT_SEED, FAMILY_STAGES, STAGES, WarmStartStage, warm_start
from node.policy.file import save_policy


def add_warm_start(parser: argparse.ArgumentParser) -> None:
    """Add `--warm-start`."""
    parser.add_argument("--warm-start", type=float, default=1.0, help="share of the warm start's steps (default 1)")


def shortened(stages: Sequence[WarmStartStage], share: float) -> tuple[WarmStartStage, ...]:
    """Return the stages with `share` of their steps, at least one each."""

    def of(steps: int) -> int:
        return max(1, int(steps * share))

    return tuple(replace(stage, steps=of(stage.steps), warmup_steps=of(stage.warmup_steps)) for stage in stages)


def warmed_up(
    share: float, *, family: str = "tiny", seed: int = DEFAULT_SEED
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Warm-start the tiny policy of a family with `share` of the steps; return it with its tokenizer."""
    return warm_start(family, seed=seed, stages=shortened(FAMILY_STAGES.get(family, STAGES), share))


def save_warmed_up(path: Path, share: float, *, family: str = "tiny", seed: int = DEFAULT_SEED) -> Path:
    """Save such a policy in `path`, and return that."""
    save_policy(*warmed_up(share, family=family, seed=seed), path)
    return path
