"""Acceptance of forged proofs: a ladder of forgers against three architectures, or others.

`python -m benchmarks.forgery [--json] [--forgeries N] [--short N] [--architectures NAME ...]`. A forgery is a rollout
of a stated length whose tokens and log-probabilities are right and whose proofs are made up
(`benchmarks.forging.forgers`). Each is judged by the code of a real verdict, under both proof schemes at once and each
by itself, at the default limits and at limits that were calibrated in the same run: twice the maximum of honest work in
bfloat16 (`--dtype`), decoded token by token with one kernel and prefilled with another, and levels of it as
`coordinator.calibration.fit` fits them.

The policies are small (hidden 256, 4 layers, about 3 million weights) and trained for half a minute on characters, so
that their states depend on the text; one character out of 128 says much about a state, which is to a forger's
advantage. What they lack is a large policy's outliers.

`accepted` counts forgeries of at least one full chunk (32 tokens) under the recommended scheme and calibrated limits.
Shorter rollouts are counted apart: their proofs have few bits, and the chance of passing without knowing anything is
given beside them. What passes and proves states that are within twice the error of the worst honest rollout is no
forgery, and counts as `same_states`: samples that end in the same repetition.

`accepted_share_peer` is toploc 0.1.6 at its published limits (38, 10, 8) over the same forgeries of 32 tokens, all
rungs and architectures together.

The floor is 0 accepted. A bound: of n forgeries without one accepted, the true share is below 3 / n at 95 %.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.forging import judging, stages
from benchmarks.forging.architectures import ATTENTION, FAMILIES
from benchmarks.forging.stages import FULL, LENGTHS, RUNGS, Counted, Prepared, Settings
from benchmarks.peers import PeerUnavailable, add_peer_options
from benchmarks.report import make_parser, report, say, usable_cores
from benchmarks.toploc import find_peer
from benchmarks.toploc_peer import VERSION

RECOMMENDED = judging.BOTH
PART = 5_000
"""Forgeries of one rung in a task."""


SHORT_NAMES = {"toploc/1": "toploc", "sketch/1": "sketch", judging.BOTH: "both"}
LIMITS = ("default", "calibrated")


def attack_all(
    pool: ProcessPoolExecutor, prepared: Sequence[Prepared], settings: Settings
) -> tuple[list[Counted], float]:
    """Forge every rung, length and architecture; return the counts, and the seconds of all processes together."""
    tasks: list[Future[tuple[list[Counted], float]]] = []
    for tokens in sorted(LENGTHS, reverse=True):
        count = settings.count(tokens)
        for one in prepared:
            parts = [range(start, min(start + PART, count)) for start in range(0, count, PART)]
            tasks += [pool.submit(stages.attack, one, settings, tokens, part) for part in parts]
    together: dict[tuple[str, str, int], Counted] = {}
    seconds = 0.0
    for number, task in enumerate(tasks, 1):
        counted, took = task.result()
        seconds += took
        for found in counted:
            key = (found.family, found.rung, found.tokens)
            together[key] = together.get(key, Counted(*key)) + found
        if number % 10 == 0 or number == len(tasks):
            say(f"{number} of {len(tasks)} parts")
    return list(together.values()), seconds


def totals(counted: Sequence[Counted]) -> dict[str, float]:
    """Count accepted forgeries by length, limits and scheme, over all rungs and architectures."""
    found: dict[str, float] = {}
    for tokens in LENGTHS:
        own = [one for one in counted if one.tokens == tokens]
        for limits in LIMITS:
            every = sum(one.forgeries[limits] for one in own)
            for scheme, short in SHORT_NAMES.items():
                taken = sum(one.taken[limits, scheme] for one in own)
                found[f"accepted_{short}_{limits}_{tokens}_tokens"] = taken
                found[f"accepted_share_{short}_{limits}_{tokens}_tokens"] = taken / max(1, every)
    return found


def rows_of(counted: Sequence[Counted]) -> list[dict[str, Any]]:
    """Return a row for each rung, length and architecture."""
    order = {name: number for number, name in enumerate(RUNGS)}
    rows = []
    for one in sorted(counted, key=lambda one: (one.tokens, order[one.rung], one.family)):
        row: dict[str, Any] = {"tokens": one.tokens, "rung": one.rung, "architecture": one.family}
        for limits in LIMITS:
            row[f"forgeries_{limits}"] = one.forgeries[limits]
            row |= {f"{short}_{limits}": one.taken[limits, scheme] for scheme, short in SHORT_NAMES.items()}
        rows.append(row)
    return rows


def honest_figures(prepared: Sequence[Prepared]) -> dict[str, float]:
    """Return the figures of honest work, the limits fitted to it, and the chance of knowing nothing under them."""
    found: dict[str, float] = {"honest_rollouts": sum(one.judged for one in prepared)}
    for limits in LIMITS:
        for scheme, short in SHORT_NAMES.items():
            found[f"honest_rejected_{short}_{limits}"] = sum(one.rejected[limits, scheme] for one in prepared)
    for one in prepared:
        terms = one.terms["calibrated"]
        found[f"sketch_step_{one.family}"] = terms.proofs.sketch_step
        for name in ("exponent_mismatches", "mantissa_mean", "mantissa_median", "sketch_distance"):
            found[f"honest_max_{name}_{one.family}"] = getattr(one.most, name)
            found[f"limit_{name}_{one.family}"] = getattr(terms.limits, name)
        found[f"loss_{one.family}"] = one.loss
        found |= {f"honest_max_state_error_{tokens}_tokens_{one.family}": far for tokens, far in one.farthest.items()}
        found |= {f"state_error_{name}_{one.family}": value for name, value in one.errors.items()}
    for tokens in LENGTHS:
        for limits in LIMITS:
            found[f"chance_log10_sketch_{limits}_{tokens}_tokens"] = max(
                judging.chance_log10(tokens, one.terms[limits].limits) for one in prepared
            )
    return found


def peer_figures(
    pool: ProcessPoolExecutor, prepared: Sequence[Prepared], settings: Settings, options: argparse.Namespace
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Return the shares that toploc 0.1.6 accepts, or why there are none."""
    try:
        python, versions = find_peer(options)
        count = min(settings.forgeries, options.peer_forgeries)
        say(f"the peer judges {count} forgeries of each rung and architecture")
        tasks = [pool.submit(stages.compare, one, settings, python, count) for one in prepared]
        taken: Counter[str] = Counter()
        for task in tasks:
            taken.update(task.result())
    except PeerUnavailable as error:
        return {"accepted_share_peer": None}, {"accepted_share_peer": str(error)}
    each = count * len(prepared)
    found: dict[str, float | None] = {"accepted_share_peer": taken.total() / (each * len(RUNGS))}
    found["peer_forgeries"] = each * len(RUNGS)
    found |= {f"accepted_share_peer_{rung}": taken[rung] / each for rung in RUNGS}
    return found, {"peer": ", ".join(f"{name} {version}" for name, version in versions.items())}


def attack_figures(counted: Sequence[Counted]) -> dict[str, float]:
    """Return how many forgeries were made, and how many of a chunk or more were accepted."""
    main_rows = [one for one in counted if one.tokens == FULL]
    long = [one for one in counted if one.tokens >= FULL]
    accepted = {rung: sum(one.taken["calibrated", RECOMMENDED] for one in long if one.rung == rung) for rung in RUNGS}
    return {
        "forgeries_per_rung": min(one.forgeries["calibrated"] for one in main_rows),
        "rungs": len({one.rung for one in main_rows}),
        "architectures": len({one.family for one in main_rows}),
        "accepted": sum(accepted.values()),
        "accepted_both_schemes": sum(one.taken["calibrated", judging.BOTH] for one in long),
        **{f"accepted_{rung}": count for rung, count in accepted.items()},
        "same_states": sum(one.same["calibrated", RECOMMENDED] for one in long),
        "forgeries_at_least_one_chunk": sum(one.forgeries["calibrated"] for one in long),
    }


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str], list[dict[str, Any]]]:
    """Measure; return figures, notes, and the rows of the table."""
    settings = Settings(
        dtype=options.dtype,
        hidden=options.hidden,
        training_steps=options.training_steps,
        prompts=options.prompts,
        forgeries=options.forgeries,
        short=options.short,
        default=options.default_forgeries,
    )
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="forgery-") as folder,
        ProcessPoolExecutor(options.processes, mp_context=context) as pool,
    ):
        names: list[str] = options.architectures
        say(f"training {', '.join(names)}, and what the forgers need")
        waiting = [pool.submit(stages.prepare, name, Path(folder) / name, settings) for name in names]
        prepared = [task.result() for task in waiting]
        ready = time.perf_counter()
        say("forging")
        counted, busy = attack_all(pool, prepared, settings)
        forged = time.perf_counter()
        peer, notes = peer_figures(pool, prepared, settings, options)
    every = sum(one.forgeries["calibrated"] for one in counted)
    figures = {
        **attack_figures(counted),
        **peer,
        "forgeries": every,
        "forgeries_per_s": every / (forged - ready),
        "forgeries_per_process_s": every / busy,
        "prepare_s": ready - started,
        "forge_s": forged - ready,
        "seconds": time.perf_counter() - started,
        **totals(counted),
        **honest_figures(prepared),
    }
    notes |= {
        "forgeries_per_rung": f"of {FULL} tokens, for each architecture",
        "accepted": f"of {FULL} tokens or more, scheme {RECOMMENDED}, calibrated limits",
        "calibrated": "as `swarmproof calibrate` fits them: twice the honest maximum, levels, and the sketch's step",
        "policies": f"{options.dtype}, hidden {options.hidden}, trained for {options.training_steps} steps in this run",
    }
    return figures, notes, rows_of(counted)


def main() -> None:
    parser = make_parser(__doc__)
    known = f"of {', '.join(FAMILIES)} (default: the first {len(ATTENTION)})"
    names = {"choices": FAMILIES, "default": list(ATTENTION), "metavar": "NAME"}
    parser.add_argument("--architectures", nargs="+", **names, help=known)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the policies")
    parser.add_argument("--forgeries", type=int, default=100_000, help="of 32 tokens, each rung (default 100000)")
    parser.add_argument("--short", type=int, default=5_000, help="of each other length, each rung (default 5000)")
    parser.add_argument("--default-forgeries", type=int, default=5_000, help="of each length by the default limits too")
    parser.add_argument("--peer-forgeries", type=int, default=5_000, help="judged by the peer too, each rung")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 128 (default 256)")
    parser.add_argument("--training-steps", type=int, default=80, help="of each policy (default 80)")
    parser.add_argument("--prompts", type=int, default=128, help="at least 4, with 8 completions each (default 128)")
    parser.add_argument("--processes", type=int, default=usable_cores(), help="of one thread each (default: all cores)")
    add_peer_options(parser, f"toploc {VERSION}")
    options = parser.parse_args()
    figures, notes, rows = measure(options)
    report("forgery", options, figures, notes, rows=rows)


if __name__ == "__main__":
    main()
