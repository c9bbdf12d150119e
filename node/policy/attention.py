"""What the layers of a policy with attention attend to, and how, by its configuration alone."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import sdpa_mask

from node.policy.families import ATTENTION_FAMILIES, FULL, LAYER_KINDS, LINEAR, SLIDING, WINDOW

CAPPED: Final = "swarmproof_capped"
SCORES: Final = 2**26
"""Attention scores in memory at a time, where no kernel does without: 256 MiB, and a few tensors of that size."""


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return of each layer how many tokens one attends to, itself included; None for all before it."""
    window: int | None = getattr(config, WINDOW, None)
    kinds: list[str] | None = getattr(config, LAYER_KINDS, None)
    layers: int = config.num_hidden_layers
    return [window] * layers if kinds is None else [window if kind == SLIDING else None for kind in kinds]


def kernel_of(config: PreTrainedConfig) -> str:
    """Return the kernel that computes all that the configuration asks for: `sdpa` ignores caps of scores, and sinks."""
    family = ATTENTION_FAMILIES[config.model_type]
    is_capped = family.score_cap is not None and getattr(config, family.score_cap) is not None
    return CAPPED if is_capped or family.has_sinks else "sdpa"


def visible(position_ids: Tensor, *, columns: int, window: int | None) -> Tensor:
    """Return which of `columns` columns the tokens at `position_ids` [..., Q] attend to, as [..., Q, columns]."""
    column, ends = torch.arange(columns, device=position_ids.device), position_ids[..., None]
    return column <= ends if window is None else (column <= ends) & (column > ends - window)


def layer_masks(
    config: PreTrainedConfig, position_ids: Tensor, *, columns: int, dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None]:
    """Return the masks [B, 1, Q, columns] that are added to the scores, as transformers' models take them.

    One for all layers, or one by the kind of layer where these differ; a LINEAR layer has none. `position_ids` [B, Q]
    are the tokens' columns.
    """

    def added(window: int | None) -> Tensor:
        seen = visible(position_ids, columns=columns, window=window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=position_ids.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    if ATTENTION_FAMILIES[config.model_type].is_hybrid:
        return {FULL: added(None), LINEAR: None}
    windows = set(layer_windows(config))
    if getattr(config, LAYER_KINDS, None) is None or windows == {None}:
        return added(windows.pop())
    return {FULL: added(None), SLIDING: added(getattr(config, WINDOW))}


def attend_capped(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function called by transformers, with scores bounded by x -> softcap tanh(x / softcap) before the mask.

    `s_aux` [H] are each head's sink: the score of one more column, whose value is 0. Of queries [B, H, Q, D], keys and
    values [B, G, K, D]: [B, Q, H, D]. A mask [B or 1, 1, Q, K] is added, or says what is seen; without one the Q = K
    tokens see those up to their own. In float32, since in 16 bits a score of 40 is off by an eighth. At most SCORES
    scores are in memory at a time.
    """
    batch, heads, tokens, size = query.shape
    groups, columns = key.shape[1:3]
    wide, values = key.float().transpose(2, 3), value.float()
    parts = []
    step = max(1, SCORES // (batch * heads * columns))
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        count = rows.stop - first
        # The heads that share keys are queries of theirs, so that no key is copied.
        shared = query[:, :, rows].float().reshape(batch, groups, -1, size)
        scores = torch.matmul(shared, wide)
        scores = scores.mul(scaling) if softcap is None else scores.mul(scaling / softcap).tanh().mul(softcap)
        scores = scores.view(batch, groups, heads // groups, count, columns)
        if attention_mask is None:
            mask = visible(torch.arange(first, rows.stop, device=query.device), columns=columns, window=None)
        else:
            mask = attention_mask[:, None, :, rows]
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        if s_aux is not None:
            sinks = s_aux.float().view(groups, -1, 1, 1).expand(batch, -1, -1, count, 1)
            scores = torch.cat([scores, sinks], -1)
        shares = scores.softmax(-1)[..., :columns]
        attended = torch.matmul(shares.reshape(batch, groups, -1, columns), values)
        parts.append(attended.view(batch, heads, count, -1))
    return torch.cat(parts, 2).transpose(1, 2).to(query.dtype), None


AttentionInterface.register(CAPPED, attend_capped)
AttentionMaskInterface.register(CAPPED, sdpa_mask)
