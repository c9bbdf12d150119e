"""Calibrated limits on held-out honest work: `python -m benchmarks.levels [--model FAMILY] [--json]`.

Each honest worker of a calibration (`coordinator.calibration.workers`) draws groups of 8 from the warm-started policy
of the demonstration, with one, 8 and 32 slots in flight, and a verifier's prefill measures them. The same groups are
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

import torch

from benchmarks.report import make_parser, report, say
from benchmarks.warm_start import add_warm_start, warmed_up
from coordinator.calibration.fit import Group, fit_limits, rounded
from coordinator.calibration.measure import measure
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.trial import TrialCounts, try_groups
from coordinator.calibration.workers import IN_FLIGHT, make_workers
from coordinator.lab.processes.layout import family_run_toml
from node.policy.families import TINY_FAMILIES
from node.policy.file import load_policy, save_policy
from node.policy.models.base import RecurrentForCausalLM
from node.protocol.run import RunSpec, parse_run_toml
from node.verification.readings import read_by_transformers

SIZES = (24, 64, 128)
"""Numbers of groups of each worker that limits are fitted on."""
GROUPS, DEALS, SEED = 512, 12, 2


async def draw(spec: RunSpec, *, groups: int, share: float, folder: Path) -> list[list[Group]]:
    """Draw honest groups of each worker, and measure a group at a time."""
    model, tokenizer = warmed_up(share, family=spec.model.initial, seed=SEED)
    path = folder / "policy.safetensors"
    save_policy(model.to(getattr(torch, spec.model.dtype)), tokenizer, path)
    slots = SyntheticSlots(spec, load_policy(path, dtype=torch.float32))
    prefill = read_by_transformers(path, spec=spec)
    found: list[list[Group]] = []
    for worker in make_workers(["torch"], threads=1, recurrent=isinstance(model, RecurrentForCausalLM)):
        drawn = await worker.draw(spec, path, slots, groups=groups)
        found.append(list(measure(prefill, drawn, spec=spec, at_once=spec.sampling.group_size)))
        say(f"{len(drawn)} groups by {worker.name}")
    return found


def deal(workers: Sequence[Sequence[Group]], size: int, *, chance: float, rng: random.Random) -> list[TrialCounts]:
    """Fit limits on `size` groups of each worker, and try each worker's others on them, in their order."""
    seen, others = [], []
    for groups in workers:
        taken = set(sampled(len(groups), size, rng=rng))
        seen.append([group for index, group in enumerate(groups) if index in taken])
        others.append([group for index, group in enumerate(groups) if index not in taken])
    limits = rounded(fit_limits(*seen, false_rejections=chance, parts=len(IN_FLIGHT)))
    return [try_groups(groups, limits) for groups in others]


def sampled(groups: int, size: int, *, rng: random.Random) -> Iterator[int]:
    """Sample `size` indices: equal parts of the groups drawn with one slot in flight, with 8, and with 32."""
    parts = len(IN_FLIGHT)
    for part in range(parts):
        first, after = (groups * each // parts for each in (part, part + 1))
        yield from rng.sample(range(first, after), size * (part + 1) // parts - size * part // parts)


def figures_of(workers: Sequence[Sequence[Group]], *, deals: int, chance: float) -> dict[str, float]:
    """Compute the figures of each size."""
    figures: dict[str, float] = {"honest_groups": sum(map(len, workers)), "deals": deals}
    for size in SIZES:
        rng = random.Random(size)
        found = [deal(workers, size, chance=chance, rng=rng) for _ in range(deals)]
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
    parser.add_argument("--model", choices=TINY_FAMILIES, default="tiny", help="the policy (default tiny)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"honest groups of each worker (default {GROUPS})")
    parser.add_argument("--deals", type=int, default=DEALS, help=f"times that they are dealt out (default {DEALS})")
    add_warm_start(parser)
    options = parser.parse_args()
    if options.groups < 2 * max(SIZES):
        parser.error(f"--groups {2 * max(SIZES)} is the least: half of them are judged by what the others fit")
    torch.set_num_threads(1)
    spec = parse_run_toml(family_run_toml(options.model, dtype=f'"{options.dtype}"'))
    with tempfile.TemporaryDirectory() as folder:
        workers = asyncio.run(draw(spec, groups=options.groups, share=options.warm_start, folder=Path(folder)))
    chance = spec.limits.false_rejections
    figures = figures_of(workers, deals=options.deals, chance=chance)
    notes = {"model": options.model, "dtype": options.dtype, "false_rejections": chance}
    report("levels", options, figures, notes)


if __name__ == "__main__":
    main()
