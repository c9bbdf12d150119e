"""Outcome and cost of `make demo`: `python -m benchmarks.demo [--json] [--steps N] [--out DIR]`.

Runs the demonstration as a person would, but headless, in a process of its own. `seconds` is that process's
whole life: from its start, warm start and audit included, until every process of the swarm has ended. Peak
memory is the largest sum of the proportional set sizes (PSS) of all processes, looked at each second.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import make_parser, report


def run(steps: int, out: Path) -> tuple[dict[str, Any], float]:
    """Run the demonstration; return its summary and its seconds. Progress goes to standard error."""
    options = ("--headless", "--json", "--steps", str(steps), "--out", str(out))
    command = [sys.executable, "-m", "node.cli", "demo", *options]
    started = time.monotonic()
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(finished.stdout.splitlines()[-1]), time.monotonic() - started


def figures(summary: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the demonstration's own figures, the whole time, and where the time went."""
    audit = summary["audit"]
    own: dict[str, Any] = summary["figures"]
    return own | {
        "seconds": round(seconds, 1),
        "audit_exit_code": None if audit is None else audit["exit_code"],
        "steps": len(summary["steps"]),
        "restarts": sum(summary["restarts"].values()),
        "cpu_seconds": round(sum(summary["cpu_seconds"].values()), 1),
        **{f"{name.replace(' ', '_')}_seconds": round(value, 1) for name, value in summary["phases"].items()},
    }


def notes(found: dict[str, Any], summary: dict[str, Any]) -> dict[str, str]:
    """Say why a figure is null."""
    told = {}
    if found["reward_gain"] is None:
        told["reward_gain"] = "needs at least ten steps"
    if found["audit_exit_code"] is None:
        told["audit_exit_code"] = str((summary["audit"] or {}).get("message") or "the audit did not end in time")
    return told


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="keep the report here instead of in a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        summary, seconds = run(options.steps, options.out or Path(temporary))
    found = figures(summary, seconds)
    report("demo", options, found, notes(found, summary))


if __name__ == "__main__":
    main()
