"""Calibrated limits on held-out honest work: `python -m benchmarks.levels [--model MODEL | --random FAMILY] [--json]`.

Each honest worker of a calibration (`coordinator.calibration.workers`) draws groups of 8 from the warm-started policy
of the demonstration, or from one of random weights as `benchmarks.families` has it, with one, 8 and 32 slots in flight,
and a verifier's prefill measures them. The same groups are
then dealt out anew, many times: limits are fitted on so many groups of each worker as `swarmproof calibrate` fits them,
and all others are judged by these, as the slots of one node for each worker. Over the deals:

- `judged_N`: groups, each as often as limits fitted on N groups of each worker judged it;
- `rejected_N`: of these, those that are rejected whatever the node did before;
- `drifted_N`: slots at which the node's drift was over the limit;
- `clean_N`: the share of deals without either.

The stated bound is `limits.false_rejections` for each sum. Deals share groups, and differ less than calibrations do.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.modelling.family_checks import run_of
from benchmarks.modelling.family_policies import NAMES, random_family_model
from benchmarks.report import make_parser, report, say
from benchmarks.warm_start import add_warm_start, warmed_up
from coordinator.calibration.fit import ROUTED_HEADROOM, Group, fit_limits, rounded
from coordinator.calibration.measure import measure
from coordinator.calibration.procedure import STEP_GROUPS, STEP_IN_FLIGHT
from coordinator.calibration.sketch_step import find_step
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.trial import TrialCounts, try_groups
from coordinator.calibration.workers import IN_FLIGHT, HonestWorker, make_workers
from coordinator.lab.processes.layout import family_run_toml
from node.policy.families import ATTENTION_FAMILIES, TINY_FAMILIES
from node.policy.file import load_policy, save_policy
from node.policy.layout import cast
from node.policy.models.base import RecurrentForCausalLM
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.run import RunSpec, parse_run_toml
from node.verification.readings import read_by_transformers

SIZES = (24, 64, 128)
"""Numbers of groups of each worker that limits are fitted on."""
GROUPS, DEALS, SEED = 512, 12, 2


async def draw(
    spec: RunSpec,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    groups: int,
    has_step: bool,
    folder: Path,
) -> list[list[Group]]:
    """Draw honest groups of each worker, and measure a group at a time; find the sketch's step first if it has none."""
    path = folder / "policy.safetensors"
    save_policy(cast(model, getattr(torch, spec.model.dtype)), tokenizer, path)
    slots = SyntheticSlots(spec, load_policy(path, dtype=torch.float32))
    workers = make_workers(["torch"], threads=1, recurrent=isinstance(model, RecurrentForCausalLM))

    async def drawn_by(worker: HonestWorker, spec: RunSpec, **sizes: Any) -> list[Group]:
        drawn = await worker.draw(spec, path, slots, **sizes)
        prefill = read_by_transformers(path, spec=spec)
        return list(measure(prefill, drawn, spec=spec, at_once=spec.sampling.group_size))

    async def distances(spec: RunSpec) -> list[float]:
        found = [await drawn_by(worker, spec, groups=STEP_GROUPS, in_flight=STEP_IN_FLIGHT) for worker in workers]
        every = [[value for group in each for one in group for value in one.sketch_distances] for each in found]
        return max(every, key=lambda values: sum(value**2 for value in values) / len(values))

    if not has_step:
        spec = await find_step(spec, distances, hidden=model.config.hidden_size)
    found = []
    for worker in workers:
        found.append(await drawn_by(worker, spec, groups=groups))
        say(f"{groups} groups by {worker.name}")
    return found


def deal(
    workers: Sequence[Sequence[Group]], size: int, *, chance: float, rng: random.Random, headroom: float
) -> list[TrialCounts]:
    """Fit limits on `size` groups of each worker, and try each worker's others on them, in their order."""
    seen, others = [], []
    for groups in workers:
        taken = set(sampled(len(groups), size, rng=rng))
        seen.append([group for index, group in enumerate(groups) if index in taken])
        others.append([group for index, group in enumerate(groups) if index not in taken])
    limits = rounded(fit_limits(*seen, false_rejections=chance, parts=len(IN_FLIGHT), headroom=headroom))
    return [try_groups(groups, limits) for groups in others]


def sampled(groups: int, size: int, *, rng: random.Random) -> Iterator[int]:
    """Sample `size` indices: equal parts of the groups drawn with one slot in flight, with 8, and with 32."""
    parts = len(IN_FLIGHT)
    for part in range(parts):
        first, after = (groups * each // parts for each in (part, part + 1))
        yield from rng.sample(range(first, after), size * (part + 1) // parts - size * part // parts)


def figures_of(
    workers: Sequence[Sequence[Group]],
    *,
    deals: int,
    chance: float,
    sizes: Sequence[int] = SIZES,
    headroom: float = 1.0,
) -> dict[str, float]:
    """Compute the figures of each size."""
    figures: dict[str, float] = {"honest_groups": sum(map(len, workers)), "deals": deals}
    for size in sizes:
        rng = random.Random(size)
        found = [deal(workers, size, chance=chance, rng=rng, headroom=headroom) for _ in range(deals)]
        every = [caught for one in found for caught in one]
        clean = [not any(caught.rejected_groups or caught.drifted_groups for caught in one) for one in found]
        figures |= {
            f"judged_{size}": sum(caught.groups for caught in every),
            f"rejected_{size}": sum(caught.rejected_groups for caught in every),
            f"drifted_{size}": sum(caught.drifted_groups for caught in every),
            f"clean_{size}": sum(clean) / deals,
        }
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument("--model", choices=TINY_FAMILIES, default="tiny", help="the warm-started policy (default tiny)")
    policy.add_argument("--random", choices=NAMES, metavar="FAMILY", help="one of random weights of this family")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"honest groups of each worker (default {GROUPS})")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="GROUPS", help="to fit on (24 64 128)")
    parser.add_argument("--deals", type=int, default=DEALS, help=f"times that they are dealt out (default {DEALS})")
    add_warm_start(parser)
    options = parser.parse_args()
    if options.groups < 2 * max(options.sizes):
        parser.error(f"--groups {2 * max(options.sizes)} is the least: half of them are judged by what the others fit")
    torch.set_num_threads(1)
    if options.random:
        spec, model, tokenizer = run_of(options.dtype), random_family_model(options.random), make_tokenizer()
    else:
        spec = parse_run_toml(family_run_toml(options.model, dtype=f'"{options.dtype}"'))
        model, tokenizer = warmed_up(options.warm_start, family=options.model, seed=SEED)
    with tempfile.TemporaryDirectory() as folder:
        workers = asyncio.run(
            draw(spec, model, tokenizer, groups=options.groups, has_step=options.random is None, folder=Path(folder))
        )
    chance = spec.limits.false_rejections
    family = ATTENTION_FAMILIES.get(model.config.model_type)
    headroom = ROUTED_HEADROOM if family and family.experts else 1.0
    figures = figures_of(workers, deals=options.deals, chance=chance, sizes=options.sizes, headroom=headroom)
    notes = {"model": options.random or options.model, "dtype": options.dtype, "false_rejections": chance}
    report("levels", options, figures, notes)


if __name__ == "__main__":
    main()
