"""What the frame-based action model gains from longer sequences in training: arXiv 2510.06828 reports a power law.

A task where frames long gone decide: on a screen a cue is shown, one of four letters, then other signs, then a question
mark, and the key to press is the cue. Between cue and question lie d frames, P(d >= x) = x^-0.5 up to 256, so that every
range matters. Models of one size are trained with the same number of steps and of sequences in a step, and differ only in
the length T of those sequences, pieces cut from longer ones at a random place. All are validated on the same sequences of
256, by the mean loss (nats) at the questions. Longer pieces have more tokens, too: what is compared is length at a fixed
number of steps, as the paper does.

The line is fitted to log(loss) against log(T): `frame_action_loss_slope`, and `frame_action_loss_r2`.
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
    """A screen of 4 x 4 cells, and an LSTM whose gates begin with memories of 1 to 256 frames (arXiv 1804.11188)."""
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
    model = FrameActionForCausalLM(config)
    with torch.no_grad():
        bias = model.model.layers["lstm"].bias
        ranges = torch.empty(HIDDEN).uniform_(1, VALIDATED - 1).log()
        bias[:HIDDEN], bias[HIDDEN : 2 * HIDDEN] = -ranges, ranges - 1
    return model


def loss_of(model: FrameActionForCausalLM, ids: Tensor, keys: Tensor) -> Tensor:
    """The mean loss of the keys to press after each token of `ids` [B, T]; `keys` [B, T] has IGNORED for any key."""
    return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), keys.flatten(), ignore_index=IGNORED)


def pieces(rng: Generator, count: int, length: int) -> tuple[Tensor, Tensor]:
    """`count` pieces of `length` tokens behind an empty prompt, and the key to press after each."""
    opening = _ids("\n\n")
    rows = [_piece(rng, length) for _ in range(count)]
    ids = torch.tensor([[*opening, *tokens] for tokens, _ in rows])
    return ids, torch.tensor([[IGNORED] * len(opening) + keys for _, keys in rows])


def _piece(rng: Generator, length: int) -> tuple[list[int], list[int]]:
    """Tokens of a piece that begins anywhere, and the cue that holds at each; none before the first."""
    cues, signs = _ids(CUES), np.array(_ids(SIGNS))
    skipped = int(rng.integers(2 * VALIDATED))
    tokens: list[int] = []
    keys: list[int] = []
    begins: list[bool] = []
    while len(tokens) < skipped + length:
        held = min(int((1 - rng.random()) ** (-1 / TAIL)), VALIDATED)
        cue = cues[rng.integers(len(cues))]
        tokens += [cue, *rng.choice(signs, size=held - 1).tolist()]
        keys += [cue] * held
        begins += [True] + [False] * (held - 1)
    unknown = [*begins[skipped : skipped + length], True].index(True)
    known = keys[skipped + unknown : skipped + length]
    return tokens[skipped : skipped + length], [IGNORED] * min(unknown, length) + known


@functools.cache
def _ids(text: str) -> list[int]:
    found: list[int] = make_tokenizer().convert_tokens_to_ids(list(text))
    return found
