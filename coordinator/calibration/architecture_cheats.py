"""Cheats that only some architectures allow: poorer, fewer or other experts, and a shorter window of attention.

Each edits a loaded policy, its weights or its configuration, which a worker then serves in place of the run's. The
parameters of a module `experts` stack what each expert of a layer has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from coordinator.calibration.cheats import Edit, int4, noise
from node.policy.experts import routers

DROPPED: Final = 0
"""Number of the expert in each layer that contributes nothing."""


@torch.no_grad()
def drop_expert(model: PreTrainedModel) -> None:
    """Let one expert of each layer contribute nothing where it is chosen, as if its weights were not in memory."""
    for name, weight in _of_experts(model):
        if name.startswith("down_proj"):
            weight[DROPPED] = 0


@torch.no_grad()
def perturb_routers(model: PreTrainedModel, *, share: float) -> None:
    """Multiply each weight of the routers by 1 plus normal noise of deviation `share`."""
    for router in routers(model):
        router.weight.copy_(noise(router.weight, share=share))


@torch.no_grad()
def quantise_experts(model: PreTrainedModel) -> None:
    """Quantise the experts' matrices, and nothing else, to 4 bits."""
    for _, weight in _of_experts(model):
        if weight.ndim == 3:
            rows = weight.flatten(0, -2)
            rows.copy_(int4(rows))


def choose_one_fewer(model: PreTrainedModel) -> None:
    """Choose one expert fewer for each token."""
    config: Any = model.config
    config.num_experts_per_tok -= 1


def halve_window(model: PreTrainedModel) -> None:
    """Halve the window of the layers that have one."""
    config: Any = model.config
    config.sliding_window //= 2


def architecture_edits(config: PreTrainedConfig) -> dict[str, Edit]:
    """Return the edits that a policy's architecture allows, by the names under which calibrations report them."""
    found: dict[str, Edit] = {}
    chosen = getattr(config, "num_experts_per_tok", None)
    if chosen:
        found |= {
            "an expert dropped": drop_expert,
            "1 % noise on routers": partial(perturb_routers, share=0.01),
            "10 % noise on routers": partial(perturb_routers, share=0.1),
            "experts in int4": quantise_experts,
        }
        if chosen > 1:
            found["one expert fewer"] = choose_one_fewer
    if (getattr(config, "sliding_window", None) or 0) > 1:
        found["half the window"] = halve_window
    return found


def _of_experts(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of all layers' experts, by their last names."""
    for name, weight in model.named_parameters():
        if ".experts." in name:
            yield name.rpartition(".")[2], weight
