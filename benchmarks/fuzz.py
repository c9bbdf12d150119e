"""Fuzzing of every parser that a stranger can reach: `python -m benchmarks.fuzz [--json] [--inputs N]`.

Each target (`benchmarks/fuzzing/targets`) starts from what the real writers write, and is fed mutations of it: edits of
bytes, of trees (JSON, MessagePack) and of HTTP, signed again where only a signature would keep them out. What
goes a new way through a parser joins the corpus. A crash is anything but the documented errors, and a property that
does not hold, such as: what is decoded encodes to the same bytes. Each target runs in a process of its own, so that the
end of that process is a crash too, and one that hangs is ended. Time is processor time, so that another process on the
machine costs nothing; what is over a budget is tried again before it counts.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from benchmarks.fuzzing.campaign import TargetResult, run_all
from benchmarks.fuzzing.target import Target
from benchmarks.fuzzing.targets import all_targets
from benchmarks.report import make_parser, report, say

INPUTS = 1_050_000
KINDS = {"crashes": "crash", "hangs": "hang", "over_budget": "over_budget"}
COLUMNS = f"{'target':<28} {'inputs':>8} {'taken':>8} {'ways':>5} {'per s':>7} {'slowest ms':>10} {'MiB':>6}  found"
MAX_TOLD = 20
NOTES = {
    "inputs_per_s": "of one process with its start, the making of inputs included",
    "not_covered": "what only this machine's owner writes: run.toml, node.toml, flags, keys, state, the database",
}


def make_plan(targets: list[Target], inputs: int) -> list[tuple[Target, int]]:
    """Give each target its number of inputs; the slow ones, whose shares are small, come first."""
    shares = sum(target.share for target in targets)
    plan = [(target, -(-inputs * target.share // shares)) for target in targets]
    return sorted(plan, key=lambda step: step[1])


def figures_of(results: list[TargetResult]) -> dict[str, float]:
    """Sum up; for each target also its inputs, its rate, and the processor time of its slowest input."""
    figures: dict[str, float] = {"inputs": sum(result.inputs for result in results), "targets": len(results)}
    figures |= {key: sum(result.count(kind) for result in results) for key, kind in KINDS.items()}
    for result in sorted(results, key=lambda result: result.target):
        figures[f"inputs_{result.target}"] = result.inputs
        figures[f"inputs_per_s_{result.target}"] = round(result.inputs / max(result.seconds, 1e-9), 1)
        figures[f"slowest_ms_{result.target}"] = round(result.slowest_ms, 1)
    return figures


def row(result: TargetResult) -> str:
    """Format a progress line."""
    rate = result.inputs / max(result.seconds, 1e-9)
    found = ", ".join(f"{count} {key}" for key, kind in KINDS.items() if (count := result.count(kind)))
    return (
        f"{result.target:<28} {result.inputs:>8} {result.accepted:>8} {result.ways:>5} {rate:>7.0f} "
        f"{result.slowest_ms:>10.1f} {result.peak_mib:>6.1f}  {found or '-'}"
    )


def details(results: list[TargetResult]) -> list[str]:
    """List what was found, each once."""
    found = {f"{result.target}: {one.kind}: {one.detail}" for result in results for one in result.found}
    return sorted(found)[:MAX_TOLD]


def chosen(names: list[str]) -> list[Target]:
    """Return the targets whose names begin with one of `names`, all for none; exit where there is none."""
    targets = [target for target in all_targets() if not names or target.name.startswith(tuple(names))]
    if not targets:
        raise SystemExit(f"no target begins with {' or '.join(names)}; --list shows them")
    return targets


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--inputs", type=int, default=INPUTS, help=f"in all (default {INPUTS})")
    parser.add_argument("--seed", help="repeats a campaign (default: a new one, which is printed)")
    parser.add_argument("--target", action="append", default=[], help="only targets that begin so; repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time (default 2)")
    parser.add_argument("--save", type=Path, help="keep every input that was found in this folder")
    parser.add_argument("--list", action="store_true", help="show the targets, who can reach each, and its budgets")
    options = parser.parse_args()
    targets = chosen(options.target)
    if options.list:
        for target in targets:
            print(f"{target.name:<28} {target.cpu_ms:>6.0f} ms {target.memory_mib:>5} MiB  {target.sender}")
        return
    seed = options.seed or secrets.token_hex(4)
    say(f"seed {seed}")
    say(COLUMNS)
    plan = make_plan(targets, options.inputs)
    results = run_all(plan, seed=seed, jobs=options.jobs, save=options.save, done=lambda result: say(row(result)))
    notes: dict[str, Any] = {"seed": seed, "jobs": options.jobs} | NOTES
    if told := details(results):
        notes["found"] = told
    report("fuzz", options, figures_of(results), notes)


if __name__ == "__main__":
    main()
