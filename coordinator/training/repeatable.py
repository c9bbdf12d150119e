"""Training steps that a restarted trainer repeats to the same bytes, on a GPU too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Compute the same numbers from the same numbers each time within the context; a CPU does so anyway.

    On a GPU gradients of attention and of gathered rows would else be summed in whatever order they come. An operation
    that has no such form, in a loss of an operator's own, raises RuntimeError. Products need `find_device`'s settings.
    """
    if device.type != "cuda":
        yield
        return
    settings: Any = torch.utils.deterministic
    before, filled = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # nothing reads what it has not written
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        settings.fill_uninitialized_memory = filled
