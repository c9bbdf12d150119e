"""Long runs of `swarmproof redteam`: `python -m benchmarks.redteam [--json] [--slots N] [--hostile SHARE]`.

Runs the whole red team as a person would, in processes of its own, for as many steps as it takes until so many slots
were submitted. Then, for comparison, the same run without attackers, and the same attackers in a run whose limits are
so wide that no figure exceeds them: what the form of a submission does not give away is trained on there; and the same
attackers in a run that measures a proven node's slots in full with FLOOR only. Rewards are means over the last steps of
each run. All runs begin with the same policy, and take five to ten minutes each; `--alone` leaves the comparison out.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import make_parser, report, say
from coordinator.lab.redteam.rules import redteam_run_toml
from node.protocol.run import parse_run_toml

END_STEPS = 10
"""A mean over 10 steps of 256 completions is good for about a hundredth."""

FLOOR = 0.1
"""The share of a proven node's slots that is measured in full, in the run that saves verification."""

AIM = 1.05
"""Factor on the attackers' share that is aimed at: they begin later than the honest."""


def run(name: str, *, hostile: float, steps: int, seed: int, out: Path, **changes: Any) -> dict[str, Any]:
    """Run a campaign and return its result; its progress and table go to standard error."""
    rules = out / f"{name}.toml"
    rules.write_text(redteam_run_toml(steps=steps, seed=seed, **changes), encoding="utf-8")
    command = [sys.executable, "-m", "node.cli", "redteam", "--headless", "--json", "--run", str(rules)]
    say(f"{name}: {steps} steps")
    finished = subprocess.run(
        [*command, "--hostile", str(hostile), "--folder", str(out / name)], stdout=subprocess.PIPE, check=False
    )
    if not finished.stdout:
        raise SystemExit(f"{name} ended with {finished.returncode} and no result")
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def reward(result: dict[str, Any] | None) -> float | None:
    """Return the mean reward of a run's last steps."""
    return None if result is None else statistics.fmean(result["rewards"][-END_STEPS:])


def figures(
    attacked: dict[str, Any],
    clean: dict[str, Any] | None,
    unverified: dict[str, Any] | None,
    partly: dict[str, Any] | None,
) -> dict[str, float | int | None]:
    """Compute the figures."""
    with_attackers, without, trusting = reward(attacked), reward(clean), reward(unverified)
    tried = [row for row in attacked["attacks"] if row["tries"]]
    return {
        "hostile_share": round(attacked["hostile_share"], 4),
        "slots": attacked["slots"],
        "attacks": len(tried),
        "hostile_slots": attacked["hostile_slots"],
        "hostile_admitted": attacked["hostile_admitted"],
        "hostile_admitted_share": attacked["hostile_admitted"] / max(1, attacked["hostile_slots"]),
        "hostile_requests_refused": sum(row["tries"] - row["slots"] for row in tried) - attacked["succeeded"],
        "identities": attacked["identities"],
        "honest_slots": attacked["honest_slots"],
        "honest_slots_rejected": attacked["honest_rejected"],
        "audit_exit_code": None if attacked["audit"] is None else attacked["audit"]["exit_code"],
        "reward": with_attackers,
        "reward_clean_run": without,
        "reward_vs_clean_run": None if without is None else (with_attackers or 0.0) / without,
        "reward_without_verification": trusting,
        "reward_without_verification_vs_clean_run": None if None in {trusting, without} else trusting / without,  # type: ignore[operator]
        "hostile_admitted_without_verification": None if unverified is None else unverified["hostile_admitted"],
        "partly_floor": None if partly is None else FLOOR,
        "partly_hostile_slots": None if partly is None else partly["hostile_slots"],
        "partly_hostile_admitted": None if partly is None else partly["hostile_admitted"],
        "partly_honest_slots_rejected": None if partly is None else partly["honest_rejected"],
        "partly_reward": reward(partly),
        "seconds": round(attacked["seconds"], 1),
    }


def table(
    attacked: dict[str, Any], unverified: dict[str, Any] | None, partly: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Return a row for each attack: tries, what stopped them, and admissions where nothing or a part is measured."""
    trusting = {} if unverified is None else {row["attack"]: row["admitted"] for row in unverified["attacks"]}
    saving = {} if partly is None else {row["attack"]: row["admitted"] for row in partly["attacks"]}
    kept = ("attack", "tries", "slots", "admitted", "succeeded", "stopped", "honest")
    return [
        {name: row[name] for name in kept}
        | {
            "admitted_without_verification": trusting.get(row["attack"]),
            "admitted_measured_partly": saving.get(row["attack"]),
        }
        for row in attacked["attacks"]
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--slots", type=int, default=2300, help="how many slots are submitted in all")
    parser.add_argument("--hostile", type=float, default=0.33, help="the attackers' share of them")
    parser.add_argument("--seed", type=int, default=2, help="of the warm start")
    parser.add_argument("--alone", action="store_true", help="without the runs to compare with")
    parser.add_argument("--out", type=Path, help="keep logs and results here instead of in a temporary folder")
    options = parser.parse_args()
    groups = parse_run_toml(redteam_run_toml(steps=1, seed=0)).batch.groups_per_step
    steps = math.ceil(options.slots * (1 - options.hostile) / groups)
    share = options.hostile * AIM
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        common: dict[str, Any] = {"steps": steps, "seed": options.seed, "out": out}
        attacked = run("attacked", hostile=share, **common)
        clean = None if options.alone else run("clean", hostile=0.0, **common)
        unverified = None if options.alone else run("unverified", hostile=share, wide_open=True, **common)
        partly = None if options.alone else run("partly", hostile=share, floor=FLOOR, **common)
    found = figures(attacked, clean, unverified, partly)
    notes = {name: "not compared (--alone)" for name, value in found.items() if value is None}
    report("redteam", options, found, notes, attacks=table(attacked, unverified, partly))


if __name__ == "__main__":
    main()
