"""How many honest groups a calibration needs: `python -m benchmarks.levels [--json]`.

Honest groups of 8 are drawn in bfloat16 by the torch engine with both of its attention kernels, measured once as a
verifier does who reads twice, and dealt out anew many times: levels are fitted on some as `veriswarm calibrate` does,
and all others are judged by them. For each size of the sample, over the deals:

- `rejected_share_N`: the share of honest groups rejected that the levels of N groups have not seen, mean of the deals;
- `rejected_worst_N`: the same in the worst deal;
- `clean_deals_N`: the share of deals in which no honest group was rejected.

The floor is the stated bound, `limits.false_rejections` for each sum that is judged. Deals share groups, so the spread
between them is less than that between calibrations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, workload
from coordinator.calibration.fit import Group, fit_limits
from coordinator.calibration.measure import measure
from coordinator.calibration.slots import Slots
from coordinator.calibration.trial import judge_alone
from coordinator.calibration.workers import make_workers
from coordinator.training.warm_start import warm_start
from node.policy import load_policy, save_policy
from node.protocol.run import LimitsSpec
from node.readings import read_by_transformers

SIZES = (16, 24, 48, 128, 256)


async def drawn(groups: int, *, dtype: str, folder: Path) -> list[list[Group]]:
    """Honest groups of each of the torch engine's workers, measured."""
    spec = workload.make_spec(dtype=dtype, tokens=48)
    model, tokenizer = warm_start(seed=2)
    path = folder / "policy.safetensors"
    save_policy(model.to(getattr(torch, dtype)), tokenizer, path)
    slots = Slots(spec, load_policy(path, dtype=torch.float32))
    prefill = read_by_transformers(path, spec=spec)
    found: list[list[Group]] = []
    for worker in make_workers(["torch"], threads=1):
        rollouts = await worker.draw(spec, path, slots, groups=groups // 2)
        found.append(list(measure(prefill, rollouts, spec=spec)))
        workload.say(f"{len(found[-1])} groups by {worker.name}")
    return found


def deal(workers: Sequence[Sequence[Group]], size: int, *, chance: float, rng: random.Random) -> float:
    """Fit levels on `size` groups, as many of each worker; the share of the others that they reject."""
    seen, others = [], []
    for groups in workers:
        order = rng.sample(range(len(groups)), len(groups))
        seen.append([groups[index] for index in order[: size // len(workers)]])
        others += [groups[index] for index in order[size // len(workers) :]]
    limits = fit_limits(*seen, false_rejections=chance)
    return sum(judge_alone(group, limits) is not None for group in others) / len(others)


def figures_of(workers: Sequence[Sequence[Group]], *, deals: int, chance: float) -> dict[str, Any]:
    """The figures of each size."""
    figures: dict[str, Any] = {"honest_groups": sum(map(len, workers)), "deals": deals}
    for size in SIZES:
        rng = random.Random(size)
        shares = [deal(workers, size, chance=chance, rng=rng) for _ in range(deals)]
        figures |= {
            f"rejected_share_{size}": statistics.fmean(shares),
            f"rejected_worst_{size}": max(shares),
            f"clean_deals_{size}": sum(share == 0 for share in shares) / deals,
        }
        workload.say(f"{size} groups: {statistics.fmean(shares):.5f} rejected, at worst {max(shares):.5f}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--groups", type=int, default=1200, help="honest groups of 8 (default 1200)")
    parser.add_argument("--deals", type=int, default=30, help="times that they are dealt out (default 30)")
    options = parser.parse_args()
    if options.groups < 2 * max(SIZES):
        parser.error(f"--groups {2 * max(SIZES)} is the least: half of them are judged by what the others fit")
    torch.set_num_threads(1)
    chance = LimitsSpec().false_rejections
    with tempfile.TemporaryDirectory() as folder:
        workers = asyncio.run(drawn(options.groups, dtype=options.dtype, folder=Path(folder)))
    figures = figures_of(workers, deals=options.deals, chance=chance)
    if options.json:
        notes = {"false_rejections": f"{chance:g} for each sum that is judged", "dtype": options.dtype}
        print(json.dumps({"benchmark": "levels", "machine": machine.describe(), "figures": figures, "notes": notes}))


if __name__ == "__main__":
    main()
