"""Training steps that a restarted trainer repeats to the same bytes, on a GPU too: nothing in them is random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from node.policy.models.base import RecurrentForCausalLM


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


def set_training(model: PreTrainedModel) -> None:
    """Put a model in training mode, without dropout, whatever its configuration says.

    Rollouts are drawn without it. A model with attention is left in evaluation mode, but for the layers themselves,
    which recompute their activations in training mode alone.
    """
    model.train(isinstance(model, RecurrentForCausalLM))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
