"""What `make demo` achieves, and what it costs: `python -m benchmarks.demo [--json] [--steps N] [--out DIR]`.

Runs the demonstration as a person would, but headless, in a process of its own. `seconds` is that process's
whole life: from its start, warm start and audit included, until every process of the swarm has ended. Peak
memory is the largest sum of the proportional set sizes (PSS) of all processes, looked at each second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine


def run(steps: int, out: Path) -> tuple[dict[str, Any], float]:
    """The demonstration's summary, and the seconds that it took; its progress goes to standard error."""
    command = [
        sys.executable,
        "-m",
        "node.cli",
        "demo",
        "--headless",
        "--json",
        "--steps",
        str(steps),
        "--out",
        str(out),
    ]
    started = time.monotonic()
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(finished.stdout.splitlines()[-1]), time.monotonic() - started


def figures(summary: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What is printed: the demonstration's own figures, with the whole time, and where the time went."""
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
    """Why a figure is null."""
    told = {}
    if found["reward_gain"] is None:
        told["reward_gain"] = "needs at least ten steps"
    if found["audit_exit_code"] is None:
        told["audit_exit_code"] = str((summary["audit"] or {}).get("message") or "the audit did not end in time")
    return told


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="keep the report here instead of in a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        summary, seconds = run(arguments.steps, arguments.out or Path(temporary))
    found = figures(summary, seconds)
    if arguments.json:
        line = {"benchmark": "demo", "machine": machine.describe(), "figures": found, "notes": notes(found, summary)}
        print(json.dumps(line))
        return
    for name, value in found.items():
        print(f"{name:40} {value}")


if __name__ == "__main__":
    main()
