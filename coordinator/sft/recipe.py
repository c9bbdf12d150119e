"""What decides the result of a fine-tuning, and what its state folder keeps of that."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET

from coordinator.sft.rows import RowColumns
from coordinator.training.supervised import CosineSchedule
from node.protocol.run import LoraSpec, TrainingSpec

FORMAT = "sft/1"
WARMUP_PERCENT = 3


class SftRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that decide the result; others affect rounding, or what is shown.

    A batch is `batch` examples, and the last one of an epoch what is left. Examples of more than `max_tokens` are left
    out (None: the model's positions, at most 4,096). `held_out` is a share of the rows. `warmup_steps` None is 3 % of
    all, and the rate ends at `final_rate` of its peak. `end_mark` is a token that becomes one of the model's. `lora`
    are adapters to train in place of all weights, by AdamW.
    """

    columns: RowColumns = RowColumns()
    each_turn: bool = False
    end_mark: str | None = None
    max_tokens: int | None = None
    held_out: float = 0.02
    seed: int = 0
    epochs: int = 1
    batch: int = 64
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 2e-5
    warmup_steps: int | None = None
    final_rate: float = 0.05
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    lora: LoraSpec | None = None

    def __post_init__(self) -> None:
        self.training()

    def training(self) -> TrainingSpec:
        """Return the settings of optimizer and adapters; raises ValueError where they contradict each other."""
        return TrainingSpec(
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            lora=self.lora or UNSET,
        )

    def steps_per_epoch(self, examples: int) -> int:
        """Count the batches of so many examples."""
        return -(-examples // self.batch)

    def schedule(self, examples: int) -> CosineSchedule:
        """Return the learning rates of a training on so many examples."""
        steps = self.epochs * self.steps_per_epoch(examples)
        warmup = steps * WARMUP_PERCENT // 100 if self.warmup_steps is None else self.warmup_steps
        return CosineSchedule(self.learning_rate, steps, warmup, self.final_rate)


class DataCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Examples to train on and held out, their tokens, and those left out as too long, of which some lines."""

    training: int
    held_out: int
    tokens: int
    learnt_tokens: int
    too_long: int
    too_long_lines: tuple[int, ...]


class PreparedSft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The index of a state folder: what it belongs to. `model` and `data` are digests; `dtype` is the result's."""

    format: str = FORMAT
    recipe: SftRecipe
    model: str
    data: str
    dtype: str
    counts: DataCounts
