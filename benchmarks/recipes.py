"""Ablation of the recipe: `python -m benchmarks.recipes [--json] [--plot FILE.png]`.

Each variant is the demonstration's recipe with one change, trained from the same three warm-started tiny policies, with
completions that are two steps old as in a busy swarm. A row has the mean reward of the last ten steps, its mean and
range over the seeds, and what the change is for. 10 to 25 minutes on two cores; `--only` names variants.

Rewards of steps compare recipes only where all learn from the same problems. Where a variant chooses its own, see
`held_out`, what the last policy earns on held-out problems, and `signal`, the share of groups whose rewards differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.loop import LearningCurve, LearningTask, learn, spec_of
from benchmarks.report import make_parser, report, say
from benchmarks.warm_start import add_warm_start, save_warmed_up
from coordinator.training.evaluation import EvaluationSettings, evaluate_policy
from coordinator.training.filtering import FilterSettings, filter_problems, filtered_spec
from node.protocol.run import LengthSpec

LAST = 10
LAG = 2
PROBLEMS = 128
HELD_OUT = EvaluationSettings(problems=128, samples=4)


@dataclass(frozen=True, slots=True)
class Variant:
    """One change to the recipe.

    `lag`: how many steps old completions are. `filtered`: problems that the first policy never or always solves are
    left out of a finite set.
    """

    name: str
    changes: dict[str, Any]
    lag: int = LAG
    filtered: bool = False


VARIANTS = (
    Variant("baseline", {}),
    Variant("advantage without std", {"normalize_advantage": False}),
    Variant("masked importance sampling", {"objective": "masked"}),
    Variant("one-sided clipping", {"clip_delta": 1e9}),
    Variant("KL 0.02", {"kl_coefficient": 0.02}),
    Variant("entropy 0.005", {"entropy_coefficient": 0.005}),
    Variant("gradient clip 0.1", {"gradient_clip": 0.1}),
    Variant("Muon", {"optimizer": "muon"}),
    Variant("online filtering", {"only_signal": True}),
    Variant("finite set", {"problems": PROBLEMS}),
    Variant("offline filter", {"problems": PROBLEMS}, filtered=True),
    Variant("pools", {"problems": PROBLEMS, "pools": True}),
    Variant("length targets", {"length": {"targets": (16, 24, 32), "penalty": 0.01, "form": "short"}}),
    Variant("one update a step", {"minibatches": 1}),
    Variant("0 steps old", {}, lag=0),
    Variant("1 step old", {}, lag=1),
    Variant("4 steps old", {}, lag=4),
)


def trained(first: str, seed: int, steps: int, variant: Variant) -> LearningCurve:
    """Train from the policy file `first`."""
    task, policy, changes = LearningTask(seed=seed, steps=steps), Path(first), dict(variant.changes)
    if "length" in changes:
        changes["length"] = LengthSpec(**changes["length"])
    spec = spec_of(task, **changes)
    if variant.filtered:
        spec = filtered_spec(spec, filter_problems(policy, spec=spec, settings=FilterSettings(count=PROBLEMS)))
    last = policy.with_name(f"{seed}-{variant.name}.safetensors")
    curve = learn(policy, task, spec, lag=variant.lag, keep=last)
    curve.held_out = evaluate_policy(last, spec=spec, settings=HELD_OUT).reward
    return curve


def rows_of(variants: Sequence[Variant], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train each variant; return a row for each, with its `curves` by seed."""
    # Forked processes would inherit torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        files = [Path(folder) / f"{seed}.safetensors" for seed in range(options.seeds)]
        firsts = [pool.submit(save_warmed_up, path, options.warm_start, seed=seed) for seed, path in enumerate(files)]
        paths = [str(first.result()) for first in firsts]
        curves = {
            (variant.name, seed): pool.submit(trained, paths[seed], seed, options.steps, variant)
            for variant in variants
            for seed in range(options.seeds)
        }
        rows = []
        for variant in variants:
            found = [curves[variant.name, seed].result() for seed in range(options.seeds)]
            rows.append(row_of(variant, found))
            say(_line(rows[-1]))
    return rows


def row_of(variant: Variant, learnt: Sequence[LearningCurve]) -> dict[str, Any]:
    """Return rewards at the end by seed and on average; with length targets, by how many tokens they were missed."""
    curves = [curve.rewards for curve in learnt]
    ends = [statistics.fmean(curve[-LAST:]) for curve in curves]
    apart = [curve.held_out for curve in learnt if curve.held_out is not None]
    missed = [(curve.missed[0], statistics.fmean(curve.missed[-LAST:])) for curve in learnt if curve.missed]
    return {
        "variant": variant.name,
        "changes": variant.changes,
        "lag": variant.lag,
        "reward": round(statistics.fmean(ends), 4),
        "rewards": [round(end, 4) for end in ends],
        "held_out": round(statistics.fmean(apart), 4),
        "held_out_rewards": [round(reward, 4) for reward in apart],
        "signal": round(statistics.fmean(share for curve in learnt for share in curve.signal), 4),
        "first": round(statistics.fmean(statistics.fmean(curve[:5]) for curve in curves), 4),
        **({"missed": [[round(tokens, 2) for tokens in each] for each in missed]} if missed else {}),
        "curves": [[round(reward, 4) for reward in curve] for curve in curves],
    }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a small plot of each variant over the baseline: the mean of the seeds, and their range."""
    import matplotlib  # noqa: PLC0415  (needed for this alone)

    matplotlib.use("agg")
    from matplotlib import pyplot  # noqa: PLC0415

    baseline, others = rows[0], rows[1:]
    across, down = 4, -(-(len(rows) - 1) // 4)
    size = (3.2 * across, 2.3 * down)
    figure, axes = pyplot.subplots(down, across, figsize=size, sharex=True, sharey=True, squeeze=False)
    for place in axes.flat[len(others) :]:
        place.axis("off")
    for place, row in zip(axes.flat, others, strict=False):
        for shown, colour in ((baseline, "#888888"), (row, "#1565c0")):
            by_step = list(zip(*shown["curves"], strict=True))
            steps, low, high = range(1, len(by_step) + 1), list(map(min, by_step)), list(map(max, by_step))
            place.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)
            place.plot(steps, list(map(statistics.fmean, by_step)), color=colour, lw=1.4)
        place.set_title(f"{row['variant']}: {row['reward']:.2f}", fontsize=9)
        place.grid(alpha=0.25)
        place.tick_params(labelsize=8)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    about = f"Grey: the baseline ({baseline['reward']:.2f}). Lines are means of the seeds, bands their range."
    figure.suptitle(about, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _line(row: dict[str, Any]) -> str:
    by_seed, apart = (" ".join(f"{each:.3f}" for each in row[name]) for name in ("rewards", "held_out_rewards"))
    more = f"held out {row['held_out']:.3f} ({apart}), signal {row['signal']:.2f}"
    return f"{row['variant']:28} {row['reward']:.3f} ({by_seed}), {more}"


def main() -> None:
    parser = make_parser(__doc__)
    names = [variant.name for variant in VARIANTS[1:]]
    parser.add_argument("--plot", type=Path, help="draw the curves into a PNG")
    parser.add_argument("--only", nargs="*", choices=names, help="beside the baseline")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    add_warm_start(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [variant for variant in VARIANTS if options.only is None or variant.name in ("baseline", *options.only)]
    rows = rows_of(chosen, options)
    if options.plot is not None:
        draw(rows, options.plot)
    figures = {row["variant"].replace(" ", "_"): row["reward"] for row in rows}
    report("recipes", options, figures, rows=rows)


if __name__ == "__main__":
    main()
