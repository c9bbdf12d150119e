"""What the frame-based action model gains from longer sequences in training, a power law in arXiv 2510.06828.

A task where all frames so far count: somebody presses one of eight letters by habits of their own, probabilities
drawn from Dirichlet(0.2) for each sequence, and each frame shows the letter that was pressed last. What comes next is
the better known the more was seen, at best with an excess that falls as one over the number of frames. Models of one
size are trained with the same number of steps and of sequences in a step, and differ only in the length T of those
sequences. All are validated on the same sequences of 256, by the mean loss in nats of the next letter. Longer
sequences also have more frames: what is compared is length at a fixed number of steps. The loss cannot fall below the
habits' own entropy, `frame_action_entropy`.

A line is fitted to log(loss) against log(T), losses being means over seeds, which differ by as much as lengths do:
`frame_action_loss_slope`, and `frame_action_loss_r2`.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor

from benchmarks.report import say
from node.policy.models.frame_action import FrameActionConfig, FrameActionForCausalLM
from node.policy.models.tiny_llama import VOCABULARY, make_tokenizer, token_codepoints

LENGTHS = (32, 64, 128, 256)
VALIDATED = 256
STEPS = 300
SEEDS = 3
SEQUENCES = 32
VALIDATION_SEQUENCES = 256
LETTERS, PROMPT = "ABCDEFGI", "\n\n"
CONCENTRATION = 0.2
LEARNING_RATE = 4e-3
WARMUP_STEPS = 20
HIDDEN = 64


def measure(*, steps: int) -> dict[str, float]:
    """Return the slope, R^2, and the mean loss for each length."""
    each = {length: [validated(length, steps=steps, seed=seed) for seed in range(SEEDS)] for length in LENGTHS}
    losses = {length: statistics.fmean(found) for length, found in each.items()}
    slope, r2 = power_law(list(losses), list(losses.values()))
    return {
        "frame_action_loss_slope": round(slope, 4),
        "frame_action_loss_r2": round(r2, 4),
        "frame_action_entropy": round(_validation()[1], 4),
        **{f"frame_action_loss_{length}": round(loss, 4) for length, loss in losses.items()},
    }


def power_law(lengths: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """Fit a line through (log length, log loss); return its slope and R^2."""
    x, y = np.log(lengths), np.log(losses)
    slope, offset = np.polyfit(x, y, 1)
    residual = y - (slope * x + offset)
    return float(slope), float(1 - (residual**2).sum() / ((y - y.mean()) ** 2).sum())


def validated(length: int, *, steps: int, seed: int) -> float:
    """Train a model on pieces of `length`; return its validation loss."""
    model, rng = small_model(seed), np.random.default_rng(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            cosine = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * cosine
        loss = loss_of(model, sequences(rng, SEQUENCES, length)[0])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.train(mode=False)
    with torch.inference_mode():
        found = loss_of(model, _validation()[0]).item()
    say(f"length {length}, seed {seed}: trained to {loss.item():.3f}, validated {found:.3f}")
    return found


def small_model(seed: int) -> FrameActionForCausalLM:
    """Make a model with a screen of 4 x 4 cells, and an LSTM of HIDDEN."""
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


def loss_of(model: FrameActionForCausalLM, ids: Tensor) -> Tensor:
    """Return the mean loss of the letters in `ids` [B, 2 + T], behind an empty prompt."""
    logits = model(input_ids=ids[:, :-1]).logits[:, len(PROMPT) - 1 :]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, len(PROMPT) :].flatten())


def sequences(rng: Generator, count: int, length: int) -> tuple[Tensor, float]:
    """Draw `count` prompts with `length` letters behind each; return them with the habits' mean entropy, in nats."""
    habits = rng.dirichlet([CONCENTRATION] * len(LETTERS), size=count)
    letters = np.stack([rng.choice(_ids(LETTERS), size=length, p=habit) for habit in habits])
    prompts = np.tile(_ids(PROMPT), (count, 1))
    entropy = -(habits * np.log(np.maximum(habits, 1e-300))).sum(1).mean()
    return torch.from_numpy(np.concatenate([prompts, letters], axis=1)), float(entropy)


@functools.cache
def _validation() -> tuple[Tensor, float]:
    return sequences(np.random.default_rng(99), VALIDATION_SEQUENCES, VALIDATED)


@functools.cache
def _ids(text: str) -> list[int]:
    found: list[int] = make_tokenizer().convert_tokens_to_ids(list(text))
    return found
