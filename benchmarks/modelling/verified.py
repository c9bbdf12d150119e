"""Verification of recurrent policies: honest work and cheats, by the demonstration's limits for each family.

A policy with random weights draws completions of up to 96 tokens with the torch engine, in groups of 8, in float32, and
the verifier's prefill measures them. `honest_rejected` counts groups, with at least `--chunks` chunks for each family,
also what a node's drift over all of them leads to. The cheats, each with the share of groups that is rejected whatever
the node did before: the state forgotten every 32 tokens, all matrices in 8 or in 4 bits, 1 % of noise upon them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.modelling.policies import random_policy
from benchmarks.report import say
from coordinator.calibration import cheats
from coordinator.calibration.fit import Group
from coordinator.calibration.measure import draw, measure
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.trial import try_groups
from coordinator.lab.processes.layout import family_run_toml
from node.engines.torch import TorchEngine
from node.policy.families import TINY_RECURRENT
from node.policy.file import load_policy
from node.protocol.run import RunSpec, parse_run_toml
from node.protocol.submission import Rollout
from node.verification.prefill import TransformersPrefill
from node.verification.second_look import int8

NEW_TOKENS = 96
SLOTS_AT_ONCE = 8
GROUPS_AT_ONCE = 16
MOST_ALTERED_GROUPS = 32
ALTERED = {"int8": int8, "int4": cheats.int4, "noise_1pct": cheats.noise}


def measure_families(options: argparse.Namespace) -> dict[str, float]:
    """Measure every family, and the worst of them."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in TINY_RECURRENT:
            key = name.replace("-", "_")
            told = measure_family(name, Path(folder), options)
            say(f"{name}: {told}")
            found |= {f"{figure}_{key}": value for figure, value in told.items()}
    rejected = [value for figure, value in found.items() if figure.startswith("honest_rejected_")]
    resets = [value for figure, value in found.items() if figure.startswith("state_reset_detected_")]
    return found | {"honest_rejected": sum(rejected), "state_reset_detected": min(resets)}


def measure_family(name: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure honest work and each cheat with a random policy."""
    spec = parse_run_toml(family_run_toml(name))
    spec = msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, max_new_tokens=NEW_TOKENS))
    trial = PolicyTrial(spec, random_policy(name, folder / f"{name}.safetensors"))
    found = trial.honest(trial.draw_chunks(options.chunks, at_once=GROUPS_AT_ONCE))
    found["state_reset_detected"] = trial.caught(options.cheat_groups, make=cheats.StateResetEngine)
    path = folder / "altered.safetensors"
    for cheat, change in ALTERED.items():
        cheats.alter(trial.path, path, change)
        groups = min(MOST_ALTERED_GROUPS, options.cheat_groups)
        found[f"{cheat}_detected"] = trial.caught(groups, path=path)
    return found


class PolicyTrial:
    """A policy's file, the rules of a run, and a verifier's prefill of that policy."""

    def __init__(self, spec: RunSpec, path: Path) -> None:
        self.spec, self.path = spec, path
        self.policy = load_policy(path, dtype=torch.float32)
        self._slots, self._prefill = SyntheticSlots(spec, self.policy), TransformersPrefill(self.policy)

    def draw_chunks(self, chunks: int, *, at_once: int) -> list[list[Rollout]]:
        """Draw honest groups, `at_once` of them at a time, until they have so many chunks."""
        drawn: list[list[Rollout]] = []
        while sum(len(rollout.proofs) for group in drawn for rollout in group) < chunks:
            drawn += self.draw(at_once)
        return drawn

    def honest(self, drawn: Sequence[Sequence[Rollout]]) -> dict[str, float]:
        """Measure honest groups: how many are rejected, and the largest figures."""
        groups = self._measured(drawn)
        caught = try_groups(groups, self.spec.limits)
        every = [one for group in groups for one in group]
        return {
            "honest_chunks": sum(len(one.exponent_mismatches) for one in every),
            "honest_rejected": caught.rejected_groups + caught.drifted_groups,
            "honest_exponents": max(max(one.exponent_mismatches) for one in every),
            "honest_mantissa": max(max(one.mantissa_means) for one in every),
            "honest_margin": max(max(one.margins) for one in every),
            "honest_logprob": max(max(one.errors) for one in every),
            "honest_sketch": max(max(one.sketch_distances) for one in every),
        }

    def caught(
        self, groups: int, *, make: Callable[[RunSpec], TorchEngine] = TorchEngine, path: Path | None = None
    ) -> float:
        """Return the share of groups that are rejected where `make`'s engine draws from the policy in `path`."""
        return try_groups(self._measured(self.draw(groups, make=make, path=path)), self.spec.limits).group_share

    def draw(
        self, count: int, *, make: Callable[[RunSpec], TorchEngine] = TorchEngine, path: Path | None = None
    ) -> list[list[Rollout]]:
        """Draw groups."""
        return asyncio.run(self._draw(make(self.spec), path or self.path, count))

    async def _draw(self, engine: TorchEngine, path: Path, count: int) -> list[list[Rollout]]:
        await engine.load(path, version=0)
        try:
            requests = [self._slots.requests(slot) for slot in self._slots.allocate(count)]
            return await draw(engine, requests, at_once=SLOTS_AT_ONCE)
        finally:
            await engine.close()

    def _measured(self, drawn: Sequence[Sequence[Rollout]]) -> list[Group]:
        return list(measure(self._prefill, drawn, spec=self.spec))
