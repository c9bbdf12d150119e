"""Detection rates of cheats drawn by real engines, under limits fitted on other honest work.

`python -m benchmarks.detect [--json]`. The tiny policy is warm-started and trained for a few steps of GRPO at the
demonstration's learning rate; the last policy is the run's, the one before it is what a stale worker serves. Honest
groups of 8 are drawn in bfloat16, half by vLLM and half by the torch engine, with 1 to 32 slots in flight. Every second
one fits the limits as `swarmproof calibrate` does; the others are judged by them.

Changed weights are drawn by vLLM, other choices by the torch engine; what is proved by the right policy is proved by a
prefill in this process. Every number is measured by transformers as a verifier does who reads twice, in bfloat16 and in
float32 (`limits.readings`; `--readings 1` for once).

- `rollout`: the share of rollouts that alone lead to a rejection;
- `group`: the share of slots (8 rollouts) that are rejected whatever their node did before, where every group that
  would pass gets a second look (`limits.second_looks` 1); `group_default`: where only those get one that deviate;
- `group32`: the share of four slots in a row of which one is rejected, the node's drift included, from a fresh start;
- `slots_until_stopped`: the slot at which a node that always cheats is first rejected;
- `tokens_for_99`: tokens that have to be seen together until 99 % of the cheats are over a limit;
- `changed_group`: the share of slots with a token that is not the forced one: where no proof is wrong, the others are
  honest work;
- `toploc_`, `sketch_`: groups, by one scheme's proofs and nothing else.

A second run of a random policy over 32,000 tokens (23 million weights) repeats the changed weights with `_mid`, and one
of a tiny random policy of each of `--families`, drawn by the torch engine, with `_FAMILY`: there beside the attacks
that only its architecture allows, such as an expert dropped, or half the window (`benchmarks.families` has all).
`--groups 0 --mid-groups 0` measures these families alone, and `--keep` puts them beside an earlier result. The
floor of the honest columns is the stated false-rejection bound, `--false-rejections` for each sum that is judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import workload
from benchmarks.learning.steps import SMALLER, train
from benchmarks.modelling.family_checks import OWN
from benchmarks.modelling.family_policies import random_family_model
from benchmarks.warm_start import add_warm_start, warmed_up
from coordinator.calibration import cheats
from coordinator.calibration.attempts import Attempts
from coordinator.calibration.fit import ROUTED_HEADROOM, Group, fit_limits
from coordinator.calibration.measure import measure
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.trial import judge_rollouts, try_groups
from coordinator.calibration.workers import IN_FLIGHT, HonestWorker, make_workers
from node.policy.families import ATTENTION_FAMILIES
from node.policy.file import Policy, load_policy, save_policy
from node.policy.layout import cast
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.reading import OpenPolicy
from node.protocol.admission import GAIN_LIMIT, judge_group
from node.protocol.evidence import add, evidences
from node.protocol.run import HonestSpec, LimitsSpec, ProofSpec, RunSpec
from node.protocol.submission import Rollout
from node.verification.prefill import Prefill
from node.verification.readings import read_by_transformers
from node.verification.second_look import compare_weights, gain_lower_bound, int8
from node.verification.spans import spans_of

Groups = list[list[Rollout]]

LEARNING_RATE = 1e-4
STEPS = 6
IN_A_ROW = 4
SKETCH_BYTES_PER_TOKEN = 4.0
OTHER_SEED = 1
LOOKS = 100
"""Honest groups of each worker that get a second look."""
FAMILIES = ("qwen3_moe", "deepseek_v3", "gemma3_text")
"""Families with experts, with latent attention besides, and with windows."""
KEYS = {
    "2 % noise on weights": "noise_2pct",
    "fp8 cache": "fp8_cache",
    "temperature x 0.9": "temperature_09",
    "greedy": "greedy",
    "top-p 0.95": "top_p_095",
    "runner-up within 0.1": "runner_up_tau01",
    "changed prompt": "changed_prompt",
    "int4's tokens, right proofs": "int4_tokens",
    "another model's tokens, right proofs": "other_model_tokens",
    "best of 8, right proofs": "best_of_8",
}


@dataclass(slots=True)
class Bench:
    """A policy and a run of it, with fitted limits and the gains of second looks."""

    spec: RunSpec
    path: Path
    policy: Policy
    previous: Path | None
    prefill: Prefill
    slots: SyntheticSlots
    limits: LimitsSpec = field(default_factory=LimitsSpec)
    gains: list[list[float]] = field(default_factory=list)

    def measured(self, groups: Groups) -> list[Group]:
        found: list[Group] = list(measure(self.prefill, groups, spec=self.spec))
        return found

    def rejects(self, rollouts: Group) -> bool:
        """Whether rollouts are rejected, each by itself or all together."""
        totals = add(one.totals(self.limits) for one in rollouts)
        return any(judge_rollouts(rollouts, self.limits)) or judge_group(totals, limits=self.limits) is not None

    def doubts(self, rollouts: Group) -> bool:
        """Whether a group that would pass is suspicious enough for a second look."""
        totals = add(one.totals(self.limits) for one in rollouts)
        return dict(evidences(totals, limits=self.limits))["sketch"] > self.limits.suspicion

    def second_look_rejects(self, rollouts: Sequence[Rollout]) -> bool:
        """Whether a second look attributes the group to int8 weights or to the policy before."""
        spans = [
            span
            for row, one in enumerate(rollouts)
            for _, span in spans_of(one, row=row, chunk_tokens=self.spec.proofs.chunk_tokens)
        ]
        own = OpenPolicy(self.path)
        gains = [compare_weights(own, own, spans, spec=self.spec, alter=int8)]
        if self.previous is not None:
            gains.append(compare_weights(own, OpenPolicy(self.previous), spans, spec=self.spec))
        self.gains.append([gain_lower_bound(one) for one in gains])
        return max(self.gains[-1]) > GAIN_LIMIT


def make_spec(options: argparse.Namespace, *, tokens: int) -> RunSpec:
    spec = workload.make_spec(dtype=options.dtype, tokens=tokens)
    return msgspec.structs.replace(
        spec,
        proofs=ProofSpec(scheme="toploc/1+sketch/1", sketch_step=options.step),
        training=msgspec.structs.replace(spec.training, learning_rate=LEARNING_RATE),
        limits=msgspec.structs.replace(spec.limits, readings=options.readings),
    )


def make_bench(spec: RunSpec, path: Path, *, previous: Path | None) -> Bench:
    dtype = getattr(torch, spec.model.dtype)
    policy = load_policy(path, dtype=dtype)
    prefill = read_by_transformers(path, spec=spec)
    return Bench(
        spec=spec, path=path, policy=policy, previous=previous, prefill=prefill, slots=SyntheticSlots(spec, policy)
    )


async def honest(
    bench: Bench, counts: Sequence[tuple[HonestWorker, int]], *, false_rejections: float, headroom: float = 1.0
) -> dict[str, Any]:
    """Fit limits on half of each worker's groups, and judge the others; `headroom` is `fit_limits`'s."""
    drawn: list[Groups] = []
    for worker, count in counts:
        drawn.append(await worker.draw(bench.spec, bench.path, bench.slots, groups=count))
        workload.say(f"honest: {count} groups by {worker.name}")
    measured = [bench.measured(groups) for groups in drawn]
    bench.limits = fit_limits(
        *(groups[::2] for groups in measured),
        false_rejections=false_rejections,
        parts=len(IN_FLIGHT),
        headroom=headroom,
    )
    rejected = drifted = 0
    for groups in measured:
        caught = try_groups(groups[1::2], bench.limits)
        rejected, drifted = rejected + caught.rejected_groups, drifted + caught.drifted_groups
    fitted = [try_groups(groups[::2], bench.limits) for groups in measured]
    looked = [group for groups in drawn for group in groups[1 : 2 * LOOKS : 2]]
    again = sum(bench.second_look_rejects(group) for group in looked)
    gains = [max(column) for column in zip(*bench.gains, strict=True)]
    workload.say(f"honest: {rejected} rejected, {again} of {len(looked)} by a second look; largest gains {gains}")
    workload.say(f"honest, fitted on: {[dict(one.figures) for one in fitted]}")
    nats = [nats for groups in measured for group in groups[1::2] for nats in _nats(group, bench)]
    return {
        "honest_rollouts": sum(len(group) for groups in measured for group in groups),
        "honest_rejected": sum(one.rejected_groups for one in fitted) + rejected + again,
        "honest_rejected_out_of_sample": rejected + again,
        "honest_drifts_out_of_sample": drifted,
        "honest_second_looks": len(looked),
        "honest_gain_max": max(gains),
        "honest_evidence_max_out_of_sample": max(nats),
        "honest_changed_group": _changed([group for groups in measured for group in groups]),
    }


def _changed(groups: Sequence[Group]) -> float:
    """Return the share of groups with a token that is not the forced one."""
    return sum(any(max(one.margins) > 0 for one in group) for group in groups) / len(groups)


def _nats(group: Group, bench: Bench) -> list[float]:
    return [nats for _, nats in evidences(_together(group, bench), limits=bench.limits)]


def _together(group: Group, bench: Bench) -> Any:
    return add(one.totals(bench.limits) for one in group)


def judged(bench: Bench, groups: Groups, *, key: str) -> dict[str, float | int | None]:
    """Judge the groups of one cheat."""
    measured = bench.measured(groups)
    caught = try_groups(measured, bench.limits)
    passed = [number for number, group in enumerate(measured) if not bench.rejects(group)]
    found_again = [number for number in passed if bench.second_look_rejects(groups[number])]
    doubted = sum(bench.doubts(measured[number]) for number in found_again)
    rows = [try_groups(measured[at : at + IN_A_ROW], bench.limits) for at in range(0, len(measured), IN_A_ROW)]
    schemes = {
        scheme: try_groups(measured, _proofs_alone(bench.limits, levels=levels)).group_share
        for scheme, levels in {"toploc": ("exponents", "mantissa"), "sketch": ("sketch", "far")}.items()
    }
    found: dict[str, float | int | None] = {
        f"{key}_rollout": caught.rollout_share,
        f"{key}_group": (caught.rejected_groups + len(found_again)) / caught.groups,
        f"{key}_group_default": (caught.rejected_groups + doubted) / caught.groups,
        f"{key}_group32": sum(row.first is not None for row in rows) / len(rows),
        f"{key}_slots_until_stopped": caught.first,
        f"{key}_tokens_for_99": _tokens_for(measured, bench, share=0.99),
        f"{key}_changed_group": _changed(measured),
        **{f"{scheme}_{key}_group": share for scheme, share in schemes.items()},
    }
    told = ", ".join(f"{name.removeprefix(key + '_')} {value}" for name, value in found.items())
    workload.say(f"{key}: {told}; {dict(caught.figures)}")
    return found


def _proofs_alone(limits: LimitsSpec, *, levels: Sequence[str]) -> LimitsSpec:
    """Limit one scheme's proofs and nothing else, within the same false-rejection bound."""
    others = {"token_margin", "rollout_margin_mean", "logprob_error"}
    others |= (
        {"sketch_distance"} if "exponents" in levels else {"exponent_mismatches", "mantissa_mean", "mantissa_median"}
    )
    honest = HonestSpec(**{"far": None, **{name: getattr(limits.honest, name) for name in levels}})
    return msgspec.structs.replace(limits, honest=honest, **dict.fromkeys(others, 1e9))


def _tokens_for(groups: Sequence[Group], bench: Bench, *, share: float) -> int | None:
    """Return the tokens of the smallest sets of 1, 2, 4, … rollouts of which `share` are over a limit, or None."""
    flat = list(chain.from_iterable(groups))
    size = 1
    while size <= len(flat) // 8:
        sets = [flat[at : at + size] for at in range(0, len(flat) - size + 1, size)]
        over = sum(
            any(judge_rollouts(one, bench.limits))
            or judge_group(_together(one, bench), limits=bench.limits) is not None
            for one in sets
        )
        if over >= share * len(sets):
            return round(sum(len(one.margins) for one in flat) / len(flat) * size)
        size *= 2
    return None


async def changed_weights(bench: Bench, worker: HonestWorker, folder: Path, *, groups: int) -> dict[str, Any]:
    """Judge work of changed weights, served by `worker`."""
    found: dict[str, Any] = {}
    for key, change in (("int8", int8), ("int4", cheats.int4), ("noise_1pct", cheats.noise)):
        path = folder / "changed.safetensors"
        cheats.alter(bench.path, path, change)
        found |= judged(bench, await worker.draw(bench.spec, path, bench.slots, groups=groups), key=key)
    return found


async def attempted(
    bench: Bench,
    folder: Path,
    options: argparse.Namespace,
    *,
    groups: int,
    keys: Mapping[str, str],
    other: Path | None = None,
) -> dict[str, Any]:
    """Judge each cheat of `keys`, by its name, that the policy's architecture allows."""
    attempts = Attempts(
        bench.spec,
        policy=bench.policy,
        path=bench.path,
        folder=folder,
        slots=bench.slots,
        groups=groups,
        threads=options.threads,
        other=other,
        only=keys,
    )
    found: dict[str, Any] = {}
    async for name, drawn in attempts.groups():
        found |= judged(bench, drawn, key=keys[name])
    return found


async def trained(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the trained tiny policy."""
    spec = make_spec(options, tokens=48)
    workload.say("training the policies")
    newest, stale, *nearer = await train(spec, folder, seed=2, steps=options.steps, warm=options.warm_start)
    other = folder / "other.safetensors"
    model, tokenizer = warmed_up(options.warm_start, seed=OTHER_SEED)
    save_policy(model.to(getattr(torch, spec.model.dtype)), tokenizer, other)
    bench = make_bench(spec, newest, previous=stale)
    first, second, *_ = make_workers([options.engine, "torch"], threads=options.threads)
    counts = [(first, options.groups // 2), (second, options.groups // 2)]
    found = await honest(bench, counts, false_rejections=options.false_rejections)
    found |= await changed_weights(bench, first, folder, groups=options.cheat_groups)
    drawn = await first.draw(spec, stale, bench.slots, groups=options.cheat_groups)
    found |= judged(bench, drawn, key="stale_one_step")
    for key, path in zip(SMALLER, nearer, strict=True):
        drawn = await first.draw(spec, path, bench.slots, groups=options.cheat_groups)
        found |= judged(bench, drawn, key=key)
    return found | await attempted(bench, folder, options, groups=options.cheat_groups, keys=KEYS, other=other)


async def random_policy(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure a larger policy with random weights."""
    path = folder / "random.safetensors"
    workload.save_random_policy(path, workload.size_of(options), dtype=getattr(torch, options.dtype), ends=True)
    bench = make_bench(make_spec(options, tokens=options.tokens), path, previous=None)
    (worker, *_) = make_workers([options.engine], threads=options.threads)
    found = await honest(bench, [(worker, options.mid_groups)], false_rejections=options.false_rejections)
    found |= await changed_weights(bench, worker, folder, groups=max(IN_A_ROW, options.mid_groups // 4))
    return {f"{key}_mid": value for key, value in found.items()}


async def of_family(family: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure a tiny policy of a family with random weights, and the attacks that its architecture allows."""
    path = folder / f"{family}.safetensors"
    save_policy(cast(random_family_model(family), getattr(torch, options.dtype)), make_tokenizer(), path)
    spec = make_spec(options, tokens=options.tokens)
    bench = make_bench(msgspec.structs.replace(spec, proofs=ProofSpec()), path, previous=None)
    workers = make_workers(["torch"], threads=options.threads)
    counts = [(worker, options.family_groups // len(workers)) for worker in workers]
    headroom = ROUTED_HEADROOM if ATTENTION_FAMILIES[family].experts else 1.0
    found = await honest(bench, counts, false_rejections=options.false_rejections, headroom=headroom)
    groups = max(IN_A_ROW, options.family_groups // 4)
    found |= await changed_weights(bench, workers[0], folder, groups=groups)
    found |= await attempted(bench, folder, options, groups=groups, keys=OWN)
    return {f"{key}_{family}": value for key, value in found.items()}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(options.keep.read_text())["figures"] if options.keep else {}
    with tempfile.TemporaryDirectory() as folder:
        figures |= await trained(options, Path(folder)) if options.groups else {}
        figures |= await random_policy(options, Path(folder)) if options.mid_groups else {}
        for family in options.families:
            figures |= await of_family(family, options, Path(folder))
    return figures | {"bytes_per_token": SKETCH_BYTES_PER_TOKEN}


def main() -> None:
    parser = workload.make_parser(__doc__, tokens=64, hidden=256, layers=8)
    told = f"with attacks of their own (default: {' '.join(FAMILIES)})"
    parser.add_argument(
        "--groups", type=int, default=2800, help="honest groups of 8 (default 2800); 0: no trained policy"
    )
    parser.add_argument("--cheat-groups", type=int, default=128, help="groups of each cheat (default 128)")
    parser.add_argument("--mid-groups", type=int, default=48, help="honest groups of the random policy; 0: none")
    parser.add_argument(
        "--families", nargs="*", choices=sorted(ATTENTION_FAMILIES), default=FAMILIES, metavar="FAMILY", help=told
    )
    parser.add_argument("--family-groups", type=int, default=96, help="honest groups of each of these (default 96)")
    parser.add_argument("--keep", type=Path, metavar="RESULT", help="add to the figures of an earlier result's file")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default {STEPS})")
    parser.add_argument("--step", type=float, default=0.005, help="the sketch's step (default 0.005)")
    parser.add_argument("--readings", type=int, choices=(1, 2), default=2, help="of each rollout (default 2)")
    chance = LimitsSpec().false_rejections
    parser.add_argument("--false-rejections", type=float, default=chance, help=f"for each sum (default {chance:g})")
    add_warm_start(parser)
    options = workload.parse(parser)
    figures = asyncio.run(run(options))
    notes = {
        "false_rejections": f"{options.false_rejections:g} for each sum that is judged",
        "other_model_tokens_group": "tokens of a policy trained from another seed, proved by the right one",
        "temperature_09_group32, runner_up_tau01_group32": "four slots of 8 in a row, by the run's own limits",
        "bytes_per_token": "of the sketch; TOPLOC beside it, for comparison, has 8.06",
    }
    workload.report("detect", options, figures, notes)


if __name__ == "__main__":
    main()
