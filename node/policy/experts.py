"""Mixtures of experts: each token meets the few experts that a layer's router chose for it.

Every family's own router decides, and `compute_experts` computes what it decided, by transformers' interface for that.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

from node.policy.products import multiply

SORTED: Final = "swarmproof_sorted"


def compute_experts(module: Any, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute the weighted sum of each token's experts [T, D]; called by transformers' experts.

    Tokens are sorted by expert, so that each expert's matrices are used once. A token's results are summed in float32
    and rounded once: which of its experts comes first changes nothing but that sum's last bit.
    """
    if hidden_TD.is_meta:  # shapes alone, which do not depend on what was chosen
        found: Tensor = batched_mm_experts_forward(module, hidden_TD, chosen_TK, weights_TK)
        return found
    tokens, most = chosen_TK.shape
    places = chosen_TK.flatten().argsort(stable=True)
    counts = torch.bincount(chosen_TK.flatten(), minlength=module.num_experts)
    # As in `head`, `embedding` sums the gradients of one token's several places in a fixed order.
    states = F.embedding(places // most, hidden_TD)
    rows = _Rows(counts, is_transposed=module.is_transposed)
    first, last = ("gate_up_proj", "down_proj")
    gate_up = rows.multiply(states, getattr(module, first), getattr(module, f"{first}_bias", None))
    found = rows.multiply(module._apply_gate(gate_up), getattr(module, last), getattr(module, f"{last}_bias", None))  # noqa: SLF001  (the interface's)
    weighted = found * F.embedding(places, weights_TK.reshape(-1, 1))
    back = torch.empty_like(places)
    back[places] = torch.arange(len(places), device=places.device)
    summed = F.embedding(back, weighted).view(tokens, most, -1).sum(1, dtype=torch.float32)
    return summed.to(hidden_TD.dtype)


def routers(model: nn.Module) -> list[Any]:
    """Return the routers of a model's layers; none without experts. Each chooses `top_k` of `num_experts`."""
    return [module for module in model.modules() if hasattr(module, "top_k") and hasattr(module, "weight")]


def use_exact_routers(model: nn.Module) -> None:
    """Have the routers of `model` compute in their weights' dtype under autocast too, in place.

    Some compute in float32 in every engine, which autocast would turn back: a trainer would choose other experts.
    """
    for router in routers(model):
        router.__class__ = _exact(type(router))  # type: ignore[arg-type]  # classes are hashable


@cache
def _exact(kind: type[nn.Module]) -> Any:
    def forward(self: Any, states: Tensor) -> Any:
        device = "cpu" if states.is_meta else states.device.type
        with torch.autocast(device, enabled=False):
            return kind.forward(self, states.to(self.weight.dtype))

    return type(kind.__name__, (kind,), {"forward": forward})


class _Rows:
    """States sorted by expert, of which `counts` [E] belong to each."""

    def __init__(self, counts: Tensor, *, is_transposed: bool) -> None:
        self._counts, self._is_transposed = counts, is_transposed

    def multiply(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply states [N, in] by their experts' matrices of weight [E, out, in] (or [E, in, out]); add a bias."""
        if torch.is_autocast_enabled(states.device.type):
            # Which knows nothing of grouped products.
            dtype = torch.get_autocast_dtype(states.device.type)
            states, weight, bias = states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        matrices = weight.transpose(-2, -1) if self._is_transposed else weight
        if not _is_grouped(states, matrices):
            return self._one_by_one(states, matrices, bias)
        ends = self._counts.cumsum(0, dtype=torch.int32)
        product = F.grouped_mm(states, matrices.transpose(-2, -1), offs=ends)
        if bias is None:
            return product
        owner = torch.repeat_interleave(self._counts, output_size=len(states))
        return product + F.embedding(owner, bias)

    def _one_by_one(self, states: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply expert by expert, by the products of all other layers."""
        ends = [0, *accumulate(self._counts.tolist())]
        # Whole tensors are taken apart at once: the gradient of each single one would be as large as all.
        apart, biases = matrices.unbind(), [None] * len(matrices) if bias is None else bias.unbind()
        parts = [
            multiply(states[start:end], matrix, added)
            for (start, end), matrix, added in zip(pairwise(ends), apart, biases, strict=True)
            if start < end
        ]
        return torch.cat(parts) if parts else states.new_empty(0, matrices.shape[1])


def _is_grouped(states: Tensor, matrices: Tensor) -> bool:
    """Tell whether torch's grouped product is used: where it has gradients to compute, or a GPU of its own kernel."""
    if states.is_cuda:
        return states.dtype == torch.bfloat16 and torch.cuda.get_device_capability(states.device) >= (8, 0)
    return torch.is_grad_enabled() and (states.requires_grad or matrices.requires_grad)


ALL_EXPERTS_FUNCTIONS.register(SORTED, compute_experts)
