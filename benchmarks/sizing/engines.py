"""How far a real policy's honest work is off, by each engine that a worker may have, and that of a cheat beside it.

The policy is the run's: honest groups drawn by torch and, where it is installed, by vLLM, and groups drawn with weights
of 8 bits, all read by the reference prefill as a verifier with torch does. Limits are those of run.toml.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.report import say
from coordinator.calibration.attempts import Attempts
from coordinator.calibration.fit import Group
from coordinator.calibration.measure import draw, measure
from coordinator.calibration.sketch_step import error_of
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.trial import try_groups
from coordinator.calibration.workers import HonestWorker, make_workers
from node.engines.base import SampleRequest
from node.engines.device import find_device
from node.policy.file import Policy, inspect_policy, load_policy
from node.protocol.run import RunSpec, parse_run_toml
from node.protocol.submission import Rollout
from node.verification.prefill import TransformersPrefill

AT_ONCE: Final = (1, 8)
"""Groups that a worker draws at a time; kernels round differently by the number of rows."""
CHEAT: Final = "int8 weights"
CHEAT_GROUPS: Final = 4
VLLM: Final[Mapping[str, Mapping[str, Any]]] = {
    "cpu": {"max_num_seqs": 16, "kv_cache_gib": 0.25},
    "cuda": {"max_num_seqs": 256, "gpu_memory_utilization": 0.4},
}
"""vLLM's options by device: the verifier's prefill, the torch engine and the cheat hold the policy on the same one."""


@dataclass(frozen=True, slots=True)
class EnginesTask:
    """A policy file, its run's run.toml, and how many groups each engine draws at each of AT_ONCE, at least."""

    policy: Path
    run_toml: str
    engines: Sequence[str]
    groups: int
    threads: int
    device: str = "cpu"


class _Engines:
    """Draws with one policy, and measures by its prefill; figures are named by who drew."""

    def __init__(self, task: EnginesTask) -> None:
        self._task = task
        self._spec: RunSpec = parse_run_toml(task.run_toml)
        device, dtype = find_device(task.device), getattr(torch, self._spec.model.dtype)
        self._policy: Policy = load_policy(task.policy, dtype=dtype, device=device)
        self._prefill = TransformersPrefill(self._policy)
        self._slots = SyntheticSlots(self._spec, inspect_policy(task.policy))
        self.figures: dict[str, Any] = {}

    async def honest(self, worker: HonestWorker) -> None:
        """Draw and measure one worker's groups; the first one warms up."""
        name, drawn = worker.name.split()[0], list[list[Rollout]]()
        started = time.perf_counter()
        async with worker.running(self._spec, self._task.policy) as engine:
            say(f"engines: {name} holds the policy after {time.perf_counter() - started:.1f} s")
            await draw(engine, self._requests(1), at_once=1)
            for at_once in AT_ONCE:
                requests = self._requests(max(self._task.groups, at_once))
                started = time.perf_counter()
                groups = await draw(engine, requests, at_once=at_once)
                tokens = sum(len(one.completion_ids) for group in groups for one in group)
                self.figures[f"{name}_tokens_per_s_{at_once}_at_once"] = tokens / (time.perf_counter() - started)
                drawn += groups
        self._measure(name, drawn)

    def _requests(self, groups: int) -> list[list[SampleRequest]]:
        return [self._slots.requests(slot) for slot in self._slots.allocate(groups)]

    async def cheat(self, folder: Path) -> None:
        """Draw and measure groups with weights of 8 bits."""
        attempts = Attempts(
            self._spec,
            policy=self._policy,
            path=self._task.policy,
            folder=folder,
            slots=self._slots,
            groups=CHEAT_GROUPS,
            threads=self._task.threads,
            only={CHEAT},
        )
        async for _, drawn in attempts.groups():
            self._measure("int8", drawn)

    def _measure(self, name: str, drawn: Sequence[Sequence[Rollout]]) -> None:
        replies, size = [self._slots.replies(group) for group in drawn], self._spec.sampling.group_size
        measured: list[Group] = list(measure(self._prefill, drawn, replies, spec=self._spec, at_once=size))
        limits = self._spec.limits
        distances = [value for group in measured for one in group for value in one.sketch_distances]
        counts, rows = try_groups(measured, limits), [one.figures(limits) for group in measured for one in group]
        self.figures |= {
            f"{name}_deviation": error_of(distances, step=self._spec.proofs.sketch_step),
            f"{name}_groups": counts.groups,
            f"{name}_groups_rejected": counts.rejected_groups,
            **{
                f"{name}_{key}_max": max(getattr(row, key) for row in rows)
                for key in ("exponent_mismatches", "sketch_distance", "token_margin", "margin_mean", "logprob_error")
            },
        }
        say(f"engines: {name} is {self.figures[f'{name}_deviation']:.3g} off, {dict(counts.figures)} rejected")


def measure_engines(task: EnginesTask) -> dict[str, Any]:
    """Return the figures of each engine and of the cheat, named by it."""
    torch.set_num_threads(task.threads)

    async def run() -> dict[str, Any]:
        engines = _Engines(task)
        options = {"device": task.device, "threads": task.threads, **VLLM[task.device]}
        with tempfile.TemporaryDirectory(dir=task.policy.parent) as folder:
            for worker in make_workers(task.engines, **options):
                if worker.name != "torch eager":
                    await engines.honest(worker)
            await engines.cheat(Path(folder))
        return engines.figures

    return asyncio.run(run())
