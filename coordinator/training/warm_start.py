"""The tiny policy's warm start: supervised learning of worked solutions that contain mistakes.

Reinforcement learning needs a policy that succeeds now and then. Demonstrations whose digits and letters are
each wrong with some probability leave one whose sampled answers are often wrong while its most likely answers
are right, so that there is something to gain and a way to gain it. The cross-entropy is over the completion
alone; AdamW (arXiv 1711.05101) with a linear warm-up and a cosine decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from node.environments.arithmetic import Arithmetic
from node.environments.base import INDEX_LIMIT, Problem
from node.environments.reverse import LETTERS, Reverse
from node.tiny import EOS, PAD, make_model, make_tokenizer

DEFAULT_SEED = 0
STEPS = 400
BATCH = 64
ADDITION_NOISE = 0.2
REVERSAL_NOISE = 0.12
LEARNING_RATE = 3e-3
FINAL_LEARNING_RATE = 0.05
WARMUP_STEPS = 20
GRADIENT_CLIP = 1.0
_IGNORE = -100

Progress = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps in all, and the step's loss in nats per token."""


def warm_start(
    *, seed: int = DEFAULT_SEED, steps: int = STEPS, progress: Progress | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The tiny policy after `steps` steps, in float32, and its tokenizer.

    The same `seed`, torch release, kind of CPU and number of torch threads give the same weights bit for bit.
    """
    model, tokenizer, rng = make_model(seed), make_tokenizer(), Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        ids_BT, labels_BT = collate(tokenizer, [demonstration(rng) for _ in range(BATCH)])
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=_IGNORE)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        optimizer.step()
        if progress is not None:
            progress(step + 1, steps, loss.item())
    model.eval()  # type: ignore[no-untyped-call]
    return model, tokenizer


def learning_rate(step: int, steps: int) -> float:
    """The rate of step `step` (from 0): a linear rise, under a cosine that ends at a twentieth of the peak."""
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return (
        LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)
    )


def demonstration(rng: Random) -> tuple[str, str]:
    """A prompt of one of the two tasks, and a worked solution with mistakes."""
    index = rng.randrange(INDEX_LIMIT)
    if rng.random() < 0.5:
        problem = Arithmetic().problem(index)
        return problem.prompt, demonstrate_addition(problem, noise=ADDITION_NOISE, rng=rng)
    problem = Reverse().problem(index)
    return problem.prompt, demonstrate_reversal(problem, noise=REVERSAL_NOISE, rng=rng)


def demonstrate_addition(problem: Problem, *, noise: float, rng: Random) -> str:
    """Column addition from the right, `<think>1+8+0=9,6+4+0=10</think>109`; the third term is the carry.

    Each column's sum is off by one or two with probability `noise`, and what follows builds on it.
    """
    left, right = (str(term)[::-1] for term in problem.data["terms"])
    columns, digits, carry = [], "", 0
    for a, b in zip(left, right, strict=True):
        total = int(a) + int(b) + carry
        if rng.random() < noise:
            total = max(0, total + rng.choice((-2, -1, 1, 2)))
        columns.append(f"{a}+{b}+{carry}={total}")
        digits = str(total % 10) + digits
        carry = int(total >= 10)
    return f"<think>{','.join(columns)}</think>{int(str(carry) + digits)}"


def demonstrate_reversal(problem: Problem, *, noise: float, rng: Random) -> str:
    """The word backwards, letter by letter: `<think>h e a g</think>heag`; each redrawn with probability `noise`."""
    letters = [rng.choice(LETTERS) if rng.random() < noise else letter for letter in problem.data["answer"]]
    return f"<think>{' '.join(letters)}</think>{''.join(letters)}"


def collate(tokenizer: PreTrainedTokenizerFast, examples: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], padded on the right, and labels [B, T] that ignore prompts and padding."""
    encoded = tokenizer.backend_tokenizer.encode_batch([text for example in examples for text in example])
    prompts = [encoding.ids for encoding in encoded[::2]]
    completions = [[*encoding.ids, EOS] for encoding in encoded[1::2]]
    width = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    ids_BT = torch.full((len(examples), width), PAD)
    labels_BT = torch.full((len(examples), width), _IGNORE)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt), len(prompt) + len(completion)
        ids_BT[row, :end] = torch.tensor(prompt + completion)
        labels_BT[row, start:end] = torch.tensor(completion)
    return ids_BT, labels_BT
