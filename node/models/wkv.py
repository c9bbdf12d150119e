"""The recurrence of Eagle and Finch (arXiv 2404.05892, section 4), token by token and in parallel chunks.

Each head holds a matrix S [N, N] and reads and writes it with vectors of N = HEAD_SIZE:

    o_t = r_t (diag(u) k_t^T v_t + S)
    S  <- diag(w_t) S + k_t^T v_t,    w_t = exp(log_decay_t)

All of it is float32, whatever the model's dtype, and under autocast too: a state in bfloat16 would forget what is
smaller than 1/256 of itself, and a worker who decodes would drift from a verifier who reads at once.

Chunks lie on a grid that begins with the sequence, never with the call, so that a prefill which goes on from a state
sums up in the order of one that began at the first token (docs/protocol.md, section 4.8). Shapes: B sequences, T
tokens, H heads, N channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_SIZE = 64
"""Channels of a head, N: of every published Eagle and Finch."""
WKV_CHUNK = 16
"""Tokens of a chunk. docs/protocol.md pins it: the order of the sums depends on it."""
MAX_LOG_RATE = 4.8
"""Of w: exp(-e^4.8) is 0 in float32, while the sums of such decays, and their gradients, are not infinite."""


def log_decay(w: Tensor) -> Tensor:
    """-e^w in float32: the logarithm of what a channel keeps, exp(-e^w)."""
    return -w.float().clamp(max=MAX_LOG_RATE).exp()


def wkv_step(
    r_BHN: Tensor, k_BHN: Tensor, v_BHN: Tensor, log_decay_BHN: Tensor, *, bonus_HN: Tensor, state_BHNN: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each sequence: outputs [B, H, N] and the state after it, float32. `bonus_HN` is u."""
    with _not_rounded(r_BHN.device):
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
    """T tokens of each sequence, of which the first stands at position `start`: as that many `wkv_step`s, but for
    rounding. Outputs [B, T, H, N] and the state after them, float32.
    """
    tokens = r_BTHN.shape[1]
    front = start % WKV_CHUNK
    with _not_rounded(r_BTHN.device):
        # What fills the first and the last chunk writes nothing (k = 0) and forgets nothing (log_decay = 0).
        r, k, v, decay = (_chunks(each, front) for each in (r_BTHN, k_BTHN, v_BTHN, log_decay_BTHN))
        before = decay.cumsum(-2)
        own = _within(r, k, v, decay, bonus_HN.float())
        total = before[..., -1:, :].exp().transpose(-1, -2)
        read = r * F.pad(before, (0, 0, 1, -1)).exp()
        added = (k * _behind(decay).exp()).transpose(-1, -2) @ v
        out = []
        for chunk in range(r.shape[0]):
            out.append(own[chunk] + read[chunk] @ state_BHNN)
            state_BHNN = total[chunk] * state_BHNN + added[chunk]
        out_BTHN = torch.stack(out, 1).transpose(2, 3).flatten(1, 2)
        return out_BTHN[:, front : front + tokens], state_BHNN


def _not_rounded(device: torch.device) -> torch.autocast:
    """Products in the dtype of their factors; meta tensors have no autocast to turn off."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


def _chunks(x_BTHN: Tensor, front: int) -> Tensor:
    """[chunks, B, H, WKV_CHUNK, N] in float32, with `front` zeros before the first token and as many as fit behind."""
    batch, tokens, heads, width = x_BTHN.shape
    padded = F.pad(x_BTHN.float(), (0, 0, 0, 0, front, -(front + tokens) % WKV_CHUNK))
    return padded.view(batch, -1, WKV_CHUNK, heads, width).permute(1, 0, 3, 2, 4)


def _behind(decay: Tensor) -> Tensor:
    """Of each token the sum of the decays of those behind it in its chunk; summed up, not subtracted."""
    return F.pad(decay.flip(-2).cumsum(-2).flip(-2), (0, 0, -1, 1))


def _within(r: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus_HN: Tensor) -> Tensor:
    """What tokens read of their own chunk, in the shape of `v`."""
    now = (r * bonus_HN[:, None] * k).sum(-1, keepdim=True) * v
    pairs: Tensor = _Pairs.apply(r, k, decay)
    return now + pairs @ v


class _Pairs(torch.autograd.Function):
    """[..., T, T]: how much token t reads of what token i < t wrote, sum_n r_t k_i exp(decay of i + 1 .. t - 1).

    The powers are products over the tokens between, one more at each distance: as a quotient of two powers they would
    leave float32's range within 32 tokens. Keeping them all for the gradient would take T times the memory of r.
    """

    @staticmethod
    def forward(ctx: Any, r: Tensor, k: Tensor, decay: Tensor) -> Tensor:
        ctx.save_for_backward(r, k, decay)
        pairs = r.new_zeros(*r.shape[:-1], r.shape[-2])
        for distance, kept in _kept(decay):
            read = r[..., distance:, :] * k[..., :-distance, :]
            pairs.diagonal(-distance, -2, -1).copy_(read.mul_(kept).sum(-1))
        return pairs

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r, k, decay = ctx.saved_tensors
        of_r, of_k = torch.zeros_like(r), torch.zeros_like(k)
        for distance, kept in _kept(decay):
            share = kept * outer[0].diagonal(-distance, -2, -1)[..., None]
            of_r[..., distance:, :].addcmul_(share, k[..., :-distance, :])
            of_k[..., :-distance, :].addcmul_(share, r[..., distance:, :])
        # A token's decay lies between i < m < t: all pairs with t behind it, but for those with i not before it.
        later = F.pad((r * of_r).flip(-2).cumsum(-2).flip(-2), (0, 0, -1, 1))
        return of_r, of_k, later - (k * of_k).flip(-2).cumsum(-2).flip(-2)


def _kept(decay: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Of each distance d, and each token i of the first T - d, what of it is left at i + d: [..., T - d, N]."""
    tokens, rate = decay.shape[-2], decay.exp()
    kept = torch.ones_like(decay)
    for distance in range(1, tokens):
        kept = kept[..., :-1, :]
        if distance > 1:
            kept = kept * rate[..., distance - 1 : -1, :]
        yield distance, kept
