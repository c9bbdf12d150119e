"""The recurrence of Eagle and Finch (arXiv 2404.05892, section 4), token by token and in parallel chunks.

Each head holds a matrix S [N, N] and reads and writes it with vectors of N = HEAD_SIZE:

    o_t = r_t (diag(u) k_t^T v_t + S)
    S  <- diag(w_t) S + k_t^T v_t,    w_t = exp(log_decay_t)

All in float32, whatever the model's dtype, and under autocast too: a bfloat16 state would lose what is smaller than
1/256 of itself, and a decoding worker would drift from a verifier that reads at once.

Chunks lie on a grid that begins with the sequence, not the call, so that a prefill continuing from a state sums in the
order of one that began at the first token (docs/protocol.md, section 4.8). Shapes: B sequences, T tokens, H heads, N
channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_SIZE = 64
"""Channels per head, N, in every published Eagle and Finch."""
WKV_CHUNK = 16
"""Tokens per chunk; pinned by docs/protocol.md, since the order of the sums depends on it."""
MAX_LOG_RATE = 4.8
"""Upper bound of w: exp(-e^4.8) is 0 in float32, while sums of such decays and their gradients stay finite."""


def log_decay(w: Tensor) -> Tensor:
    """Compute -e^w in float32, the logarithm of a channel's retention exp(-e^w)."""
    return -w.float().clamp(max=MAX_LOG_RATE).exp()


def wkv_step(
    r_BHN: Tensor, k_BHN: Tensor, v_BHN: Tensor, log_decay_BHN: Tensor, *, bonus_HN: Tensor, state_BHNN: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance each sequence by one token; return outputs [B, H, N] and the new state, float32. `bonus_HN` is u."""
    with _no_autocast(r_BHN.device):
        r_BHN, k_BHN, v_BHN = r_BHN.float(), k_BHN.float(), v_BHN.float()
        own_BHNN = k_BHN[..., :, None] * v_BHN[..., None, :]
        out_BHN = (r_BHN[..., None, :] @ (bonus_HN.float()[..., None] * own_BHNN + state_BHNN)).squeeze(-2)
        return out_BHN, log_decay_BHN.float().exp()[..., None] * state_BHNN + own_BHNN


def wkv_chunked(
    r_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHN: Tensor,
    log_decay_BTHN: Tensor,
    *,
    bonus_HN: Tensor,
    state_BHNN: Tensor,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Advance each sequence by T tokens, the first at position `start`; equals T `wkv_step`s up to rounding.

    Returns outputs [B, T, H, N] and the new state, float32.
    """
    tokens = r_BTHN.shape[1]
    front = start % WKV_CHUNK
    with _no_autocast(r_BTHN.device):
        # Padding of the first and last chunk writes nothing (k = 0) and forgets nothing (log_decay = 0).
        r, k, v, decay = (_chunks(each, front) for each in (r_BTHN, k_BTHN, v_BTHN, log_decay_BTHN))
        before = decay.cumsum(-2)
        own = _read_within_chunk(r, k, v, decay, bonus_HN.float())
        total = before[..., -1:, :].exp().transpose(-1, -2)
        read = r * F.pad(before, (0, 0, 1, -1)).exp()
        added = (k * _later_decays(decay).exp()).transpose(-1, -2) @ v
        out = []
        for chunk in range(r.shape[0]):
            out.append(own[chunk] + read[chunk] @ state_BHNN)
            state_BHNN = total[chunk] * state_BHNN + added[chunk]
        out_BTHN = torch.stack(out, 1).transpose(2, 3).flatten(1, 2)
        return out_BTHN[:, front : front + tokens], state_BHNN


def _no_autocast(device: torch.device) -> torch.autocast:
    """Disable autocast; meta tensors have none to disable."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


def _chunks(x_BTHN: Tensor, front: int) -> Tensor:
    """Reshape to [chunks, B, H, WKV_CHUNK, N] in float32, zero-padded by `front` tokens before and to whole chunks
    after.
    """
    batch, tokens, heads, width = x_BTHN.shape
    padded = F.pad(x_BTHN.float(), (0, 0, 0, 0, front, -(front + tokens) % WKV_CHUNK))
    return padded.view(batch, -1, WKV_CHUNK, heads, width).permute(1, 0, 3, 2, 4)


def _later_decays(decay: Tensor) -> Tensor:
    """Sum the decays of later tokens in the chunk for each token; summed, not subtracted, for precision."""
    return F.pad(decay.flip(-2).cumsum(-2).flip(-2), (0, 0, -1, 1))


def _read_within_chunk(r: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus_HN: Tensor) -> Tensor:
    """Compute what tokens read of their own chunk, in the shape of `v`."""
    now = (r * bonus_HN[:, None] * k).sum(-1, keepdim=True) * v
    pairs: Tensor = _Pairs.apply(r, k, decay)
    return now + pairs @ v


class _Pairs(torch.autograd.Function):
    """[..., T, T]: how much token t reads of token i < t, sum_n r_t k_i exp(decay of i + 1 .. t - 1).

    Powers are products over the tokens between, extended at each distance: as a quotient of two powers they would leave
    float32's range within 32 tokens. Keeping them all for the gradient would take T times the memory of r.
    """

    @staticmethod
    def forward(ctx: Any, r: Tensor, k: Tensor, decay: Tensor) -> Tensor:
        ctx.save_for_backward(r, k, decay)
        pairs = r.new_zeros(*r.shape[:-1], r.shape[-2])
        for distance, kept in _remaining_shares(decay):
            read = r[..., distance:, :] * k[..., :-distance, :]
            pairs.diagonal(-distance, -2, -1).copy_(read.mul_(kept).sum(-1))
        return pairs

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r, k, decay = ctx.saved_tensors
        of_r, of_k = torch.zeros_like(r), torch.zeros_like(k)
        for distance, kept in _remaining_shares(decay):
            share = kept * outer[0].diagonal(-distance, -2, -1)[..., None]
            of_r[..., distance:, :].addcmul_(share, k[..., :-distance, :])
            of_k[..., :-distance, :].addcmul_(share, r[..., distance:, :])
        # A token's decay lies between i < m < t: all pairs with t after it, minus those with i not before it.
        later = F.pad((r * of_r).flip(-2).cumsum(-2).flip(-2), (0, 0, -1, 1))
        return of_r, of_k, later - (k * of_k).flip(-2).cumsum(-2).flip(-2)


def _remaining_shares(decay: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each distance d with what remains of tokens i < T - d at i + d: [..., T - d, N]."""
    tokens, rate = decay.shape[-2], decay.exp()
    kept = torch.ones_like(decay)
    for distance in range(1, tokens):
        kept = kept[..., :-1, :]
        if distance > 1:
            kept = kept * rate[..., distance - 1 : -1, :]
        yield distance, kept
