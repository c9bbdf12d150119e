"""Small trained policies, and the final hidden states of what they drew: by the worker's kernel and the verifier's.

Characters of the Python documentation (`pydoc_data`, so that every machine has it) are the language. A character says
more about a state of such a policy than a token of 100,000 does about one of a large policy: it is forgers whom that
helps. Training is short, and is there for the states to have directions and lengths that depend on the text.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.forging import architectures
from benchmarks.forging.architectures import VOCABULARY
from node.policy.models.base import RecurrentForCausalLM

PROMPT_TOKENS = 32
SAMPLES = 8
"""Completions of each prompt."""
_TRAINING_TOKENS = 128
_TRAINING_ROWS = 12
_LEARNING_RATE = 3e-3
_DECODED_TOGETHER = 256
_PREFILLED_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class Drawn:
    """Completions and the states that their tokens were chosen from, as proofs are made of them: in bfloat16.

    `ids` [rows, PROMPT_TOKENS + tokens]; `worker`, from decoding, and `verifier`, from a prefill: [rows, tokens,
    hidden], bfloat16. Rows of one prompt are adjacent, `SAMPLES` of them.
    """

    ids: Tensor
    worker: Tensor
    verifier: Tensor


@functools.cache
def corpus() -> Tensor:
    """Return character codes, those outside ASCII as 127."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor([min(ord(character), VOCABULARY - 1) for character in text])


def train(family: str, *, hidden: int, steps: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, float]:
    """Train a policy of `family`; return it with its last loss in nats per character (log(128) is 4.85)."""
    torch.manual_seed(0)
    model = architectures.make(family, hidden=hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95))
    loss = torch.tensor(0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        rows = _excerpts(model, _TRAINING_ROWS, _TRAINING_TOKENS)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not isinstance(model, RecurrentForCausalLM)):
            logits = model(input_ids=rows, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.to(dtype).eval(), float(loss.detach())


def _excerpts(model: Any, rows: int, tokens: int) -> Tensor:
    """Draw what a policy learns from and continues [rows, tokens].

    A terminal's prompt ends in an empty line, and what follows has no line ends, with which the program would end.
    """
    text = corpus()
    starts = torch.randint(0, len(text) - tokens, (rows,))
    ids = torch.stack([text[start : start + tokens] for start in starts.tolist()])
    if architectures.sees_frames(model):
        ids[ids < ord(" ")] = ord(" ")
        ids[:, PROMPT_TOKENS - 2 : PROMPT_TOKENS] = ord("\n")
    return ids


def draw(model: Any, *, prompts: int, tokens: int, seed: int) -> Drawn:
    """Draw `SAMPLES` completions of `tokens` tokens for each of `prompts` prompts, at temperature 1."""
    torch.manual_seed(seed)
    rows = _excerpts(model, prompts, PROMPT_TOKENS).repeat_interleave(SAMPLES, 0)
    with architectures.other_kernel(model):
        decoded = [_decode(model, part, tokens) for part in torch.split(rows, _DECODED_TOGETHER)]
    ids, worker = (torch.cat(parts) for parts in zip(*decoded, strict=True))
    return Drawn(ids, worker, prefill(model, ids))


@torch.inference_mode()
def _decode(model: Any, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Decode token by token with a cache or a state, as an engine does."""
    states, memory, fed = [], None, ids
    for _ in range(tokens):
        read, memory = architectures.decode(model, fed, memory)
        last = read[:, -1]
        fed = torch.multinomial(model.lm_head(last).float().softmax(-1), 1)
        states.append(last.bfloat16())
        ids = torch.cat([ids, fed], 1)
    return ids, torch.stack(states, 1)


def prefill(model: Any, ids: Tensor) -> Tensor:
    """Return the final states [rows, tokens, hidden] that the tokens after the prompt are predicted from."""
    return _prefill(model.base_model, ids)


def depths(model: Any, ids: Tensor, layers: tuple[int, ...]) -> list[Tensor]:
    """Return the same states after only so many layers and the final norm."""
    return [_prefill(architectures.first_layers(model, count), ids) for count in layers]


@torch.inference_mode()
def _prefill(body: Any, ids: Tensor) -> Tensor:
    parts = torch.split(ids[:, :-1], _PREFILLED_TOGETHER)
    return torch.cat(
        [body(input_ids=part, use_cache=False).last_hidden_state[:, PROMPT_TOKENS - 1 :].bfloat16() for part in parts]
    )


def distil(model: Any, drawn: Drawn, *, steps: int) -> Any:
    """Train one layer of the policy's kind on its final states, by squared error."""
    torch.manual_seed(1)
    student = architectures.make_student(model)
    optimizer = torch.optim.AdamW(student.base_model.parameters(), lr=1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
        rows = torch.randint(0, len(drawn.ids), (_TRAINING_ROWS,))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not isinstance(model, RecurrentForCausalLM)):
            states = student.base_model(input_ids=drawn.ids[rows, :-1], use_cache=False).last_hidden_state
        loss = F.mse_loss(states[:, PROMPT_TOKENS - 1 :].float(), drawn.verifier[rows].float())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return student.to(model.dtype).eval()
