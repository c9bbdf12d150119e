"""Who is caught: honest work of recurrent policies and cheats, by the demonstration's limits for each family.

A policy with random weights draws completions of up to 96 tokens with the torch engine, in groups of 8, in float32, and
the verifier's prefill measures them. `honest_rejected` counts groups, with at least `--chunks` chunks for each family,
also what a node's drift over all of them leads to. The cheats, each with the share of groups that is rejected whatever
the node did before: the state forgotten every 32 tokens, all matrices in 8 or in 4 bits, 1 % of noise upon them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from benchmarks.modelling.policies import RECURRENT_NAMES, random_policy
from coordinator.calibration import cheats
from coordinator.calibration.fit import Group
from coordinator.calibration.measure import draw, measure
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.trial import try_groups
from coordinator.lab.processes.layout import family_run_toml
from node.engines.torch import TorchEngine
from node.policy.file import load_policy
from node.protocol.run import RunSpec, parse_run_toml
from node.protocol.submission import Rollout
from node.verification.prefill import TransformersPrefill
from node.verification.second_look import int8

NEW_TOKENS = 96
SLOTS_AT_ONCE = 8
GROUPS_AT_ONCE = 16
RESET_GROUPS, ALTERED_GROUPS = 100, 32
ALTERED = {"int8": int8, "int4": cheats.int4, "noise_1pct": cheats.noise}


def measure_families(options: argparse.Namespace) -> dict[str, float]:
    """Figures of every family, and the worst of them."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in RECURRENT_NAMES:
            trial = Trial(name, Path(folder))
            key = name.replace("-", "_")
            found |= {f"{figure}_{key}": value for figure, value in trial.honest(chunks=options.chunks).items()}
            found |= {f"{cheat}_detected_{key}": share for cheat, share in trial.cheats().items()}
            told = {figure: value for figure, value in found.items() if figure.endswith(key)}
            print(f"{name}: {told}", file=sys.stderr, flush=True)
    rejected = [value for figure, value in found.items() if figure.startswith("honest_rejected_")]
    resets = [value for figure, value in found.items() if figure.startswith("state_reset_detected_")]
    return found | {"honest_rejected": sum(rejected), "state_reset_detected": min(resets)}


class Trial:
    """A family's random policy, and the demonstration's rules for it."""

    def __init__(self, name: str, folder: Path) -> None:
        spec = parse_run_toml(family_run_toml(name))
        self.spec = msgspec.structs.replace(
            spec, sampling=msgspec.structs.replace(spec.sampling, max_new_tokens=NEW_TOKENS)
        )
        self._folder = folder
        self._path = random_policy(name, folder / f"{name}.safetensors")
        policy = load_policy(self._path, dtype=torch.float32)
        self._slots, self._prefill = SyntheticSlots(self.spec, policy), TransformersPrefill(policy)

    def honest(self, *, chunks: int) -> dict[str, float]:
        """Groups until there are so many chunks: those that are rejected, and the largest figures."""
        groups: list[Group] = []
        while sum(len(one.exponent_mismatches) for group in groups for one in group) < chunks:
            groups += self._drawn(TorchEngine, self._path, GROUPS_AT_ONCE)
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

    def cheats(self) -> dict[str, float]:
        """The share of each cheat's groups that is rejected."""
        found = {"state_reset": self._caught(cheats.StateResetEngine, self._path, RESET_GROUPS)}
        for cheat, change in ALTERED.items():
            path = self._folder / "altered.safetensors"
            cheats.alter(self._path, path, change)
            found[cheat] = self._caught(TorchEngine, path, ALTERED_GROUPS)
        return found

    def _caught(self, make: Callable[[RunSpec], TorchEngine], path: Path, groups: int) -> float:
        return try_groups(self._drawn(make, path, groups), self.spec.limits).group_share

    def _drawn(self, make: Callable[[RunSpec], TorchEngine], path: Path, count: int) -> list[Group]:
        rollouts = asyncio.run(self._draw(make(self.spec), path, count))
        return list(measure(self._prefill, rollouts, spec=self.spec))

    async def _draw(self, engine: TorchEngine, path: Path, count: int) -> list[list[Rollout]]:
        await engine.load(path, version=0)
        try:
            asked = [self._slots.requests(slot) for slot in self._slots.allocate(count)]
            return await draw(engine, asked, at_once=SLOTS_AT_ONCE)
        finally:
            await engine.close()
