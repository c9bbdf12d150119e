"""Attention over packed rows: each sample attends to its own tokens, its prompt included, and to no others.

Per-token computation runs over the packed row, where a prompt stands once. Only for attention are queries, keys and
values gathered into one line per sample, by the row's `PackedLayout`. So attention costs the square of a sample, not of
a row, and torch's causal kernels need no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from coordinator.training.packing import PackedLayout, PackedRow
from node.policy.config import ATTENTION

KERNEL = "swarmproof_packed"


@contextmanager
def packed_attention(*models: PreTrainedModel | None) -> Iterator[None]:
    """Switch attention models to packed attention within the context."""
    changed = [model for model in models if model is not None and model.config.model_type in ATTENTION]
    before = [_kernel(model) for model in changed]
    for model in changed:
        model.set_attn_implementation(KERNEL)
    try:
        yield
    finally:
        for model, kernel in zip(changed, before, strict=True):
            model.set_attn_implementation(kernel)


def layout_arguments(model: PreTrainedModel, row: PackedRow) -> dict[str, PackedLayout]:
    """Return the extra forward arguments of a packed row.

    Raises ValueError if the model would ignore them, i.e. outside of `packed_attention`.
    """
    if row.layout is None:
        return {}
    if _kernel(model) != KERNEL:
        raise ValueError(f"a {model.config.model_type} model ignores the row's layout outside of packed_attention")
    return {"layout": row.layout}


def attend_packed(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function called by transformers: queries, keys and values [1, heads, L, D] to [1, L, heads, D].

    Positions behind a sample's end hold column 0's values; their results are dropped. `attention_dropout` of a
    configuration is ignored: a ratio of probabilities means nothing under random masks.
    """
    assert attention_mask is None
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        # Norms and positions leave queries and keys in float32, for which every sample's would be gathered and copied.
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (each.to(dtype) for each in (query, key, value))
    query, key, value = (_gather_samples(each, layout) for each in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    shares_keys = groups > 1
    if shares_keys and query.is_cuda and query.dtype == torch.float32:
        # CUDA's grouped-query kernels either take no float32, or materialise all scores.
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        shares_keys = False
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shares_keys)
    line: Tensor = _FromSamples.apply(attended.transpose(1, 2).flatten(2), layout)  # type: ignore[no-untyped-call]
    return line.view(1, -1, *attended.shape[1::2]), None


def _gather_samples(row: Tensor, layout: PackedLayout) -> Tensor:
    """Gather [1, heads, L, D] into [S, heads, W, D]."""
    _, heads, _, size = row.shape
    gathered: Tensor = _ToSamples.apply(row[0].transpose(0, 1).flatten(1), layout)  # type: ignore[no-untyped-call]
    return gathered.view(*layout.columns.shape, heads, size).transpose(1, 2)


class _ToSamples(torch.autograd.Function):
    """Gather a row [L, F] into its samples [S, W, F].

    Its gradient is gathered as well, since the layout knows where each column went: torch's own would look for equal
    indices, and add up in a fixed order only where that is asked for, which takes a GPU a sort each time.
    """

    @staticmethod
    def forward(ctx: Any, row_LF: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return F.embedding(layout.columns, row_LF)

    @staticmethod
    def backward(ctx: Any, grad_SWF: Tensor) -> tuple[Tensor, None]:
        layout: PackedLayout = ctx.layout
        grad_LF = F.embedding(layout.flat_index, grad_SWF.flatten(0, 1))
        for prompt in layout.prompts:
            others = grad_SWF[prompt.sample : prompt.sample + prompt.samples - 1, : prompt.tokens]
            grad_LF[prompt.column : prompt.column + prompt.tokens] += others.sum(0)
        return grad_LF, None


class _FromSamples(torch.autograd.Function):
    """Gather a row [L, F] from its samples [S, W, F], a shared column from the last that has it."""

    @staticmethod
    def forward(ctx: Any, samples_SWF: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return F.embedding(layout.flat_index, samples_SWF.flatten(0, 1))

    @staticmethod
    def backward(ctx: Any, grad_LF: Tensor) -> tuple[Tensor, None]:
        layout: PackedLayout = ctx.layout
        columns = layout.columns
        places = torch.arange(columns.numel(), device=columns.device).view_as(columns)
        grad_SWF = F.embedding(columns, grad_LF)
        return grad_SWF.masked_fill_((layout.flat_index[columns] != places)[..., None], 0.0), None


def _kernel(model: PreTrainedModel) -> str:
    found: str = model.config._attn_implementation  # noqa: SLF001  (transformers sets it by a method, and reads it so)
    return found


AttentionInterface.register(KERNEL, attend_packed)
