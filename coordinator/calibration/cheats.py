"""Workers that cheat, for measuring who is caught: other weights, other choices, other people's tokens.

Each draws a group's rollouts as a worker would submit them; everything that the cheat leaves alone is right. None of
them is an attack on the format: those are refused without a model (docs/protocol.md, section 6.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.models.base import LENGTH, State, join, select
from node.policy import Policy, load_policy, save_policy
from node.prefill import TransformersPrefill, spans_of
from node.proofs import build_proofs
from node.protocol.run import RunSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.submission import Rollout, chunk_sizes
from node.protocol.turns import Replies, pieces
from node.sampling import Choice
from node.terminal import BACKGROUND, CODEPOINT, Cells, Phase, Terminal

Change = Callable[[Tensor], Tensor]

NOISE_SEED = 20
TARGET = ord("*")
RESET_TOKENS = 32


def int4(weight: Tensor) -> Tensor:
    """Four bits for each weight, one scale for 32 of a row."""
    rows = weight.reshape(-1, 32) if weight.shape[1] % 32 == 0 else weight
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-9) / 7
    return ((rows / scale).round() * scale).reshape(weight.shape)


def noise(weight: Tensor, *, share: float = 0.01) -> Tensor:
    """Each weight changed by a normal share of itself."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return weight * (1 + share * torch.randn(weight.shape, generator=generator))


def alter(path: Path, out: Path, change: Change) -> None:
    """The policy in `path` with `change` made to every matrix of its layers, in `out`; in the same dtype."""
    policy = load_policy(path, dtype=torch.float32)
    stored = torch.bfloat16 if policy.config.dtype == torch.bfloat16 else torch.float32
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if weight.ndim == 2 and ".layers." in name:
                weight.copy_(change(weight))
    save_policy(policy.model.to(stored), policy.tokenizer, out)  # type: ignore[arg-type]  # its stub


class Chooser:
    """What `node.sampling.choose` does, by another rule: `pick` gets scaled logits and noise, [B, V] each."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._pick = pick

    def __call__(
        self, logits: Tensor, seeds: Sequence[bytes], positions: Sequence[int], *, temperature: float
    ) -> Choice:
        scaled = logits.detach() / temperature
        noises = torch.from_numpy(gumbel_noise(list(seeds), list(positions), vocabulary=logits.shape[1]))
        tokens = self._pick(scaled, noises)
        logprobs = torch.log_softmax(scaled, -1).gather(1, tokens[:, None])[:, 0]
        return Choice(tokens, logprobs)


def runner_up(within: float) -> Chooser:
    """Always the second best choice, where it loses by less than `within`."""

    def pick(scaled: Tensor, noises: Tensor) -> Tensor:
        best = (scaled + noises).topk(2)
        return torch.where(best.values[:, 0] - best.values[:, 1] < within, best.indices[:, 1], best.indices[:, 0])

    return Chooser(pick)


def tempered(temperature: float) -> Chooser:
    """Another temperature, as a share of the run's; the log-probabilities that are sent are the run's."""
    return Chooser(lambda scaled, noises: (scaled / temperature + noises).argmax(-1))


def greedy() -> Chooser:
    """The most likely token, whatever the noise."""
    return Chooser(lambda scaled, _: scaled.argmax(-1))


def nucleus(share: float) -> Chooser:
    """Only tokens within the likeliest `share` (top-p)."""

    def pick(scaled: Tensor, noises: Tensor) -> Tensor:
        ordered = scaled.softmax(-1).sort(-1, descending=True)
        before = ordered.values.cumsum(-1) - ordered.values
        kept = torch.zeros_like(scaled, dtype=torch.bool).scatter(1, ordered.indices, before < share)
        return (scaled + noises).masked_fill(~kept, -torch.inf).argmax(-1)

    return Chooser(pick)


class Fp8CacheEngine(TorchEngine):
    """The torch engine with keys and values rounded to 8-bit floating point (E4M3), as a cache would hold them."""

    async def load(self, path: Path, *, version: int) -> None:
        await super().load(path, version=version)
        for name, module in self.policy.model.named_modules():
            if name.endswith((".k_proj", ".v_proj")):
                module.register_forward_hook(_to_fp8)


def _to_fp8(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output.to(torch.float8_e4m3fn).to(output.dtype)


class _TamperedStateEngine(TorchEngine):
    """The torch engine with a recurrent policy that goes on from another state than the one it left."""

    async def load(self, path: Path, *, version: int) -> None:
        await super().load(path, version=version)
        base: Any = self.policy.model.base_model
        base.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, base: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        state = named.get("state")
        return arguments, named if state is None else {**named, "state": self.tampered(base, state)}

    def tampered(self, base: Any, state: State) -> State:
        """What it goes on from."""
        raise NotImplementedError


class RoundedStateEngine(_TamperedStateEngine):
    """Keeps the state in bfloat16."""

    def tampered(self, base: Any, state: State) -> State:  # noqa: ARG002  (the interface's arguments)
        numbers = {name: each for name, each in state.items() if each.is_floating_point()}
        return {**state, **{name: each.bfloat16().to(each.dtype) for name, each in numbers.items()}}


class StateResetEngine(_TamperedStateEngine):
    """Forgets all it has read, every RESET_TOKENS tokens."""

    def tampered(self, base: Any, state: State) -> State:
        fresh, due = base.started(1), state[LENGTH] % RESET_TOKENS == 0
        places = torch.arange(len(due)).masked_fill(due, len(due))
        return select(join([state, fresh]), places)


Forge = Callable[[Cells, bool], Cells]
"""From a frame, and whether it is the first that is seen, to what a cheat shows the policy instead."""


class ForgedFrameEngine(TorchEngine):
    """The torch engine with a frame-based policy that is shown other frames than its terminal's."""

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
    """The target drawn one column further."""
    drawn = np.roll(np.where(_targets(frame), frame & ~BACKGROUND, 0), 1, axis=1)
    rest = np.where(_targets(frame), frame & BACKGROUND, frame)
    return np.where(drawn != 0, drawn | rest & BACKGROUND, rest)


def moved_cursor(frame: Cells, _first: bool) -> Cells:
    """The cursor drawn one column further."""
    return frame & ~BACKGROUND | np.roll(frame & BACKGROUND, 1, axis=1)


def blanked(frame: Cells, _first: bool) -> Cells:
    """Nothing within two cells of the target."""
    found = frame.copy()
    for row, column in np.argwhere(_targets(frame)):
        found[max(0, row - 2) : row + 3, max(0, column - 2) : column + 3] = 0
    return found


def first_alone(frame: Cells, first: bool) -> Cells:
    """The target one column further in the first frame, and all others as they are."""
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
"""Ways to change frames of `node.environments.terminal`."""


@dataclass(frozen=True, slots=True)
class Prover:
    """Proves any tokens with the right policy, by a prefill: what a cheat does who sampled elsewhere."""

    policy: Policy
    spec: RunSpec

    def prove(self, rollouts: Sequence[Rollout], replies: Sequence[Replies] | None = None) -> list[Rollout]:
        """The same tokens with the log-probabilities and proofs that an honest worker would send with them.

        `replies` are what stands between the tokens of each; None where nothing does.
        """
        said = replies or [()] * len(rollouts)
        return [self._prove(rollout, own) for rollout, own in zip(rollouts, said, strict=True)]

    def _prove(self, rollout: Rollout, replies: Replies) -> Rollout:
        whole = msgspec.structs.replace(rollout, segment_tokens=[len(rollout.completion_ids)])
        chunk_tokens = self.spec.proofs.chunk_tokens
        ((_, span),) = spans_of(whole, replies, row=0, chunk_tokens=chunk_tokens)
        with torch.inference_mode():
            (states,) = TransformersPrefill(self.policy).states([span])
            logits = self.policy.logits(states) / self.spec.sampling.temperature
        chosen = torch.tensor(rollout.completion_ids)
        logprobs = torch.log_softmax(logits, -1).gather(1, chosen[:, None])[:, 0]
        sizes = chunk_sizes(pieces(whole.segment_tokens, replies), chunk_tokens=chunk_tokens)
        chunks = list(torch.split(states.bfloat16(), sizes))
        return msgspec.structs.replace(
            whole,
            logprobs=logprobs.tolist(),
            proofs=build_proofs(chunks, [rollout.seed] * len(chunks), spec=self.spec.proofs),
        )


def as_if_asked(rollouts: Sequence[Rollout], requests: Sequence[SampleRequest]) -> list[Rollout]:
    """Rollouts under the prompts and seeds of `requests`, whatever they were drawn from."""
    return [
        msgspec.structs.replace(rollout, seed=request.seed, prompt_ids=list(request.prompt_ids))
        for rollout, request in zip(rollouts, requests, strict=True)
    ]


def prefixed(requests: Sequence[SampleRequest]) -> list[SampleRequest]:
    """The same requests with other text before the prompt: here the prompt once more."""
    return [replace(request, prompt_ids=request.prompt_ids * 2) for request in requests]
