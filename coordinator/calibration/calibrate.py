"""The course of a calibration: honest work first, limits from it, then cheats against the limits."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec
import torch

from coordinator.calibration.attempts import Attempts
from coordinator.calibration.fit import LEAST, Group, fit, fit_limits, judged_alone, rounded
from coordinator.calibration.measure import measure
from coordinator.calibration.result import Found, Outcome, outcome
from coordinator.calibration.sketch_step import find_step
from coordinator.calibration.slots import Slots
from coordinator.calibration.trial import judge_alone
from coordinator.calibration.workers import IN_FLIGHT, Worker, make_workers
from coordinator.errors import BadConfiguration
from coordinator.training.initial import initial_policy
from node.environments import check_rewards, load_environment
from node.exchange import measure_body
from node.models.base import RecurrentForCausalLM
from node.policy import load_policy, save_policy
from node.prefill import Prefill
from node.protocol.admission import NOT_FINITE
from node.protocol.evidence import add
from node.protocol.run import LimitsSpec, RunSpec
from node.protocol.submission import Rollout
from node.readings import policy_of, read_by_transformers
from node.second_look import at_doubt, look_again

log = logging.getLogger(__name__)

STEP_GROUPS = 16
"""Groups of each worker for one look at the sketch's step."""

STEP_IN_FLIGHT = (8,)

_FIGURES = {"rollout_margin_mean": "margin_mean"}
"""Figures whose limits go by another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to calibrate with. `policy` None is the run's first; `false_rejections` None the run's own."""

    engines: Sequence[str] = ("torch",)
    policy: Path | None = None
    groups: int = 128
    cheat_groups: int = 32
    false_rejections: float | None = None
    threads: int | None = None


async def calibrate(spec: RunSpec, settings: Settings) -> Found:
    """Find the limits of `spec`. Raises BadConfiguration, and what engines and policies raise."""
    torch.set_num_threads(settings.threads or 1)
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        return await _Calibration(spec, settings, Path(folder)).run()


@dataclass(frozen=True, slots=True)
class _Work:
    """Groups of one worker in their order, and what was measured of them."""

    rollouts: Sequence[Sequence[Rollout]]
    measured: Sequence[Group]

    @property
    def held_out(self) -> _Work:
        """Every other group: those that no level is fitted to."""
        return _Work(self.rollouts[1::2], self.measured[1::2])


class _Calibration:
    def __init__(self, spec: RunSpec, settings: Settings, folder: Path) -> None:
        self._spec = spec
        self._settings = settings
        self._folder = folder

    async def run(self) -> Found:
        if self._settings.cheat_groups:  # the best of eight needs rewards, at the very end
            check_rewards([load_environment(environment) for environment in self._spec.environments])
        self._path = await asyncio.to_thread(_policy_file, self._spec, self._settings.policy, self._folder)
        self._prefill = await asyncio.to_thread(read_by_transformers, self._path, spec=self._spec)
        policy = policy_of(self._prefill)
        assert policy is not None, "it was read in this process"
        self._policy = policy
        self._slots = Slots(self._spec, policy)
        recurrent = isinstance(policy.model, RecurrentForCausalLM)
        if recurrent and "vllm" in self._settings.engines:
            raise BadConfiguration("vLLM has no models for recurrent policies; calibrate with --engine torch")
        self._workers = make_workers(self._settings.engines, threads=self._settings.threads, recurrent=recurrent)
        if self._spec.proofs.has_sketch:
            self._spec = await find_step(self._spec, self._farthest, hidden=policy.hidden)
        honest = {worker.name: await self._honest(worker) for worker in self._workers}
        self._spec = self._with_limits([work.measured for work in honest.values()])
        held_out = {name: work.held_out for name, work in honest.items()}
        cheats = await self._cheats()
        return Found(
            spec=self._spec,
            veriswarm=metadata.version("veriswarm"),
            policy=measure_body(self._path)[0],
            groups=self._settings.groups,
            largest=_largest([work.measured for work in honest.values()], self._spec.limits),
            honest=[await self._outcome(name, work) for name, work in held_out.items()],
            cheats=[await self._outcome(name, work) for name, work in cheats.items()],
            measured={name: work.measured for name, work in {**held_out, **cheats}.items()},
        )

    async def _farthest(self, spec: RunSpec) -> list[float]:
        """The sketch distances of the worker whose mean square is the largest."""
        found = []
        for worker in self._workers:
            drawn = await worker.draw(spec, self._path, self._slots, groups=STEP_GROUPS, in_flight=STEP_IN_FLIGHT)
            work = await self._measured(drawn, spec)
            found.append([value for group in work.measured for one in group for value in one.sketch_distances])
        return max(found, key=lambda values: sum(value**2 for value in values) / len(values))

    async def _honest(self, worker: Worker) -> _Work:
        log.info("%s draws %d groups", worker.name, self._settings.groups)
        return await self._measured(
            await worker.draw(self._spec, self._path, self._slots, groups=self._settings.groups), self._spec
        )

    async def _measured(self, drawn: Sequence[Sequence[Rollout]], spec: RunSpec) -> _Work:
        """A group at a time, as a verifier does whose queue is short."""
        size = spec.sampling.group_size
        return _Work(drawn, await asyncio.to_thread(measure, self._prefill, drawn, spec=spec, at_once=size))

    def _with_limits(self, honest: Sequence[Sequence[Group]]) -> RunSpec:
        """Levels are fitted to every other group, what is judged alone is the largest of all."""
        own = self._spec.limits
        largest = _largest(honest, own)
        if max(largest.values()) >= NOT_FINITE:
            raise BadConfiguration("honest work has numbers that are not finite: the policy overflows in its dtype")
        accepted = self._settings.false_rejections
        chance = own.false_rejections if accepted is None else accepted
        parts = len(IN_FLIGHT)
        found = fit_limits(*honest, false_rejections=chance, parts=parts)
        levels = fit(*(groups[::2] for groups in honest), false_rejections=chance, parts=parts)
        found = rounded(msgspec.structs.replace(found, honest=levels))
        changes = {name: getattr(found, name) for name in judged_alone(self._spec.proofs)}
        limits = msgspec.structs.replace(own, honest=found.honest, false_rejections=chance, **changes)
        return msgspec.structs.replace(self._spec, limits=limits)

    async def _cheats(self) -> dict[str, _Work]:
        if not self._settings.cheat_groups:
            return {}
        attempts = Attempts(
            self._spec,
            policy=self._policy,
            path=self._path,
            folder=self._folder,
            slots=self._slots,
            groups=self._settings.cheat_groups,
            threads=self._settings.threads or 1,
        )
        found = {}
        async for name, drawn in attempts.groups():
            log.info("cheat: %s", name)
            found[name] = await self._measured(drawn, self._spec)
        return found

    async def _outcome(self, name: str, work: _Work) -> Outcome:
        limits, seen_again = self._spec.limits, []
        for rollouts, group in zip(work.rollouts, work.measured, strict=True):
            totals = add(one.totals(limits) for one in group)
            if judge_alone(group, limits) is None and at_doubt(totals, limits):
                seen_again.append(await look_again(rollouts, version=0, policies=self, published=(0,), spec=self._spec))
        return outcome(name, work.measured, limits, seen_again=[found for found in seen_again if found is not None])

    async def prefill(self, version: int) -> Prefill:  # noqa: ARG002  (there is one)
        """The policy, for second looks."""
        return self._prefill


def _policy_file(spec: RunSpec, given: Path | None, folder: Path) -> Path:
    """The policy as the run publishes it: in the run's dtype."""
    dtype = getattr(torch, spec.model.dtype)
    path = folder / "policy.safetensors"
    if given is None:
        log.info("making the run's first policy")
        model, tokenizer = initial_policy(spec)
    else:
        policy = load_policy(given, dtype=dtype)
        if policy.config.dtype == dtype:
            return given
        model, tokenizer = policy.model, policy.tokenizer
    save_policy(model.to(dtype), tokenizer, path)
    return path


def _largest(honest: Sequence[Sequence[Group]], limits: LimitsSpec) -> dict[str, float]:
    """Of each value that is judged alone the largest."""
    figures = [one.figures(limits) for groups in honest for group in groups for one in group]
    return {name: max(getattr(one, _FIGURES.get(name, name)) for one in figures) for name in LEAST}
