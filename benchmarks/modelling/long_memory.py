"""What the frame-based action model gains from longer sequences in training, a power law in arXiv 2510.06828.

A task where frames long gone decide. On the screen is one cell: a cue, one of four letters, then other signs until
the next cue, and the key to press at each frame is the last cue. It holds for n frames, P(n >= x) = x^-1.5 up to 256,
so that of all frames a share of about d^-0.5 is further than d from its cue. Models of one size are trained with the
same number of steps and of sequences in a step, and differ only in the length T of those sequences, pieces cut out of
longer ones at a random place. All are validated on the same pieces of 256, by the mean loss in nats from a piece's
first cue on. Longer pieces also have more frames: what is compared is length at a fixed number of steps.

A line is fitted to log(loss) against log(T): `frame_action_loss_slope`, and `frame_action_loss_r2`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from node.models.frame_action import FrameActionConfig, FrameActionForCausalLM
from node.tiny import VOCABULARY, make_tokenizer, token_codepoints

LENGTHS = (32, 64, 128, 256)
VALIDATED = 256
STEPS = 300
SEQUENCES = 32
VALIDATION_SEQUENCES = 256
CUES, SIGNS = "ABCD", ".,;:"
TAIL = 1.5
IGNORED = -100
LEARNING_RATE = 4e-3
WARMUP_STEPS = 20
HIDDEN = 64


def measure(*, steps: int = STEPS, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> dict[str, float]:
    """Slope, R^2, and the loss for each length."""
    losses = {length: validated(length, steps=steps, seed=seed) for length in lengths}
    slope, r2 = power_law(list(losses), list(losses.values()))
    return {
        "frame_action_loss_slope": round(slope, 4),
        "frame_action_loss_r2": round(r2, 4),
        **{f"frame_action_loss_{length}": round(loss, 4) for length, loss in losses.items()},
    }


def power_law(lengths: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """Slope and R^2 of a line through (log length, log loss)."""
    x, y = np.log(lengths), np.log(losses)
    slope, offset = np.polyfit(x, y, 1)
    residual = y - (slope * x + offset)
    return float(slope), float(1 - (residual**2).sum() / ((y - y.mean()) ** 2).sum())


def validated(length: int, *, steps: int, seed: int) -> float:
    """The validation loss of a model that was trained on pieces of `length`."""
    model, rng = small_model(seed), np.random.default_rng(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            cosine = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * cosine
        loss = loss_of(model, *pieces(rng, SEQUENCES, length))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.train(mode=False)
    with torch.inference_mode():
        found = loss_of(model, *pieces(np.random.default_rng(99), VALIDATION_SEQUENCES, VALIDATED)).item()
    print(f"length {length}: trained to {loss.item():.3f}, validated {found:.3f}", file=sys.stderr, flush=True)
    return found


def small_model(seed: int) -> FrameActionForCausalLM:
    """A screen of 4 x 4 cells, and an LSTM of HIDDEN."""
    torch.manual_seed(seed)
    config = FrameActionConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        frame_size=32,
        cell_size=16,
        convolution_size=16,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        rows=4,
        columns=4,
        codepoints=128,
        foregrounds=3,
        backgrounds=2,
        token_codepoints=token_codepoints(),
        initializer_range=0.1,
    )
    return FrameActionForCausalLM(config)


def loss_of(model: FrameActionForCausalLM, ids: Tensor, keys: Tensor) -> Tensor:
    """The mean loss of the keys to press after each token of `ids` [B, T]; `keys` [B, T] has IGNORED for any key."""
    return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), keys.flatten(), ignore_index=IGNORED)


def pieces(rng: Generator, count: int, length: int) -> tuple[Tensor, Tensor]:
    """`count` pieces of `length` tokens behind an empty prompt, and the key to press after each."""
    opening = np.array(_ids("\n\n"))
    rows = [_piece(rng, length) for _ in range(count)]
    ids = np.stack([np.concatenate([opening, tokens]) for tokens, _ in rows])
    keys = np.stack([np.concatenate([np.full_like(opening, IGNORED), wanted]) for _, wanted in rows])
    return torch.from_numpy(ids), torch.from_numpy(keys)


def _piece(rng: Generator, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of a piece that begins anywhere, and the cue that holds at each; any key before the first."""
    skipped = int(rng.integers(2 * VALIDATED))
    held = np.minimum((1 - rng.random(skipped + length)) ** (-1 / TAIL), VALIDATED).astype(np.int64)
    cues = np.repeat(rng.choice(_ids(CUES), size=len(held)), held)
    begins = np.zeros(len(cues), dtype=bool)
    begins[np.cumsum(held) - held] = True
    tokens = np.where(begins, cues, rng.choice(_ids(SIGNS), size=len(cues)))
    piece = slice(skipped, skipped + length)
    known = np.maximum.accumulate(begins[piece])
    return tokens[piece], np.where(known, cues[piece], IGNORED)


@functools.cache
def _ids(text: str) -> list[int]:
    found: list[int] = make_tokenizer().convert_tokens_to_ids(list(text))
    return found
