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

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_SIZE = 64
"""Channels of a head, N: of every published Eagle and Finch."""
WKV_CHUNK = 16
"""Tokens of a chunk. docs/protocol.md pins it: the order of the sums depends on it."""
MAX_DECAY = 128.0
"""Of a channel in one token, as a logarithm: e^-128 is 0 in float32, and sums of it are not infinite."""
MAX_PAIRS = 2**24
"""Numbers held at once for the pairs of tokens within chunks: 64 MiB, and a few tensors of that size."""


def log_decay(w: Tensor) -> Tensor:
    """-e^w in float32: the logarithm of what a channel keeps, exp(-e^w)."""
    return -w.float().exp().clamp(max=MAX_DECAY)


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
    shape, size = v.shape, max(1, MAX_PAIRS // (WKV_CHUNK**2 * v.shape[-1]))
    parts = zip(*(each.flatten(0, 2).split(size) for each in (r, k, decay)), strict=True)
    return now + torch.cat([_pairs(*part) for part in parts]).view(*shape[:-1], WKV_CHUNK) @ v


def _pairs(r_CTN: Tensor, k_CTN: Tensor, decay_CTN: Tensor) -> Tensor:
    """[C, T, T]: how much token t reads of what token i < t wrote, in each of C chunks; 0 for i >= t.

    What was written decays from i + 1 to t - 1. These sums are made for each pair: as the quotient of two powers they
    would leave float32's range within 32 tokens.
    """
    ones = torch.ones(WKV_CHUNK, WKV_CHUNK, dtype=torch.bool, device=r_CTN.device)
    between = F.pad(decay_CTN, (0, 0, 1, -1))[:, :, None] * ones.tril(-2)[..., None]
    kept = between.cumsum(1).exp()
    return (r_CTN[:, :, None] * k_CTN[:, None] * kept).sum(-1).tril(-1)
