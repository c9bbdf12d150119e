"""The part of a run's rules on how its policy is trained (docs/training.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from msgspec import UNSET, Meta, UnsetType

from node.protocol.spec_types import NonNegativeFloat, Positive, PositiveFloat
from shardcast.wire import Wire

_Separate = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Projection = Literal[_Separate, "qkv_proj", "gate_up_proj"]
"""The linear layers of a family with attention, by PEFT's names; the last two are several in one."""


class LoraSpec(Wire, frozen=True):
    """Low-rank adapters (arXiv 2106.09685): of weight + alpha / rank * B A, only A and B are trained.

    They are merged before a policy is published, so that others see an ordinary one.
    """

    rank: Annotated[int, Meta(ge=1, le=1024)]
    alpha: PositiveFloat
    targets: Annotated[tuple[Projection, ...], Meta(min_length=1, max_length=9)] = get_args(_Separate)

    def __post_init__(self) -> None:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError("lora.targets names a layer twice")

    def parameters(self, widths: Mapping[str, int]) -> int:
        """Return how many numbers the adapters have; `widths`: by name of a layer, the sum of inputs and outputs."""
        return self.rank * sum(widths.get(target, 0) for target in self.targets)


class TeacherSpec(Wire, frozen=True):
    """On-policy distillation: `coefficient` weighs KL(policy || model in `folder`), per token that workers drew."""

    folder: Annotated[str, Meta(min_length=1, max_length=500)]
    coefficient: PositiveFloat


class TrainingSpec(Wire, frozen=True):
    """GRPO as in INTELLECT-2 (arXiv 2505.07291), with the choices of docs/training.md.

    `objective`: "clipped" bounds ratios by `clip_epsilon` (upwards `clip_epsilon_high`, where given) and `clip_delta`,
    "masked" leaves out tokens whose ratio is beyond `mask_low` and `mask_high`, "cispo" weighs log-probabilities by
    their ratios, at most `clip_delta`. `ratio`: each token's own (unset), or the geometric mean of its completion's.
    `aggregation`: a step's loss is the mean over tokens (unset), over completions of their means, or the sum of tokens
    over completions times `sampling.max_new_tokens`. `overlong_share`: the last part of `max_new_tokens`, in which
    a completion loses up to 1 of its reward. `kl_coefficient` pulls towards the first policy,
    `entropy_coefficient` away from certainty. `muon_momentum` is Muon's alone, `beta1` and `beta2` AdamW's.
    `loss`: the loss of an installed package in place of these objectives and the KL penalty, as NAME or NAME==VERSION.
    `lora`: what is trained in place of all weights. `teacher`: a model that the policy nears.
    """

    steps: Positive = 30
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: PositiveFloat = 2e-4
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    muon_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 4
    minibatches: Positive = 4
    objective: Literal["clipped", "masked", "cispo"] = "clipped"
    clip_epsilon: PositiveFloat = 0.2
    clip_delta: PositiveFloat = 4.0
    mask_low: Annotated[float, Meta(ge=0, le=1)] = 0.5
    mask_high: Annotated[float, Meta(ge=1, le=1e9)] = 5.0
    kl_coefficient: NonNegativeFloat = 0.0
    entropy_coefficient: NonNegativeFloat = 0.0
    gradient_clip: PositiveFloat = 1.0
    normalize_advantage: bool = True
    ratio: Literal["token", "sequence"] | UnsetType = UNSET
    aggregation: Literal["tokens", "completions", "length"] | UnsetType = UNSET
    clip_epsilon_high: PositiveFloat | UnsetType = UNSET
    overlong_share: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    loss: Annotated[str, Meta(min_length=1, max_length=200)] | UnsetType = UNSET
    lora: LoraSpec | UnsetType = UNSET
    teacher: TeacherSpec | UnsetType = UNSET

    def __post_init__(self) -> None:
        if isinstance(self.lora, LoraSpec) and self.optimizer == "muon":
            raise ValueError("training.lora needs the optimizer adamw: Muon is for whole matrices, not factors")
