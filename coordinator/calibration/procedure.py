"""Procedure of a calibration: honest work, limits fitted to it, then cheats against the limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import torch

from coordinator.calibration.attempts import Attempts
from coordinator.calibration.fit import (
    MIN_LIMITS,
    ROUTED_HEADROOM,
    ROUTED_UNSUSPECTED,
    Group,
    fit,
    fit_limits,
    rounded,
    single_value_limits,
)
from coordinator.calibration.measure import measure
from coordinator.calibration.recorded import choose
from coordinator.calibration.recording import ReadRecording, Recording, describe_machine, make_recording
from coordinator.calibration.result import CalibrationResult, CheatOutcome, outcome
from coordinator.calibration.sketch_step import find_step
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.trial import judge_group_alone
from coordinator.calibration.workers import IN_FLIGHT, PolicyWorker, make_workers
from coordinator.errors import BadConfiguration
from coordinator.training.initial import initial_policy
from node.client.http import measure_body
from node.commands.engine_options import prefills_maker
from node.engines.device import find_device
from node.engines.vllm_settings import VllmSettings
from node.environments import NO_DATASETS, check_rewards, load_environments
from node.policy.families import ATTENTION_FAMILIES
from node.policy.file import inspect_policy, load_policy, save_policy, write_policy
from node.policy.models import RECURRENT
from node.policy.reading import OpenPolicy
from node.protocol.admission import NOT_FINITE, Finding, judge_gain
from node.protocol.evidence import add
from node.protocol.run import LimitsSpec, RunSpec
from node.protocol.submission import Rollout
from node.verification.plan import look_if_suspicious
from node.verification.readings import make_prefills, policy_of
from node.verification.second_look import suspect_gain

log = logging.getLogger(__name__)

STEP_GROUPS = 16
"""Groups per worker for one estimate of the sketch's step."""

STEP_IN_FLIGHT = (8,)

DEFAULT_GROUPS = 128
"""Honest groups of each worker: fewer show too little of how far groups are apart."""

ROUTED_GROUPS = 256
"""Those that a policy with experts takes (docs/adr/0033-routing-is-not-carried.md)."""

_FIGURES = {"rollout_margin_mean": "margin_mean"}
"""Figures whose limits have another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """Calibration settings. `policy` None uses the run's first; `false_rejections` None the run's own.

    `engines` are those of workers, `verifier` is that of the run's verifiers; each is made by
    `node.commands.engine_options`, with `device`, `threads` and the settings `vllm`. `cheats` names those that are
    tried, None all. `datasets` are the files of the run's datasets, by digest. `recordings` are of other machines, as
    far as they are within the limits; `accepted` likewise, even if not (`coordinator.calibration.recorded`).
    """

    engines: Sequence[str] = ("torch",)
    verifier: str = "torch"
    device: str = "auto"
    threads: int | None = None
    vllm: Mapping[str, Any] = field(default_factory=dict)
    policy: Path | None = None
    groups: int = DEFAULT_GROUPS
    cheat_groups: int = 32
    cheats: Collection[str] | None = None
    false_rejections: float | None = None
    datasets: Mapping[str, Path] = field(default_factory=lambda: NO_DATASETS)
    recordings: Sequence[ReadRecording] = ()
    accepted: Sequence[ReadRecording] = ()

    @property
    def shared_vllm(self) -> Mapping[str, Any]:
        """The settings of each vLLM: the verifier's prefill, of whatever engine, stays while a worker's draws, and a
        worker's stays while the verifier measures what the sketch's step is fitted to.
        """
        utilization = self.vllm.get("gpu_memory_utilization", VllmSettings().gpu_memory_utilization)
        return {**self.vllm, "gpu_memory_utilization": utilization / 2}


async def calibrate(spec: RunSpec, settings: CalibrationSettings) -> CalibrationResult:
    """Find the limits of `spec`. Raises BadConfiguration, and what engines and policies raise."""
    async with _Calibration(spec, settings).ready() as calibration:
        return await calibration.fit()


async def record(spec: RunSpec, settings: CalibrationSettings) -> Recording:
    """Draw honest work with the proofs of `spec` as they are, and return how far it deviates on this machine.

    Raises as `calibrate`, which tries its cheats and fits its limits elsewhere.
    """
    async with _Calibration(spec, settings).ready() as calibration:
        return await calibration.record()


@dataclass(frozen=True, slots=True)
class _MeasuredWork:
    """One worker's groups in order, and their measurements."""

    rollouts: Sequence[Sequence[Rollout]]
    measured: Sequence[Group]

    @property
    def held_out(self) -> _MeasuredWork:
        """Every other group: those that no level is fitted to."""
        return _MeasuredWork(self.rollouts[1::2], self.measured[1::2])


class _Calibration:
    def __init__(self, spec: RunSpec, settings: CalibrationSettings) -> None:
        self._spec = spec
        self._settings = settings

    @contextlib.asynccontextmanager
    async def ready(self) -> AsyncIterator[_Calibration]:
        """Prepare policy, slots, workers and the verifier's prefill within the context."""
        settings = self._settings
        torch.set_num_threads(settings.threads or 1)
        if settings.cheat_groups:  # the best-of-eight cheat needs rewards; fail early
            check_rewards(load_environments(self._spec, settings.datasets))
        options = {"device": settings.device, "threads": settings.threads, **settings.shared_vllm}
        with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
            self._folder = Path(folder)
            make = prefills_maker(settings.verifier, state=self._folder / "verifier", **options)
            self._path = await asyncio.to_thread(_policy_file, self._spec, settings.policy, self._folder)
            blueprint = await asyncio.to_thread(inspect_policy, self._path)
            recurrent = blueprint.config.model_type in RECURRENT
            if recurrent and "vllm" in (*settings.engines, settings.verifier):
                raise BadConfiguration(
                    "vLLM has no models for recurrent policies: calibrate with --engine torch and --verifier torch"
                )
            self._digest = measure_body(self._path)[0]
            for one in (*settings.recordings, *settings.accepted):
                if one.recording.policy != self._digest:
                    raise BadConfiguration(
                        f"the recording of node {one.node} was made with the policy {one.recording.policy}, and this "
                        f"one is {self._digest}: give everybody one file (--policy)"
                    )
            self._slots = SyntheticSlots(self._spec, blueprint, datasets=settings.datasets)
            # vLLM last: see `_honest`.
            engines = sorted(settings.engines, key=lambda engine: engine == "vllm")
            workers = make_workers(engines, recurrent=recurrent, **options)
            self._workers = [PolicyWorker(worker, self._path) for worker in workers]
            async with contextlib.AsyncExitStack() as running:
                prefills = make_prefills(self._spec, make)
                running.push_async_callback(prefills.close)
                for worker in self._workers:
                    running.push_async_callback(worker.close)
                self._prefill = await prefills.prefill(self._path, version=0)
                yield self

    async def record(self) -> Recording:
        """Draw and measure honest work; `ready` has to be entered."""
        settings = self._settings
        honest = {name: work.measured for name, work in (await self._honest()).items()}
        self._check_finite(list(honest.values()))
        device, vllm = find_device(settings.device), "vllm" in (*settings.engines, settings.verifier)
        threads = settings.threads or (os.cpu_count() or 1 if vllm else 1)
        machine = describe_machine(self._spec, device, threads=threads, vllm=vllm)
        return make_recording(self._spec, honest, policy=self._digest, verifier=settings.verifier, machine=machine)

    async def fit(self) -> CalibrationResult:
        """Fit limits and try cheats against them; `ready` has to be entered."""
        settings = self._settings
        # Whoever recorded did so with the run's step.
        if self._spec.proofs.has_sketch and not (settings.recordings or settings.accepted):
            self._spec = await self._with_widest_step()
        honest = await self._honest()
        own = [work.measured for work in honest.values()]
        self._check_finite(own)
        taken, recorded = choose(
            own, settings.recordings, settings.accepted, fit=self._limits, proofs=self._spec.proofs
        )
        self._spec = msgspec.structs.replace(self._spec, limits=self._limits(taken))
        held_out = {name: work.held_out for name, work in honest.items()}
        cheats = await self._cheats()
        return CalibrationResult(
            spec=self._spec,
            swarmproof=metadata.version("swarmproof"),
            policy=self._digest,
            verifier=settings.verifier,
            groups=settings.groups,
            least_groups=ROUTED_GROUPS if self._is_routed else DEFAULT_GROUPS,
            largest=_largest(taken, self._spec.limits),
            honest=[await self._outcome(name, work) for name, work in held_out.items()],
            recorded=recorded,
            cheats=[await self._outcome(name, work) for name, work in cheats.items()],
            measured={name: work.measured for name, work in {**held_out, **cheats}.items()},
        )

    @property
    def _is_routed(self) -> bool:
        """Whether the policy has experts: it deviates seldom and far, of which few groups show little."""
        family = ATTENTION_FAMILIES.get(self._prefill.blueprint.config.model_type)
        return family is not None and family.experts is not None

    async def _with_widest_step(self) -> RunSpec:
        """Return the run with the sketch's step that fits the farthest of its workers."""
        hidden = self._prefill.blueprint.hidden
        found = [await find_step(self._spec, partial(self._distances, one), hidden=hidden) for one in self._workers]
        return max(found, key=lambda spec: spec.proofs.sketch_step)

    async def _distances(self, worker: PolicyWorker, spec: RunSpec) -> list[float]:
        numbers = self._slots.allocate(STEP_GROUPS)
        work = await self._measured(await worker.draw(spec, self._slots, numbers, in_flight=STEP_IN_FLIGHT), spec)
        return [value for group in work.measured for one in group for value in one.sketch_distances]

    async def _honest(self) -> dict[str, _MeasuredWork]:
        """Draw and measure each worker's honest work, the last worker's first.

        That is vLLM, which still runs since the sketch's step was sought: so it is started once, and shares the
        machine's memory with the verifier's prefill alone.
        """
        numbers = [self._slots.allocate(self._settings.groups) for _ in self._workers]
        found = dict[str, _MeasuredWork]()
        for worker, own in reversed(list(zip(self._workers, numbers, strict=True))):
            log.info("drawing %d groups with %s", self._settings.groups, worker.name)
            drawn = await worker.draw(self._spec, self._slots, own)
            await worker.close()
            found[worker.name] = await self._measured(drawn, self._spec)
        return {worker.name: found[worker.name] for worker in self._workers}

    async def _measured(self, drawn: Sequence[Sequence[Rollout]], spec: RunSpec) -> _MeasuredWork:
        """Measure one group at a time, as a verifier with a short queue does."""
        size, replies = spec.sampling.group_size, [self._slots.replies(group) for group in drawn]
        measured = await asyncio.to_thread(measure, self._prefill, drawn, replies, spec=spec, at_once=size)
        return _MeasuredWork(drawn, measured)

    def _check_finite(self, honest: Sequence[Sequence[Group]]) -> None:
        if max(_largest(honest, self._spec.limits).values()) >= NOT_FINITE:
            raise BadConfiguration("honest work has non-finite numbers: the policy overflows in its dtype")

    def _limits(self, honest: Sequence[Sequence[Group]]) -> LimitsSpec:
        """Fit levels to every other group of each worker, and single-value limits to all."""
        own = self._spec.limits
        accepted = self._settings.false_rejections
        chance = own.false_rejections if accepted is None else accepted
        parts = len(IN_FLIGHT)
        headroom = ROUTED_HEADROOM if self._is_routed else 1.0
        found = fit_limits(*honest, false_rejections=chance, parts=parts, headroom=headroom)
        half = (groups[::2] for groups in honest)
        levels = fit(*half, false_rejections=chance, parts=parts, headroom=headroom)
        found = rounded(msgspec.structs.replace(found, honest=levels))
        changes: dict[str, Any] = {name: getattr(found, name) for name in single_value_limits(self._spec.proofs)}
        if self._is_routed:
            changes["suspects"] = tuple(one for one in own.suspects if one not in ROUTED_UNSUSPECTED)
        return msgspec.structs.replace(own, honest=found.honest, false_rejections=chance, **changes)

    async def _cheats(self) -> dict[str, _MeasuredWork]:
        if not self._settings.cheat_groups:
            return {}
        dtype, device = getattr(torch, self._spec.model.dtype), find_device(self._settings.device)
        policy = policy_of(self._prefill)
        if policy is None:
            policy = await asyncio.to_thread(load_policy, self._path, dtype=dtype, device=device)
        attempts = Attempts(
            self._spec,
            policy=policy,
            path=self._path,
            folder=self._folder,
            slots=self._slots,
            groups=self._settings.cheat_groups,
            threads=self._settings.threads or 1,
            only=self._settings.cheats,
        )
        found = {}
        async for name, drawn in attempts.groups():
            log.info("measuring cheat: %s", name)
            found[name] = await self._measured(drawn, self._spec)
        return found

    async def _outcome(self, name: str, work: _MeasuredWork) -> CheatOutcome:
        limits, second_looks = self._spec.limits, []
        for rollouts, group in zip(work.rollouts, work.measured, strict=True):
            totals = add(one.totals(limits) for one in group)
            look = look_if_suspicious(random.SystemRandom().random())
            if judge_group_alone(group, limits) is None and self._spec.proofs.has_sketch and look(totals, limits):
                second_looks.append(await self._second_look(rollouts))
        return outcome(name, work.measured, limits, second_looks=[found for found in second_looks if found is not None])

    async def _second_look(self, rollouts: Sequence[Rollout]) -> Finding | None:
        replies = self._slots.replies(rollouts)
        for suspect in self._spec.limits.suspects:
            gain = await suspect_gain(
                suspect, rollouts, replies, version=0, policies=self, published=(0,), spec=self._spec
            )
            finding = judge_gain(suspect, gain, limits=self._spec.limits)
            if finding is not None:
                return finding
        return None

    async def file(self, version: int) -> OpenPolicy:  # noqa: ARG002  (only one policy)
        """Return the policy's file, for second looks."""
        return await asyncio.to_thread(OpenPolicy, self._path, device=find_device(self._settings.device))


def _policy_file(spec: RunSpec, given: Path | None, folder: Path) -> Path:
    """Return the policy's file as the run publishes it, in the run's dtype."""
    dtype = getattr(torch, spec.model.dtype)
    path = folder / "policy.safetensors"
    if given is None:
        log.info("creating the run's first policy")
        write_policy(initial_policy(spec), path, dtype=dtype)
        return path
    policy = load_policy(given, dtype=dtype)
    if policy.config.dtype == dtype:
        return given
    save_policy(policy.model, policy.tokenizer, path)
    return path


def _largest(honest: Sequence[Sequence[Group]], limits: LimitsSpec) -> dict[str, float]:
    """Return the largest honest value of each single-value limit."""
    figures = [one.figures(limits) for groups in honest for group in groups for one in group]
    return {name: max(getattr(one, _FIGURES.get(name, name)) for one in figures) for name in MIN_LIMITS}
