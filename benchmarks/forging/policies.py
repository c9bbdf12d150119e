"""Small trained policies, and the final hidden states of what they drew: by the worker's kernel and the verifier's.

Characters of the Python documentation (`pydoc_data`, so that every machine has it) are the language. A character says
more about a state of such a policy than a token of 100,000 does about one of a large policy: it is forgers whom that
helps. Training is short, and is there for the states to have directions and lengths that depend on the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

FAMILIES = ("llama", "qwen3", "olmo2")
VOCABULARY = 128
LAYERS = 4
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
    """Completions and the states that their tokens were chosen from.

    `ids` [rows, PROMPT_TOKENS + tokens]; `worker`, from decoding, and `verifier`, from a prefill: [rows, tokens,
    hidden], bfloat16. Rows of one prompt are adjacent, `SAMPLES` of them.
    """

    ids: Tensor
    worker: Tensor
    verifier: Tensor


def corpus() -> Tensor:
    """Character codes, other than ASCII's as 127."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor([min(ord(character), VOCABULARY - 1) for character in text])


def configuration(family: str, *, hidden: int) -> Any:
    """Of a policy of `LAYERS` layers and heads 64 wide."""
    config_class: Any = CONFIG_MAPPING[family]
    heads = hidden // 64
    return config_class(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=False,
    )


def train(family: str, *, hidden: int, steps: int) -> tuple[Any, float]:
    """A policy of `family`, in bfloat16, and its last loss in nats per character; log(128) is 4.85."""
    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM.from_config
    model = build(configuration(family, hidden=hidden), dtype=torch.float32)
    text = corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95))
    loss = torch.tensor(0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        rows = _excerpts(text, _TRAINING_ROWS, _TRAINING_TOKENS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.bfloat16().eval(), float(loss.detach())


def _excerpts(text: Tensor, rows: int, tokens: int) -> Tensor:
    starts = torch.randint(0, len(text) - tokens, (rows,))
    return torch.stack([text[start : start + tokens] for start in starts.tolist()])


def draw(model: Any, *, prompts: int, tokens: int, seed: int) -> Drawn:
    """`SAMPLES` completions of `tokens` tokens each for so many prompts, at temperature 1."""
    torch.manual_seed(seed)
    rows = _excerpts(corpus(), prompts, PROMPT_TOKENS).repeat_interleave(SAMPLES, 0)
    model.set_attn_implementation("sdpa")
    decoded = [_decode(model, part, tokens) for part in torch.split(rows, _DECODED_TOGETHER)]
    ids, worker = (torch.cat(parts) for parts in zip(*decoded, strict=True))
    model.set_attn_implementation("eager")
    return Drawn(ids, worker, prefill(model, ids))


@torch.inference_mode()
def _decode(model: Any, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Token by token with a cache of keys and values, as an engine does."""
    states, cache, fed = [], None, ids
    for _ in range(tokens):
        out = model.base_model(input_ids=fed, past_key_values=cache, use_cache=True)
        cache, last = out.past_key_values, out.last_hidden_state[:, -1]
        fed = torch.multinomial(model.lm_head(last).float().softmax(-1), 1)
        states.append(last)
        ids = torch.cat([ids, fed], 1)
    return ids, torch.stack(states, 1)


def prefill(model: Any, ids: Tensor) -> Tensor:
    """The final states [rows, tokens, hidden] that the tokens after the prompt are predicted from."""
    return torch.cat([parts[-1] for parts in _forward(model, ids)])


def depths(model: Any, ids: Tensor, layers: tuple[int, ...]) -> list[Tensor]:
    """As `prefill`, after only so many layers and the final norm."""
    parts = [[each[count] for count in layers] for each in _forward(model, ids, between=True)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _forward(model: Any, ids: Tensor, *, between: bool = False) -> list[list[Tensor]]:
    """For each batch the normed states after 0, 1, … layers, or only the last."""
    found = []
    with torch.inference_mode():
        for part in torch.split(ids, _PREFILLED_TOGETHER):
            out = model.base_model(input_ids=part[:, :-1], use_cache=False, output_hidden_states=between)
            inner = [model.base_model.norm(state) for state in out.hidden_states[:-1]] if between else []
            found.append([state[:, PROMPT_TOKENS - 1 :] for state in (*inner, out.last_hidden_state)])
    return found


def distil(model: Any, drawn: Drawn, *, steps: int) -> Any:
    """One layer of the policy's own kind, begun from its first, trained on its final states by squared error."""
    torch.manual_seed(1)
    config = type(model.config)(**(model.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None}))
    build: Any = AutoModelForCausalLM.from_config
    student = build(config, dtype=torch.float32)
    own = student.state_dict()
    student.load_state_dict({name: value for name, value in model.state_dict().items() if name in own})
    optimizer = torch.optim.AdamW(student.base_model.parameters(), lr=1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
        rows = torch.randint(0, len(drawn.ids), (_TRAINING_ROWS,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = student.base_model(input_ids=drawn.ids[rows, :-1], use_cache=False).last_hidden_state
        loss = F.mse_loss(states[:, PROMPT_TOKENS - 1 :].float(), drawn.verifier[rows].float())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return student.bfloat16().eval()
