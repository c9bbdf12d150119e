"""Attention over packed rows: each sample attends to its own tokens, its prompt's among them, and to no others.

All that a layer computes of each token by itself is computed over the row, where a prompt stands once. For attention
alone queries, keys and values are gathered into a line for each sample, by the row's `Layout`. So attention costs the
square of a sample instead of the square of a row, and torch's causal kernels need no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from coordinator.training.packing import Layout, Row
from node.policy_config import ATTENTION

KERNEL = "veriswarm_packed"


@contextmanager
def packed_attention(*models: PreTrainedModel | None) -> Iterator[None]:
    """Within it, those of `models` that have attention compute it by the layout of their row."""
    changed = [model for model in models if model is not None and model.config.model_type in ATTENTION]
    before = [_kernel(model) for model in changed]
    for model in changed:
        model.set_attn_implementation(KERNEL)
    try:
        yield
    finally:
        for model, kernel in zip(changed, before, strict=True):
            model.set_attn_implementation(kernel)


def attending(model: PreTrainedModel, row: Row) -> dict[str, Layout]:
    """What the model's forward pass has to be told of a row besides its ids and positions.

    Raises ValueError where the model would not heed it, outside of `packed_attention` or because it is recurrent.
    """
    if row.layout is None:
        return {}
    if _kernel(model) != KERNEL:
        raise ValueError(f"a {model.config.model_type} model does not attend by a row's layout here")
    return {"layout": row.layout}


def attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: a row's queries, keys and values [1, heads, L, D] to [1, L, heads, D].

    Places behind a sample's end hold column 0's, and what is computed there is dropped.
    """
    assert attention_mask is None
    query, key, value = (_lines(each, layout) for each in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    shares_keys = groups > 1
    if shares_keys and query.is_cuda and query.dtype == torch.float32:
        # CUDA's kernels that know of heads that share keys either take no float32, or keep all scores in memory.
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        shares_keys = False
    attended = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=shares_keys
    )
    flat: Tensor = attended.transpose(1, 2).flatten(0, 1)
    return flat[layout.places][None], None


def _lines(row: Tensor, layout: Layout) -> Tensor:
    """[1, heads, L, D] to [S, heads, W, D]. A prompt's columns are in several lines, and what these give back is added
    in one order by `embedding`, whatever the number of threads; indexing adds as it comes.
    """
    heads_LHD = row[0].transpose(0, 1)
    lines = F.embedding(layout.columns, heads_LHD.flatten(1))
    return lines.view(*layout.columns.shape, *heads_LHD.shape[1:]).transpose(1, 2)


def _kernel(model: PreTrainedModel) -> str:
    found: str = model.config._attn_implementation  # noqa: SLF001  (transformers sets it by a method, and reads it so)
    return found


AttentionInterface.register(KERNEL, attend)
