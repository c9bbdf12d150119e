"""Norms by the root mean square in two kernels, where transformers' modules launch eight.

The numbers are theirs: mean and quotient in float32, rounded to the model's dtype, times the weight. On a CPU they are
the same to the last bit; a GPU's kernel may add in another order, as its products do. Where layers are narrow, a GPU
waits for the launches and not for the products.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def use_short_norms(model: nn.Module) -> None:
    """Have the norms of `model` that compute as Llama's do so by `torch.nn.functional.rms_norm`, in place.

    With gradients and under autocast, which knows these norms by name, they stay transformers' own.
    """
    for module in model.modules():
        if _is_llamas(type(module)):
            module.__class__ = _short(type(module))  # type: ignore[arg-type]  # classes are hashable


def _is_llamas(kind: type[nn.Module]) -> bool:
    """Tell whether a class has the very instructions of Llama's norm: families copy it, or change a line of it."""
    own: Any = getattr(kind.forward, "__code__", None)
    code = LlamaRMSNorm.forward.__code__
    return own is not None and (own.co_code, own.co_names, own.co_consts) == (
        code.co_code,
        code.co_names,
        code.co_consts,
    )


@cache
def _short(kind: type[nn.Module]) -> Any:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        device = hidden_states.device.type
        if torch.is_grad_enabled() or device == "meta" or torch.is_autocast_enabled(device):
            return kind.forward(self, hidden_states)  # type: ignore[no-any-return]
        states = F.rms_norm(hidden_states, hidden_states.shape[-1:], None, self.variance_epsilon)
        return self.weight * states  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {"forward": forward})
