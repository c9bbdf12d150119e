"""Generation with plain torch: batched decoding over a transformers model, on any CPU.

What makes it fast enough for a small model, and exact enough to be verified:

- a group's samples share their prompt, so each distinct prompt is prefilled once and its keys and values copied;
- prompts are padded on the left under explicit masks and positions, so padding never reaches a hidden state;
- keys and values live in buffers of their final size, and a finished row's place is taken by the last row, so a
  step costs what its unfinished rows cost.

The final norm's output is asked of the base model, and the output embedding applied here: the proofs need the
former, the choice of token the latter. That is the whole head of the families in `node.policy.FAMILIES`; one
that scales or caps its logits would need more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from node.engines.base import BrokenPolicy, Interrupted, NoPolicy, SampleRequest, check_requests
from node.policy import Policy, load_policy
from node.protocol.run import RunSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.submission import Rollout, chunk_count
from toploc import build_chunk_proofs
from toploc.errors import CallerFault

MAX_ROWS = 128
"""Completions decoded together: beyond this a CPU gains nothing, and a batch's memory grows."""


class TorchEngine:
    """An `Engine` in this process. `threads` is torch's setting for the whole process."""

    name = "torch"

    def __init__(self, spec: RunSpec, *, threads: int = 1, max_rows: int = MAX_ROWS) -> None:
        torch.set_num_threads(threads)
        self._spec = spec
        self._max_rows = max_rows
        self._loaded: tuple[Policy, int] | None = None

    @property
    def version(self) -> int | None:
        return self._loaded[1] if self._loaded else None

    @property
    def policy(self) -> Policy:
        if self._loaded is None:
            raise NoPolicy("no policy was loaded yet")
        return self._loaded[0]

    async def load(self, path: Path, *, version: int) -> None:
        policy = await asyncio.to_thread(load_policy, path, dtype=getattr(torch, self._spec.model.dtype))
        if policy.hidden < self._spec.proofs.top_k:
            raise BrokenPolicy(f"{policy.hidden} hidden units are too few to prove {self._spec.proofs.top_k} of")
        self._loaded = policy, version

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Rollout]:
        policy = self.policy
        check_requests(requests, vocabulary=policy.vocabulary, sampling=self._spec.sampling)
        stop = threading.Event()
        try:
            return await asyncio.to_thread(self._generate, policy, requests, stop)
        finally:
            stop.set()

    def _generate(self, policy: Policy, requests: Sequence[SampleRequest], stop: threading.Event) -> list[Rollout]:
        rollouts: list[Rollout] = []
        for start in range(0, len(requests), self._max_rows):
            batch = requests[start : start + self._max_rows]
            rollouts += prove(batch, sample(policy, batch, spec=self._spec, stop=stop), spec=self._spec)
        return rollouts


@dataclass(frozen=True, slots=True)
class Sampled:
    """A batch's completions, before they are proved.

    `tokens` and `logprobs` [rows, max_new_tokens], of which row r's first `lengths[r]` count. `chunks[c]`
    [rows, chunk_tokens, hidden] in bfloat16: what fed the output embedding when chunk c's tokens were chosen.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    chunks: list[Tensor]


@torch.inference_mode()
def sample(policy: Policy, requests: Sequence[SampleRequest], *, spec: RunSpec, stop: threading.Event) -> Sampled:
    """Decode until each of `requests` has ended. Raises Interrupted soon after `stop` is set."""
    steps, span = spec.sampling.max_new_tokens, spec.proofs.chunk_tokens
    out = Sampled(
        tokens=torch.zeros(len(requests), steps, dtype=torch.int64),
        logprobs=torch.zeros(len(requests), steps),
        lengths=torch.zeros(len(requests), dtype=torch.int64),
        chunks=[],
    )
    ends = torch.tensor(sorted(policy.eos_ids))
    decoder = _Decoder(policy.model, [request.prompt_ids for request in requests], steps=steps)
    hidden_BH = decoder.prefill()
    for position in range(steps):
        if stop.is_set():
            raise Interrupted("nobody waits for these completions any more")
        rows = decoder.rows
        seeds = [requests[row].seed for row in rows.tolist()]
        token_B, logprob_B = _choose(policy, hidden_BH, seeds, position, temperature=spec.sampling.temperature)
        if position % span == 0:
            out.chunks.append(torch.zeros(len(requests), span, policy.hidden, dtype=torch.bfloat16))
        out.chunks[-1][rows, position % span] = hidden_BH.bfloat16()
        out.tokens[rows, position] = token_B
        out.logprobs[rows, position] = logprob_B
        out.lengths[rows] = position + 1
        token_B = decoder.drop(torch.isin(token_B, ends), token_B)
        if not len(token_B) or position + 1 == steps:
            break
        hidden_BH = decoder.step(token_B)
    return out


def _choose(
    policy: Policy, hidden_BH: Tensor, seeds: list[bytes], position: int, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """The forced tokens [B] and their log-probabilities [B] (docs/protocol.md, section 4)."""
    model: Any = policy.model
    logits_BV = model.get_output_embeddings()(hidden_BH).float() / temperature
    noise_BV = torch.from_numpy(gumbel_noise(seeds, [position] * len(seeds), vocabulary=policy.vocabulary))
    token_B = (logits_BV + noise_BV).argmax(-1)
    return token_B, logits_BV.log_softmax(-1).gather(1, token_B[:, None])[:, 0]


def prove(requests: Sequence[SampleRequest], sampled: Sampled, *, spec: RunSpec) -> list[Rollout]:
    """The rollouts of a batch, all proofs built together. Raises BrokenPolicy where a number is not finite."""
    lengths = sampled.lengths.tolist()
    if not bool(sampled.logprobs.isfinite().all()):
        raise BrokenPolicy("the policy's log-probabilities are not finite")
    span = spec.proofs.chunk_tokens
    chunks = [
        sampled.chunks[start // span][row, : min(span, length - start)]
        for row, length in enumerate(lengths)
        for start in range(0, length, span)
    ]
    try:
        proofs = iter(build_chunk_proofs(chunks, spec.proofs.top_k))
    except CallerFault as error:
        raise BrokenPolicy(f"the policy's hidden states cannot be proved: {error}") from error
    return [
        Rollout(
            seed=request.seed,
            prompt_ids=list(request.prompt_ids),
            completion_ids=sampled.tokens[row, :length].tolist(),
            logprobs=sampled.logprobs[row, :length].tolist(),
            proofs=list(islice(proofs, chunk_count(length, chunk_tokens=span))),
        )
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True))
    ]


class _Decoder:
    """A batch that shrinks: `rows` [B] says which request each place of the batch now holds."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], *, steps: int) -> None:
        distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        self.rows = torch.arange(len(prompts))
        self._base: Any = model.base_model
        self._prompts = list(distinct)
        self._owner = torch.tensor([distinct[prompt] for prompt in prompts])
        self._width = max(map(len, distinct))
        self._capacity = self._width + steps - 1
        self._blocked = torch.finfo(model.dtype).min
        self._cache = _Cache()
        self._padding = torch.tensor([self._width - len(prompt) for prompt in distinct])
        self._mask = torch.zeros(0)

    def prefill(self) -> Tensor:
        """The hidden states [B, H] that the first tokens are chosen from."""
        width, column = self._width, torch.arange(self._capacity)
        ids = torch.zeros(len(self._prompts), width, dtype=torch.int64)
        for line, prompt in zip(ids, self._prompts, strict=True):
            line[width - len(prompt) :] = torch.tensor(prompt)
        hidden = self._forward(
            ids,
            position_ids=(column[:width] - self._padding[:, None]).clamp(min=0),
            mask=self._additive(
                (column[:width] >= self._padding[:, None, None]) & (column[:width] <= column[:width, None])
            ),
        )
        self._padding = self._padding[self._owner]
        self._mask = self._additive(column >= self._padding[:, None, None])
        self._cache.spread(self._owner, capacity=self._capacity)
        return hidden[self._owner]

    def step(self, token_B: Tensor) -> Tensor:
        """The hidden states [B, H] after one more token in each place."""
        length = self._cache.length
        return self._forward(
            token_B[:, None],
            position_ids=(length - self._padding)[:, None],
            mask=self._mask[..., : length + 1],
        )

    def drop(self, finished_B: Tensor, token_B: Tensor) -> Tensor:
        """Shrink the batch to its unfinished places; returns `token_B` [B] in their new order.

        The last unfinished rows move into the places of finished ones, and the end is cut off: what is copied
        is a few rows, never the cache.
        """
        kept = len(finished_B) - int(finished_B.sum())
        if kept == len(finished_B):
            return token_B
        order = torch.arange(kept)
        holes = finished_B[:kept].nonzero()[:, 0]
        order[holes] = kept + (~finished_B[kept:]).nonzero()[:, 0]
        self.rows, self._padding, self._mask = self.rows[order], self._padding[order], self._mask[order]
        self._cache.move(order[holes], holes, kept=kept)
        return token_B[order]

    def _forward(self, ids: Tensor, *, position_ids: Tensor, mask: Tensor) -> Tensor:
        output = self._base(
            input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=self._cache, use_cache=True
        )
        self._cache.length += ids.shape[1]
        hidden: Tensor = output.last_hidden_state[:, -1]
        return hidden

    def _additive(self, visible: Tensor) -> Tensor:
        """[B, Q, K] of booleans as what attention adds to its scores, [B, 1, Q, K]."""
        return torch.zeros(visible.shape, dtype=self._base.dtype).masked_fill_(~visible, self._blocked)[:, None]


class _Cache:
    """Keys and values [B, heads, capacity, width] of each layer, as transformers' attention calls for them."""

    def __init__(self) -> None:
        self.length = 0
        self._rows = 0
        self._layers: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append to a layer; returns all it has. The first call for a layer takes the prompt."""
        if layer == len(self._layers):
            self._layers.append((key, value))
            return key, value
        end = self.length + key.shape[2]
        keys, values = (held[: self._rows, :, :end] for held in self._layers[layer])
        keys[:, :, self.length :] = key
        values[:, :, self.length :] = value
        return keys, values

    def spread(self, owner: Tensor, *, capacity: int) -> None:
        """Give place b of the batch a copy of prompt `owner[b]`'s, with room for `capacity` positions."""
        self._rows = len(owner)
        self._layers = [(_roomy(key, owner, capacity), _roomy(value, owner, capacity)) for key, value in self._layers]

    def move(self, source: Tensor, target: Tensor, *, kept: int) -> None:
        """Overwrite places `target` by `source`, then forget all but the first `kept`."""
        self._rows = kept
        for held in chain.from_iterable(self._layers):
            held[target] = held[source]


def _roomy(prompt: Tensor, owner: Tensor, capacity: int) -> Tensor:
    _, heads, length, width = prompt.shape
    held = prompt.new_empty(len(owner), heads, capacity, width)
    held[:, :, :length] = prompt[owner]
    return held
