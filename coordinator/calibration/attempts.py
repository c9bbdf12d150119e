"""Try each cheat of `coordinator.calibration.cheats` on a run's own policy."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from coordinator.calibration import cheats
from coordinator.calibration.architecture_cheats import architecture_edits
from coordinator.calibration.measure import draw
from coordinator.calibration.slots import SyntheticSlots
from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.errors import NodeError
from node.policy.file import Policy
from node.policy.models.base import RecurrentForCausalLM
from node.policy.models.frame_action import FrameActionForCausalLM
from node.protocol.run import RunSpec
from node.protocol.slots import SEED_BYTES
from node.protocol.submission import Rollout
from node.sampling.forced import choose
from node.sampling.types import Choose
from node.verification.second_look import int8

log = logging.getLogger(__name__)

IN_FLIGHT = 8
BEST_OF = 8

Groups = list[list[Rollout]]


def _memory_cheats(model: object) -> dict[str, Callable[..., TorchEngine]]:
    """Return engines whose cache, state or frames deviate from the policy's own."""
    if not isinstance(model, RecurrentForCausalLM):
        return {"fp8 cache": cheats.Fp8CacheEngine}
    found: dict[str, Callable[..., TorchEngine]] = {
        f"state forgotten every {cheats.RESET_TOKENS} tokens": cheats.StateResetEngine
    }
    kept = [each.dtype for each in model.model.initial_state(1).values() if each.is_floating_point()]
    if torch.float32 in kept:
        found["bfloat16 state"] = cheats.RoundedStateEngine
    if isinstance(model, FrameActionForCausalLM):
        forged = {name: partial(cheats.ForgedFrameEngine, forge=forge) for name, forge in cheats.FORGERIES.items()}
        found |= {f"frames: {name.replace('_', ' ')}": engine for name, engine in forged.items()}
    return found


class Attempts:
    """Runs every cheat on the same slots, with the torch engine where `policy` is.

    `policy` is the run's, stored in `path`; `folder` receives the policies that cheats derive from it. `other` is an
    unrelated policy with the same tokenizer, for a cheat that draws with it and proves with the right one. `only` names
    the cheats that are tried, None all.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        policy: Policy,
        path: Path,
        folder: Path,
        slots: SyntheticSlots,
        groups: int,
        threads: int,
        other: Path | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self._spec = spec
        self._path = path
        self._folder = folder
        self._other = other
        self._only = only
        self._slots = slots
        self._threads = threads
        self._device = policy.model.device
        self._numbers = slots.allocate(groups)
        self._requests = [slots.requests(slot) for slot in self._numbers]
        self._prover = cheats.Prover(policy, spec)
        self._memory_cheats = _memory_cheats(policy.model)
        self._edits = architecture_edits(policy.config)

    async def groups(self) -> AsyncIterator[tuple[str, Groups]]:
        """Yield each cheat's name and the groups it submits."""
        tries: dict[str, Callable[[], Awaitable[Groups]]] = {
            "int8 weights": partial(self._with_weights, int8),
            "int4 weights": partial(self._with_weights, cheats.int4),
            "1 % noise on weights": partial(self._with_weights, cheats.noise),
            "2 % noise on weights": partial(self._with_weights, partial(cheats.noise, share=0.02)),
            **{
                name: partial(self._draw, self._requests, engine=engine) for name, engine in self._memory_cheats.items()
            },
            **{name: partial(self._with_edit, edit) for name, edit in self._edits.items()},
            "temperature x 0.9": partial(self._with_rule, cheats.tempered(0.9)),
            "greedy": partial(self._with_rule, cheats.greedy()),
            "top-p 0.95": partial(self._with_rule, cheats.nucleus(0.95)),
            "runner-up within 0.1": partial(self._with_rule, cheats.runner_up(0.1)),
            "changed prompt": self._prefixed,
            "int4's tokens, right proofs": self._prove_int4,
            f"best of {BEST_OF}, right proofs": self._best,
        }
        if self._other is not None:
            tries["another model's tokens, right proofs"] = partial(self._prove_other, self._other)
        for name, attempt in tries.items():
            if self._only is None or name in self._only:
                yield name, await attempt()

    async def _draw(
        self,
        requests: Sequence[Sequence[SampleRequest]],
        *,
        path: Path | None = None,
        engine: Callable[..., TorchEngine] = TorchEngine,
        rule: Choose = choose,
        max_prompt_tokens: int | None = None,
    ) -> Groups:
        spec = self._spec
        if max_prompt_tokens is not None:
            sampling = msgspec.structs.replace(spec.sampling, max_prompt_tokens=max_prompt_tokens)
            spec = msgspec.structs.replace(spec, sampling=sampling)
        running = engine(spec, device=self._device, threads=self._threads, choose=rule)
        try:
            await running.load(path or self._path, version=0)
            return await draw(running, requests, at_once=IN_FLIGHT)
        finally:
            await running.close()

    async def _with_weights(self, change: cheats.Change) -> Groups:
        return await self._with_edit(partial(cheats.change_matrices, change=change))

    async def _with_edit(self, edit: cheats.Edit) -> Groups:
        path = self._folder / "altered.safetensors"
        cheats.rewrite(self._path, path, edit)
        return await self._draw(self._requests, path=path)

    async def _with_rule(self, rule: Choose) -> Groups:
        return await self._draw(self._requests, rule=rule)

    async def _prefixed(self) -> Groups:
        requests = [cheats.prefixed(requests) for requests in self._requests]
        longest = max(len(request.prompt_ids) for requests in requests for request in requests)
        drawn = await self._draw(requests, max_prompt_tokens=longest)
        return [cheats.as_if_asked(group, own) for group, own in zip(drawn, self._requests, strict=True)]

    def _prove(self, groups: Groups) -> Groups:
        return [self._prover.prove(group, self._slots.replies(group)) for group in groups]

    async def _prove_int4(self) -> Groups:
        return self._prove(await self._with_weights(cheats.int4))

    async def _prove_other(self, other: Path) -> Groups:
        return self._prove(await self._draw(self._requests, path=other))

    async def _best(self) -> Groups:
        requests = [
            [replace(one, seed=secrets.token_bytes(SEED_BYTES)) for one in own for _ in range(BEST_OF)]
            for own in self._requests
        ]
        drawn = await self._draw(requests)
        best = [self._best_of(slot, group) for slot, group in zip(self._numbers, drawn, strict=True)]
        claimed = [cheats.as_if_asked(group, own) for group, own in zip(best, self._requests, strict=True)]
        return self._prove(claimed)

    def _best_of(self, slot: int, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return of every BEST_OF rollouts the first with the highest reward."""
        rewards = [self._reward(slot, rollout) for rollout in rollouts]
        return [
            rollouts[max(range(start, start + BEST_OF), key=rewards.__getitem__)]
            for start in range(0, len(rollouts), BEST_OF)
        ]

    def _reward(self, slot: int, rollout: Rollout) -> float:
        try:
            return self._slots.reward(slot, rollout)
        except NodeError as error:
            # A cheat would also pick another completion if its machine cannot judge one.
            log.warning("completion cannot be judged here (%s); counted as reward 0", error)
            return 0.0
