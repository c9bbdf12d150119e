"""Speeds of GPUs that a plan assumes, by their memory: vendors' data sheets, and guessed shares of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CardSpeed:
    """`operations` a second in 16 bits without sparsity, and `bandwidth` of its memory in bytes a second."""

    name: str
    operations: float
    bandwidth: float


SPEEDS: Final = {
    24: CardSpeed("RTX 4090", 165e12, 1.008e12),
    40: CardSpeed("A100 40 GB", 312e12, 1.555e12),
    48: CardSpeed("L40S", 362e12, 0.864e12),
    80: CardSpeed("A100 80 GB", 312e12, 2.039e12),
    141: CardSpeed("H200", 989e12, 4.8e12),
    192: CardSpeed("B200", 2250e12, 8.0e12),
}
"""By gigabytes; of two cards of a size the slower one. Each from its vendor's data sheet."""
COMPUTE_SHARE: Final = 0.4
"""Of those operations that training and prefills reach. Guessed."""
BANDWIDTH_SHARE: Final = 0.5
"""Of that bandwidth that decoding reaches. Guessed."""


def speed_of(memory: int) -> CardSpeed:
    """Return the largest card of the table with no more than `memory` bytes, or its smallest."""
    fitting = [size for size in SPEEDS if size * 10**9 <= memory]
    return SPEEDS[max(fitting, default=min(SPEEDS))]
