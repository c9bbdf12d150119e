"""Where rollouts are made: the run's policies, engines that draw from them rightly or wrongly, and a prover."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from coordinator.calibration.cheats import Change, Prover, change_matrices
from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.environments import Environment, Problem, load_environments
from node.episodes.conversation import asking, graded, turn_rules
from node.policy.file import Blueprint, render_prompt
from node.protocol.messages import Lease, candidate_of
from node.protocol.run import RunSpec
from node.protocol.slots import group_seeds, slot_problem
from node.protocol.submission import Rollout
from node.protocol.turns import Replies, replay
from node.sampling.forced import choose
from node.sampling.types import Choice, Choose
from node.worker.policies import PolicyFeed


@dataclass(frozen=True, slots=True)
class Recipe:
    """How completions are drawn: from the run's policy, `change`d, or from another `model`; by `choose`.

    Engines are kept by `engine`. One that only chooses otherwise needs none of its own.
    """

    engine: str = "policy"
    change: Change | None = None
    model: Path | None = None
    choose: Choose = choose


HONEST = Recipe()


class _Switch:
    """Chooses as it is told for now: one engine then serves every rule of choice."""

    def __init__(self) -> None:
        self.choose: Choose = choose

    def __call__(
        self, logits: Tensor, seeds: Sequence[bytes], positions: Sequence[int], *, temperature: float
    ) -> Choice:
        return self.choose(logits, seeds, positions, temperature=temperature)


@dataclass(eq=False)
class _Bench:
    """An engine, and its switch. Whoever draws alike shares it, and its batches; others wait."""

    engine: TorchEngine
    switch: _Switch
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _users: int = 0
    _drawing: tuple[int, Choose] | None = None

    @contextlib.asynccontextmanager
    async def drawing(self, version: int, rule: Choose, load: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Context manager that yields the loaded engine."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._users == 0 or self._drawing == (version, rule))
            await load()
            self.switch.choose = rule
            self._users, self._drawing = self._users + 1, (version, rule)
        try:
            yield
        finally:
            async with self._changed:
                self._users -= 1
                self._changed.notify_all()


class Workshop:
    """Everything that an attacker needs to do honest work, and to do it otherwise."""

    def __init__(self, spec: RunSpec, *, run_id: str, feed: PolicyFeed, folder: Path) -> None:
        torch.set_num_threads(1)
        self.spec = spec
        self.run_id = run_id
        self.folder = folder
        self._feed = feed
        self._benches: dict[str, _Bench] = {}
        self.environments = load_environments(spec)
        folder.mkdir(parents=True, exist_ok=True)

    async def draw(self, version: int, requests: Sequence[SampleRequest], recipe: Recipe = HONEST) -> list[Rollout]:
        """Sample completions by a recipe. Raises FileNotFoundError for a policy that was dropped."""
        bench = self._bench(recipe.engine)
        async with bench.drawing(version, recipe.choose, partial(self._load, bench, version, recipe)):
            rollouts = await bench.engine.generate(requests)
        return [msgspec.structs.replace(rollout, segment_versions=[version]) for rollout in rollouts]

    async def policy(self, version: int) -> Blueprint:
        """Return a policy of the run, whose weights the next one overwrites; raises FileNotFoundError."""
        bench = self._bench(HONEST.engine)
        async with bench.drawing(version, HONEST.choose, partial(self._load, bench, version, HONEST)):
            return bench.engine.policy

    async def prove(self, version: int, rollouts: Sequence[Rollout], replies: Sequence[Replies]) -> list[Rollout]:
        """Any tokens, with the policy's true log-probabilities and proofs; `replies` stand between those of each."""
        bench = self._bench(HONEST.engine)
        # The next policy takes this one's memory.
        async with bench.drawing(version, HONEST.choose, partial(self._load, bench, version, HONEST)):
            prover = Prover(bench.engine.policy, self.spec)
            return await asyncio.to_thread(prover.prove, rollouts, replies)

    async def work(self, lease: Lease) -> Work:
        """What a lease asks for; raises FileNotFoundError."""
        policy = await self.policy(lease.version)
        where = {"run_id": self.run_id, "manifest_digest": lease.manifest_digest, "slot": lease.slot}
        drawn = slot_problem(self.spec, **where, candidate=candidate_of(lease))  # type: ignore[arg-type]
        environment = self.environments[drawn.environment]
        problem = environment.problem(drawn.problem)
        special = self.spec.sampling.special_tokens
        prompt = tuple(render_prompt(policy, problem.prompt, special_tokens=special))
        seeds = group_seeds(self.spec, **where)  # type: ignore[arg-type]
        ask = asking(policy, environment, problem, sampling=self.spec.sampling)
        rules = turn_rules(policy, self.spec, drawn.environment)
        requests = [SampleRequest(prompt, seed, ask=ask, rules=rules) for seed in seeds]
        return Work(self, lease, policy, environment, problem, requests)

    async def close(self) -> None:
        """End the engines."""
        for bench in self._benches.values():
            await bench.engine.close()

    def _bench(self, name: str) -> _Bench:
        if name not in self._benches:
            switch = _Switch()
            self._benches[name] = _Bench(TorchEngine(self.spec, choose=switch), switch)
        return self._benches[name]

    async def _load(self, bench: _Bench, version: int, recipe: Recipe) -> None:
        engine = bench.engine
        if engine.version == version or (recipe.model is not None and engine.version is not None):
            return
        await engine.load(self._file(version) if recipe.model is None else recipe.model, version=version)
        if recipe.change is not None:
            change_matrices(engine.policy.model, recipe.change)

    def _file(self, version: int) -> Path:
        held = self._feed.get(version)
        if held is None or not held.path.exists():
            raise FileNotFoundError(f"policy {version} is not held")
        return held.path


@dataclass(eq=False)
class Work:
    """A leased slot: what is asked, and what an honest worker would send for it."""

    workshop: Workshop
    lease: Lease
    policy: Blueprint
    environment: Environment
    problem: Problem
    requests: list[SampleRequest]
    _honest: list[Rollout] | None = field(default=None, repr=False)

    @property
    def spec(self) -> RunSpec:
        """The run's rules."""
        return self.workshop.spec

    async def honest(self) -> list[Rollout]:
        """Generate what an honest worker sends."""
        if self._honest is None:
            self._honest = await self.draw()
        return self._honest

    async def draw(self, recipe: Recipe = HONEST, requests: Sequence[SampleRequest] | None = None) -> list[Rollout]:
        """Sample completions by a recipe, of the slot's requests or others."""
        return await self.workshop.draw(self.lease.version, self.requests if requests is None else requests, recipe)

    async def prove(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Any tokens, with the policy's true log-probabilities and proofs."""
        return await self.workshop.prove(
            self.lease.version, rollouts, [self._replies(rollout.completion_ids) for rollout in rollouts]
        )

    def _replies(self, tokens: Sequence[int]) -> Replies:
        ends, request = self.policy.eos_ids, self.requests[0]
        return replay(tokens, eos_ids=ends, sampling=self.spec.sampling, ask=request.ask, rules=request.rules).replies

    def reward(self, rollout: Rollout) -> float:
        """Return the run's reward for a completion."""
        rules = self.requests[0].rules
        return graded(self.policy, self.environment, self.problem, rollout.completion_ids, rules=rules)

    def encode(self, text: str) -> list[int]:
        """Encode a text as token ids, without special tokens."""
        ids: list[int] = self.policy.tokenizer.backend_tokenizer.encode(text).ids
        return ids

    @property
    def end(self) -> int:
        """An end-of-sequence token."""
        return min(self.policy.eos_ids)
