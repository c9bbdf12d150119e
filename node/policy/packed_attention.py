"""Attention over packed rows: each sample attends to its own tokens, its prompt included, and to no others.

Per-token computation runs over the packed row, where a prompt stands once. Only for attention are queries, keys and
values gathered into one line per sample, by the row's layout. So attention costs the square of a sample, not of a row,
and torch's causal kernels need no mask, but for a window that is shorter than the lines, and for queries of their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from node.policy.attention import attend_capped, visible
from node.policy.config import ATTENTION
from node.policy.families import ATTENTION_FAMILIES, RECURRENT_BLOCK
from node.policy.packed import PackedLayout, PackedParts

KERNEL = "swarmproof_packed"
LEAST_PART = 512
"""Queries that go through a mask together, if no window is longer: it hides few of the keys that they meet."""


@contextmanager
def packed_attention(*models: PreTrainedModel | None) -> Iterator[None]:
    """Switch attention models to packed attention within the context."""
    changed = [model for model in models if model is not None and model.config.model_type in ATTENTION]
    before = [_kernel(model) for model in changed]
    hooks = [hook for model in changed for hook in _gather_for_recurrences(model)]
    for model in changed:
        _set_kernel(model, KERNEL)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for model, kernel in zip(changed, before, strict=True):
            _set_kernel(model, kernel)


def can_share(config: PreTrainedConfig) -> bool:
    """Return whether sequences may share a row of such a model without gradients (`PackedParts`).

    A recurrent model's may not: it reads a sequence into a state, and a hybrid's layers do as well.
    """
    family = ATTENTION_FAMILIES.get(config.model_type)
    return family is not None and not family.is_hybrid


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a model that `can_share` to packed attention for good; it then reads nothing without a layout."""
    _set_kernel(model, KERNEL)


def layout_arguments(model: PreTrainedModel, layout: PackedLayout | None) -> dict[str, PackedLayout]:
    """Return the extra forward arguments of a row with this layout.

    Raises ValueError if the model would ignore them, i.e. outside of `packed_attention`.
    """
    if layout is None:
        return {}
    if _kernel(model) != KERNEL:
        raise ValueError(f"a {model.config.model_type} model ignores the row's layout outside of packed_attention")
    return {"layout": layout}


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout | PackedParts,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function called by transformers: queries, keys and values [1, heads, L, D] to [1, L, heads, D].

    Positions behind a sample's end hold its first column's values; their results are dropped. `attention_dropout` of a
    configuration is ignored: a ratio of probabilities means nothing under random masks.
    """
    assert attention_mask is None
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        # Norms and positions leave queries and keys in float32, for which every sample's would be gathered and copied.
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (each.to(dtype) for each in (query, key, value))
    attend = partial(
        _attend, module, window=sliding_window, scaling=scaling, softcap=softcap, s_aux=s_aux
    )  # of lines [S, heads, W, D] to [S, W, heads, D]
    if isinstance(layout, PackedParts):
        if layout.kept is not None:
            layer = cast("int", module.layer_idx)
            key, value = layout.kept.with_row(layer, key, value, keeping=layout.keeping)
        return _attend_parts(attend, query, key, value, layout), None
    attended = attend(*(_gather_samples(each, layout) for each in (query, key, value)))
    line: Tensor = _FromSamples.apply(attended.flatten(2), layout)  # type: ignore[no-untyped-call]
    return line.view(1, -1, *attended.shape[2:]), None


def _attend_parts(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, layout: PackedParts
) -> Tensor:
    """Attend part by part, of [1, heads, L, D] to [1, L, heads, D]; without gradients. Keys may be more, in front."""
    row = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    for part in layout.parts:
        queries = _gather_lines(query, part.queries)
        attended = attend(queries, *(_gather_lines(each, part.columns) for each in (key, value)))
        row[part.given] = attended.flatten(0, 1)[part.places]
    return row[None]


def _gather_for_recurrences(model: PreTrainedModel) -> Iterator[RemovableHandle]:
    """Have the recurrent blocks of a hybrid's layers read sample by sample, in place: gather what they read of a row
    [1, L, D] into its samples [S, W, D], and a row from what they give.
    """

    def gathered(_: nn.Module, __: tuple[()], given: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        samples = _ToSamples.apply(given["hidden_states"][0], given["layout"])  # type: ignore[no-untyped-call]
        return (), given | {"hidden_states": samples}

    def row(_: nn.Module, __: tuple[()], given: dict[str, Any], states_SWD: Tensor) -> Tensor:
        line: Tensor = _FromSamples.apply(states_SWD, given["layout"])  # type: ignore[no-untyped-call]
        return line[None]

    if not ATTENTION_FAMILIES[model.config.model_type].is_hybrid:
        return
    for name, block in model.named_modules():
        if name.endswith(f".{RECURRENT_BLOCK}"):
            yield block.register_forward_pre_hook(gathered, with_kwargs=True)
            yield block.register_forward_hook(row, with_kwargs=True)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attend causally to `window` tokens or to all before, of queries [S, heads, Q, D] to [S, Q, heads, D].

    The queries are those of the last Q of the keys' columns [S, groups, W, D].
    """
    columns = key.shape[2]
    skipped = columns - query.shape[2]
    window = window if window is not None and window < columns else None
    if softcap is None and s_aux is None:
        return _attend_by_kernel(query, key, value, skipped=skipped, window=window, scaling=scaling).transpose(1, 2)
    own = torch.arange(skipped, columns, device=query.device)
    seen = visible(own, columns=columns, window=window)[None, None] if skipped or window is not None else None
    assert scaling is not None
    with torch.autocast(query.device.type, enabled=False):
        attended, _ = attend_capped(module, query, key, value, seen, scaling=scaling, softcap=softcap, s_aux=s_aux)
    return attended


def _attend_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, skipped: int, window: int | None, scaling: float | None
) -> Tensor:
    """Attend by torch's kernels, of [S, heads, Q, D] to [S, heads, Q, D]; `skipped` columns have no query."""
    groups = query.shape[1] // key.shape[1]
    is_masked = window is not None or skipped > 0
    shares_keys = groups > 1
    if shares_keys and query.is_cuda and (query.dtype == torch.float32 or is_masked):
        # CUDA's grouped-query kernels either take no float32, or materialise all scores, as with a mask.
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        shares_keys = False
    kernel = partial(F.scaled_dot_product_attention, scale=scaling, enable_gqa=shares_keys)
    if not is_masked:
        return kernel(query, key, value, is_causal=True)
    parts = []
    columns, step = key.shape[2], max(window or 0, LEAST_PART)
    for first in range(skipped, columns, step):
        end, start = min(first + step, columns), 0 if window is None else max(0, first - window + 1)
        own = torch.arange(first - start, end - start, device=query.device)
        mask = visible(own, columns=end - start, window=window)
        queries = query[:, :, first - skipped : end - skipped]
        parts.append(kernel(queries, key[:, :, start:end], value[:, :, start:end], attn_mask=mask))
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _gather_samples(row: Tensor, layout: PackedLayout) -> Tensor:
    """Gather [1, heads, L, D] into [S, heads, W, D]."""
    _, heads, _, size = row.shape
    gathered: Tensor = _ToSamples.apply(row[0].transpose(0, 1).flatten(1), layout)  # type: ignore[no-untyped-call]
    return gathered.view(*layout.columns.shape, heads, size).transpose(1, 2)


def _gather_lines(row: Tensor, columns: Tensor) -> Tensor:
    """Gather `columns` [S, W] of [1, heads, L, D] into [S, heads, W, D], without gradients."""
    _, heads, _, size = row.shape
    return F.embedding(columns, row[0].transpose(0, 1).flatten(1)).view(*columns.shape, heads, size).transpose(1, 2)


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
    found: str = model.config._attn_implementation  # noqa: SLF001  (transformers has no other name for it)
    return found


def _set_kernel(model: PreTrainedModel, kernel: str) -> None:
    """Set what the layers of a model attend by, in the one configuration that they share.

    transformers' method looks for others in all modules, which takes a verification of a small group a fiftieth.
    """
    model.config._attn_implementation = kernel  # noqa: SLF001


AttentionInterface.register(KERNEL, attend_packed)
