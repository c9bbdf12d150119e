"""How evenly a step's tokens meet the experts of a mixture.

Nothing is done about it: no loss of a run has a term for balance. A router that collapses onto few experts trains the
others no more, and where each process has experts of its own, all wait for the busiest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coordinator.training.world import World
from node.policy.experts import routers


class ExpertLoad:
    """Choices by layer and expert [layers, E] of the forward passes within `counted_experts`; none without experts."""

    def __init__(self, model: PreTrainedModel) -> None:
        found = routers(model)
        self._chosen = found[0].top_k if found else 0
        self._counts = [torch.zeros(each.num_experts, dtype=torch.int64, device=model.device) for each in found]
        self.is_counting = True

    def add(self, layer: int, _router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Count what a router chose [tokens, k], the last that it returns; a forward hook of the router."""
        if self.is_counting:
            counts = self._counts[layer]
            counts += torch.bincount(output[2].flatten(), minlength=len(counts))

    def means(self, world: World) -> dict[str, float]:
        """Return means over the layers of all processes' tokens; {} without experts or tokens.

        `busiest_expert` is the share of tokens that meet a layer's busiest expert, and `expert_entropy` that of the
        choices in parts of its largest value: 1 where all experts are chosen as often, 0 where it is always one.
        """
        if not self._counts:
            return {}
        counts = world.total(torch.stack(self._counts).double().cpu())
        if not counts.any():
            return {}
        shares = counts / counts.sum(1, keepdim=True)
        entropy = torch.special.entr(shares).sum(1) / math.log(max(2, counts.shape[1]))
        return {
            "busiest_expert": float(shares.amax(1).mean()) * self._chosen,
            "expert_entropy": float(entropy.mean()),
        }


@contextmanager
def counted_experts(model: PreTrainedModel) -> Iterator[ExpertLoad]:
    """Count the experts that tokens meet in `model` within the context, but for while `is_counting` is unset.

    A layer whose activations are recomputed counts each token twice, and so every share as it is.
    """
    load = ExpertLoad(model)
    handles = [router.register_forward_hook(partial(load.add, layer)) for layer, router in enumerate(routers(model))]
    try:
        yield load
    finally:
        for handle in handles:
            handle.remove()
