"""Forced sampling on a CUDA device: a Triton program per row and vocabulary block, then a reduction.

A score must be rounded as in `node.protocol.sampling`: the division to float32, then the addition. Plain `/` may become
an approximate division or a multiplication by the reciprocal, and multiply-add may be fused; `div_rn` is IEEE division
and cannot be fused. No libdevice function is called, so the code also runs in Triton's interpreter
(TRITON_INTERPRET=1), which the tests use.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from numpy.typing import NDArray
from torch import Tensor

from node.protocol.sampling import gumbel_table
from node.sampling.transfers import to_device
from node.sampling.types import Peaks

QUADS = 512
"""Philox counters per program, each giving noise for 4 tokens."""


# Triton interprets a kernel's annotations as its own types, so the arguments have none.
@triton.jit
def table_entry(word):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Return the table entry of each uint32; see `node.sampling.cpu.table_entry`."""
    # word & ~(word >> 12), without an inversion, which Triton's interpreter cannot do with every NumPy.
    bits = (word - (word & (word >> 12))).to(tl.float32).to(tl.uint32, bitcast=True)
    return tl.where(word < 4096, word, (bits >> 12) - 280576)


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    logits,  # noqa: ANN001
    words,  # noqa: ANN001
    positions,  # noqa: ANN001
    table,  # noqa: ANN001
    scores_out,  # noqa: ANN001
    tokens_out,  # noqa: ANN001
    largest_out,  # noqa: ANN001
    exponentials_out,  # noqa: ANN001
    vocabulary,  # noqa: ANN001
    temperature,  # noqa: ANN001
    QUADS: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    s0 = tl.load(words + row * 4).to(tl.uint32, bitcast=True).to(tl.uint64)
    s1 = tl.load(words + row * 4 + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    s2, s3 = tl.load(words + row * 4 + 2), tl.load(words + row * 4 + 3)
    counter = block * QUADS + tl.arange(0, QUADS)
    w0, w1, w2, w3 = tl.philox((s1 << 32) | s0, counter, tl.load(positions + row), s2, s3)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    noise = tl.load(table + table_entry(word).to(tl.int32))

    token = block * QUADS * 4 + tl.arange(0, QUADS * 4)
    present = token < vocabulary
    logit = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=present, other=float("-inf"))
    scaled = tl.div_rn(logit, temperature)
    score = scaled + noise
    best = tl.max(score, 0)
    largest = tl.max(scaled, 0)
    # A block of nothing but -inf has no largest logit to scale by: -inf - -inf would be NaN.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    at = row * tl.num_programs(1) + block
    tl.store(scores_out + at, best)
    tl.store(tokens_out + at, tl.min(tl.where((score == best) & present, token, vocabulary - 1), 0))
    tl.store(largest_out + at, largest)
    tl.store(exponentials_out + at, tl.sum(tl.exp(scaled - shift), 0))


def peaks(logits: Tensor, words: NDArray[np.uint32], positions: NDArray[np.uint32], temperature: float) -> Peaks:
    """Compute the rows' peaks of `logits` [B, V] float32, on their device."""
    rows, vocabulary = logits.shape
    device = logits.device
    blocks = triton.cdiv(vocabulary, QUADS * 4)
    # Each aligned alike: Triton compiles a kernel again for other alignments.
    scores, largest, exponentials = (torch.empty(rows, blocks, device=device) for _ in range(3))
    tokens = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    if rows:
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            _blocks[(rows, blocks)](
                logits.contiguous(),
                to_device(words.view(np.int32), device),
                to_device(positions.view(np.int32), device),
                _table(device),
                scores,
                tokens,
                largest,
                exponentials,
                vocabulary,
                temperature,
                QUADS=QUADS,
                enable_fp_fusion=False,
            )
    best, highest = scores.amax(-1), largest.amax(-1)
    # NaN equals nothing, which leaves the last token; such a row is recognised by its log-probability.
    forced = torch.where(scores == best[:, None], tokens.long(), vocabulary - 1).amin(-1)
    total = (exponentials * (largest - highest[:, None]).exp()).sum(-1)
    return Peaks(forced, best, highest, total)


@cache
def _table(device: torch.device) -> Tensor:
    return torch.from_numpy(gumbel_table().copy()).to(device)
