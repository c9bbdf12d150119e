"""Result types of forced sampling, and the signature of a sampling rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """Forced tokens [B] int64 and their log-probabilities [B] float32, without noise.

    A row with NaN or +inf has a log-probability that is not finite, and an arbitrary token.
    """

    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class Peaks:
    """Per-row results, each [B]: the lowest token with the highest score, and that score; the largest logits / T, and
    the sum of exp(logits / T - largest), NaN in a row with NaN or +inf.
    """

    tokens: Tensor
    scores: Tensor
    largest: Tensor
    exponentials: Tensor


class Choose(Protocol):
    """Sampling rule: `choose`, or a replacement."""

    def __call__(
        self, logits: Tensor, seeds: Sequence[bytes], positions: Sequence[int], *, temperature: float
    ) -> Choice:
        """Choose tokens like `choose`."""
