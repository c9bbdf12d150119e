"""Workers that cheat, for measuring who is caught: other weights, other choices, other people's tokens.

Each draws a group's rollouts as a worker would submit them; everything that the cheat leaves alone is right. None of
them is an attack on the format: those are refused without a model (docs/protocol.md, section 6.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.policy.file import Policy, load_policy, save_policy
from node.policy.layout import cast
from node.policy.models.base import LENGTH, State, join, select
from node.policy.skeleton import layer_matrices
from node.protocol.run import RunSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.submission import Rollout, chunk_sizes
from node.protocol.terminal import BACKGROUND, CODEPOINT, Cells, Phase, Terminal
from node.protocol.turns import Replies, pieces
from node.sampling.types import Choice
from node.verification.prefill import TransformersPrefill
from node.verification.proofs import build_proofs
from node.verification.spans import appraise_spans, spans_of

Change = Callable[[Tensor], Tensor]
"""Of one matrix [out, in]."""
Edit = Callable[[PreTrainedModel], object]
"""Of a whole policy in float32, its weights or its configuration, in place."""

NOISE_SEED = 20
TARGET = ord("*")
RESET_TOKENS = 32
MAX_PICKED = 2**22
"""Logits that a rule picks from at once, with their noise: rules make some ten tensors of that size."""


def int4(weight: Tensor) -> Tensor:
    """Quantise to 4 bits per weight, with one scale per 32 of a row."""
    rows = weight.reshape(-1, 32) if weight.shape[1] % 32 == 0 else weight
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-9) / 7
    return ((rows / scale).round() * scale).reshape(weight.shape)


def noise(weight: Tensor, *, share: float = 0.01) -> Tensor:
    """Multiply each weight by 1 plus normal noise of deviation `share`."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return weight * (1 + share * torch.randn(weight.shape, generator=generator))


@torch.no_grad()
def change_matrices(model: PreTrainedModel, change: Change) -> None:
    """Apply `change` to every matrix of the layers."""
    for weight in layer_matrices(model):
        weight.copy_(change(weight))


def rewrite(path: Path, out: Path, edit: Edit) -> None:
    """Write the policy in `path` to `out` after `edit`; same dtype."""
    policy = load_policy(path, dtype=torch.float32)
    stored = torch.bfloat16 if policy.config.dtype == torch.bfloat16 else torch.float32
    edit(policy.model)
    save_policy(cast(policy.model, stored), policy.tokenizer, out)


def alter(path: Path, out: Path, change: Change) -> None:
    """Write the policy in `path` to `out`, with `change` applied to every matrix of its layers; same dtype."""
    rewrite(path, out, partial(change_matrices, change=change))


class Chooser:
    """A sampling rule in place of `node.sampling.forced.choose`: `pick` gets scaled logits and noise, [B, V] each."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._pick = pick

    def __call__(
        self, logits: Tensor, seeds: Sequence[bytes], positions: Sequence[int], *, temperature: float
    ) -> Choice:
        step = max(1, MAX_PICKED // logits.shape[1])
        parts = [slice(top, top + step) for top in range(0, len(logits), step)]
        chosen = [self._choose(logits[each].detach() / temperature, seeds[each], positions[each]) for each in parts]
        return Choice(torch.cat([each.tokens for each in chosen]), torch.cat([each.logprobs for each in chosen]))

    def _choose(self, scaled: Tensor, seeds: Sequence[bytes], positions: Sequence[int]) -> Choice:
        noises = torch.from_numpy(gumbel_noise(list(seeds), list(positions), vocabulary=scaled.shape[1]))
        tokens = self._pick(scaled, noises.to(scaled.device))
        logprobs = torch.log_softmax(scaled, -1).gather(1, tokens[:, None])[:, 0]
        return Choice(tokens, logprobs)


def runner_up(within: float) -> Chooser:
    """Choose the runner-up wherever it loses by less than `within`."""

    def pick(scaled: Tensor, noises: Tensor) -> Tensor:
        best = (scaled + noises).topk(2)
        return torch.where(best.values[:, 0] - best.values[:, 1] < within, best.indices[:, 1], best.indices[:, 0])

    return Chooser(pick)


def tempered(temperature: float) -> Chooser:
    """Sample at another temperature, relative to the run's; the reported log-probabilities are the run's."""
    return Chooser(lambda scaled, noises: (scaled / temperature + noises).argmax(-1))


def greedy() -> Chooser:
    """Choose the most likely token, whatever the noise."""
    return Chooser(lambda scaled, _: scaled.argmax(-1))


def nucleus(share: float) -> Chooser:
    """Restrict sampling to the likeliest `share` of the mass (top-p)."""

    def pick(scaled: Tensor, noises: Tensor) -> Tensor:
        ordered = scaled.softmax(-1).sort(-1, descending=True)
        before = ordered.values.cumsum(-1) - ordered.values
        kept = torch.zeros_like(scaled, dtype=torch.bool).scatter(1, ordered.indices, before < share)
        return (scaled + noises).masked_fill(~kept, -torch.inf).argmax(-1)

    return Chooser(pick)


class Fp8CacheEngine(TorchEngine):
    """Torch engine with keys and values rounded to 8-bit floating point (E4M3), as a quantised cache would.

    Of multi-head latent attention it is what keys and values are made of, which vLLM's cache holds in their place.
    """

    async def load(self, path: Path, *, version: int) -> None:
        await super().load(path, version=version)
        for name, module in self.policy.model.named_modules():
            if name.endswith((".k_proj", ".v_proj", ".kv_a_proj_with_mqa")):
                module.register_forward_hook(_to_fp8)
            elif name.endswith(".qkv_proj"):
                config: Any = self.policy.config
                cached = 2 * config.num_key_value_heads
                numbers = module.out_features * cached // (config.num_attention_heads + cached)
                module.register_forward_hook(partial(_last_to_fp8, numbers=numbers))


def _to_fp8(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output.to(torch.float8_e4m3fn).to(output.dtype)


def _last_to_fp8(module: Any, inputs: Any, output: Tensor, *, numbers: int) -> Tensor:
    return torch.cat([output[..., :-numbers], _to_fp8(module, inputs, output[..., -numbers:])], -1)


class _TamperedStateEngine(TorchEngine):
    """Torch engine whose recurrent policy continues from a modified state."""

    async def load(self, path: Path, *, version: int) -> None:
        await super().load(path, version=version)
        base: Any = self.policy.model.base_model
        base.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def _on_forward(self, base: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        state = named.get("state")
        return arguments, named if state is None else {**named, "state": self.tampered(base, state)}

    def tampered(self, base: Any, state: State) -> State:
        """Return the state to continue from."""
        raise NotImplementedError


class RoundedStateEngine(_TamperedStateEngine):
    """Keeps the state in bfloat16."""

    def tampered(self, base: Any, state: State) -> State:  # noqa: ARG002  (required by the interface)
        numbers = {name: each for name, each in state.items() if each.is_floating_point()}
        return {**state, **{name: each.bfloat16().to(each.dtype) for name, each in numbers.items()}}


class StateResetEngine(_TamperedStateEngine):
    """Resets the state every RESET_TOKENS tokens."""

    def tampered(self, base: Any, state: State) -> State:
        fresh, is_due = base.initial_state(1), state[LENGTH] % RESET_TOKENS == 0
        places = torch.arange(len(is_due), device=is_due.device).masked_fill(is_due, len(is_due))
        return select(join([state, fresh]), places)


Forge = Callable[[Cells, bool], Cells]
"""Function (frame, is first visible frame) to the frame shown to the policy instead."""


class ForgedFrameEngine(TorchEngine):
    """Torch engine whose frame-based policy sees forged frames."""

    def __init__(self, spec: RunSpec, forge: Forge, **options: Any) -> None:
        super().__init__(spec, **options)
        self._forge = forge

    async def load(self, path: Path, *, version: int) -> None:
        await super().load(path, version=version)
        base: Any = self.policy.model.base_model
        watch = base.watch

        def forged(tokens: Sequence[int], terminal: Terminal) -> Iterator[Cells]:
            for token in tokens:
                unseen = terminal.phase in {Phase.TEXT, Phase.LINE}
                for frame in watch([token], terminal):
                    yield self._forge(frame, unseen and terminal.phase is Phase.KEYS)

        base.watch = forged


def moved_target(frame: Cells, _first: bool) -> Cells:
    """Draw the target one column further."""
    drawn = np.roll(np.where(_targets(frame), frame & ~BACKGROUND, 0), 1, axis=1)
    background = np.where(_targets(frame), frame & BACKGROUND, frame)
    return np.where(drawn != 0, drawn | background & BACKGROUND, background)


def moved_cursor(frame: Cells, _first: bool) -> Cells:
    """Draw the cursor one column further."""
    return frame & ~BACKGROUND | np.roll(frame & BACKGROUND, 1, axis=1)


def blanked(frame: Cells, _first: bool) -> Cells:
    """Blank everything within two cells of the target."""
    found = frame.copy()
    for row, column in np.argwhere(_targets(frame)):
        found[max(0, row - 2) : row + 3, max(0, column - 2) : column + 3] = 0
    return found


def first_alone(frame: Cells, first: bool) -> Cells:
    """Move the target by one column in the first frame only."""
    return moved_target(frame, first) if first else frame


def _targets(frame: Cells) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = frame & CODEPOINT == TARGET
    return found


FORGERIES: Mapping[str, Forge] = {
    "moved_target": moved_target,
    "moved_cursor": moved_cursor,
    "blanked": blanked,
    "first_frame": first_alone,
}
"""Forgeries of the frames of `node.environments.terminal`."""


@dataclass(frozen=True, slots=True)
class Prover:
    """Proves any tokens with the right policy, by a prefill: what a cheat does that sampled elsewhere."""

    policy: Policy
    spec: RunSpec

    def prove(self, rollouts: Sequence[Rollout], replies: Sequence[Replies] | None = None) -> list[Rollout]:
        """Return the rollouts with the log-probabilities and proofs an honest worker would send for their tokens.

        `replies` holds each rollout's environment replies; None for single turns.
        """
        replies_per_rollout = replies or [()] * len(rollouts)
        return [
            self._prove(rollout, rollout_replies)
            for rollout, rollout_replies in zip(rollouts, replies_per_rollout, strict=True)
        ]

    def _prove(self, rollout: Rollout, replies: Replies) -> Rollout:
        whole = msgspec.structs.replace(rollout, segment_tokens=[len(rollout.completion_ids)])
        chunk_tokens = self.spec.proofs.chunk_tokens
        ((_, span),) = spans_of(whole, replies, row=0, chunk_tokens=chunk_tokens)
        with torch.inference_mode():
            (states,) = TransformersPrefill(self.policy).states([span])
            temperature = self.spec.sampling.temperature
            logprobs, _ = appraise_spans([span], [states], self.policy.head, temperature=temperature)
        sizes = chunk_sizes(pieces(whole.segment_tokens, replies), chunk_tokens=chunk_tokens)
        chunks = list(torch.split(states.bfloat16(), sizes))
        return msgspec.structs.replace(
            whole,
            logprobs=logprobs,
            proofs=build_proofs(chunks, [rollout.seed] * len(chunks), spec=self.spec.proofs),
        )


def as_if_asked(rollouts: Sequence[Rollout], requests: Sequence[SampleRequest]) -> list[Rollout]:
    """Relabel rollouts with the prompts and seeds of `requests`, whatever they were drawn from."""
    return [
        msgspec.structs.replace(rollout, seed=request.seed, prompt_ids=list(request.prompt_ids))
        for rollout, request in zip(rollouts, requests, strict=True)
    ]


def prefixed(requests: Sequence[SampleRequest]) -> list[SampleRequest]:
    """Prefix each prompt with other text: here the prompt itself."""
    return [replace(request, prompt_ids=request.prompt_ids * 2) for request in requests]
