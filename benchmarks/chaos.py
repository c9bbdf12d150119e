"""What a run survives: `python -m benchmarks.chaos [--json] [--faults N] [--seed S] [--only KIND ...]`.

A swarm of real processes (coordinator, verifier, trainer with its origin, two relays, two workers) trains a tiny policy
on loopback while they are killed and stopped, their disk gets full and slow, their clocks jump, their database is
locked, and their connections are cut (`benchmarks.faults`). Meanwhile a witness keeps every checkpoint and entry that
the coordinator shows. At the end everything that was seen is compared with the log, `swarmproof audit --all` derives
every verdict again, and the blobs and the database are checked for damage. Figures:

    faults                faults that were done to the run
    admitted_lost         what was admitted or acknowledged, and is gone
    admitted_twice        what was judged, admitted or trained on twice
    log_inconsistencies   whatever in the log, its checkpoints, receipts or evidence contradicts what was seen before,
                          what the audit disagrees with, and damage on disk
    mean_recovery_s       from a fault's end until the log shows the work of whatever it harmed (`faults.campaign`)
    longest_recovery_s    likewise; not_recovered counts the faults that took longer than 180 s, and have no time
    honest_rejected       honest groups that were rejected: none is to be

Every violation is a line on standard error; --out keeps the logs. Linux only. Full disks want a mount namespace (root,
or user namespaces), and clocks that jump a C compiler; without them these faults are left out, and the notes say so.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import machine
from benchmarks.faults.campaign import Campaign, Recovery, damage
from benchmarks.faults.checks import Evidence, Violations, judge
from benchmarks.faults.clocked import has_compiler
from benchmarks.faults.disk import private_mounts
from benchmarks.faults.kinds import KINDS, Kind, plan
from benchmarks.faults.stage import staged
from coordinator.lab.processes.supervisor import interrupted_by_signals
from node.protocol.admission import Outcome
from node.protocol.messages import BatchEntry, LogEntry, VerdictEntry

FAULTS: Final = 210
IN_NAMESPACE: Final = "SWARMPROOF_CHAOS_IN_NAMESPACE"
_ENTRY: Any = LogEntry


@dataclass(frozen=True, slots=True)
class Result:
    """A campaign that has ended."""

    recoveries: list[Recovery]
    violations: Violations
    evidence: Evidence
    audit: dict[str, Any]
    seconds: float


def run(kinds: list[Kind], folder: Path, logs: Path, *, mounts: bool, rng: random.Random) -> Result:
    """Strike with each of `kinds`, and look at what is left."""
    started = time.monotonic()
    with interrupted_by_signals(), staged(folder, logs=logs, mounts=mounts) as stage:
        campaign = Campaign(stage, rng=rng, say=lambda line: _say(f"{time.monotonic() - started:7.1f} s  {line}"))
        campaign.start()
        campaign.run(kinds)
        with campaign.at_rest():
            evidence = campaign.evidence()
            audit = campaign.audit()
        stage.supervisor.stop()
        swarm = stage.swarm
        violations = judge(evidence, run_id=swarm.run_id, spec=swarm.spec)
        violations.log_inconsistencies += stage.witness.problems
        violations.log_inconsistencies += audit_complaints(audit)
        violations.log_inconsistencies += damage(swarm.folder / "data", stage.database)
    return Result(campaign.recoveries, violations, evidence, audit, time.monotonic() - started)


def audit_complaints(audit: dict[str, Any]) -> list[str]:
    """In what an audit does not agree; what it could not derive again is a complaint, too."""
    said = [f"audit: {problem['code']}: {problem['detail']}" for problem in audit["problems"]]
    said += [
        f"audit: entry {one['log_index']} is {one['logged']}, {one['result']}: {one['detail']}"
        for one in audit["verdicts"]
        if one["result"] != "agree"
    ]
    if audit["outcome"] != "agree" and not said:
        said.append(f"audit: {audit['outcome']}: {audit['error']}")
    return said


def figures(result: Result) -> dict[str, Any]:
    """What is printed."""
    entries = [msgspec.json.decode(leaf, type=_ENTRY) for leaf in result.evidence.leaves]
    verdicts = [entry for entry in entries if isinstance(entry, VerdictEntry)]
    times = [one.seconds for one in result.recoveries if one.seconds is not None]
    return {
        "faults": len(result.recoveries),
        "admitted_lost": len(result.violations.admitted_lost),
        "admitted_twice": len(result.violations.admitted_twice),
        "log_inconsistencies": len(result.violations.log_inconsistencies),
        "mean_recovery_s": round(sum(times) / len(times), 2) if times else None,
        "longest_recovery_s": round(max(times), 2) if times else None,
        "not_recovered": sum(one.given_up for one in result.recoveries),
        "admitted": sum(one.outcome is Outcome.ADMITTED and not one.recheck for one in verdicts),
        "honest_rejected": sum(one.outcome is Outcome.REJECTED for one in verdicts),
        "undecided": sum(one.outcome is Outcome.INDETERMINATE for one in verdicts),
        "receipts": len(result.evidence.receipts),
        "checkpoints": len(result.evidence.checkpoints),
        "steps": sum(isinstance(entry, BatchEntry) for entry in entries),
        "audited": len(result.audit["verdicts"]),
        "audit_exit_code": result.audit["exit_code"],
        "seconds": round(result.seconds, 1),
    }


def rows(recoveries: Sequence[Recovery]) -> list[dict[str, Any]]:
    """Each kind of fault: how many, and how long they took to get over."""
    table = []
    for kind in KINDS:
        of_kind = [one for one in recoveries if one.kind == kind.name]
        times = [one.seconds for one in of_kind if one.seconds is not None]
        mean, longest = (round(sum(times) / len(times), 2), round(max(times), 2)) if times else (None, None)
        row = {"kind": kind.name, "faults": len(of_kind), "mean_recovery_s": mean, "longest_recovery_s": longest}
        table.append(row)
    return table


def possible(kinds: Sequence[Kind], *, mounts: bool) -> tuple[tuple[Kind, ...], dict[str, str]]:
    """The kinds of faults that this machine can do, and why not the others."""
    notes = {}
    for kind in kinds:
        if kind.needs_mounts and not mounts:
            notes[kind.name] = "left out: no mount namespaces here (neither as root nor for a user)"
        elif kind.needs_compiler and not has_compiler():
            notes[kind.name] = "left out: no C compiler here for the clock"
    return tuple(kind for kind in kinds if kind.name not in notes), notes


def main() -> int:
    """Run once and print; 0 if nothing was violated, 1 otherwise."""
    logging.basicConfig(level=logging.ERROR)
    arguments = _parse()
    _enter_namespace()
    mounts = os.environ.get(IN_NAMESPACE) == "yes"
    chosen = [kind for kind in KINDS if not arguments.only or kind.name in arguments.only]
    kinds, notes = possible(chosen, mounts=mounts)
    rng = random.Random(arguments.seed)
    planned = plan(arguments.faults, rng=rng, kinds=kinds)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        logs = arguments.out or Path(folder) / "logs"
        result = run(planned, Path(folder), logs, mounts=mounts, rng=rng)
    for violation in result.violations.all:
        _say(f"VIOLATION  {violation}")
    found = figures(result)
    if arguments.json:
        line: dict[str, Any] = {"benchmark": "chaos", "machine": machine.describe(), "figures": found, "notes": notes}
        print(json.dumps(line | {"rows": rows(result.recoveries), "seed": arguments.seed}))
    else:
        _print(found, rows(result.recoveries), notes)
    return int(bool(result.violations.all))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--seed", type=int, default=1, help="of the faults' order and lengths")
    parser.add_argument("--only", action="append", choices=[kind.name for kind in KINDS], metavar="KIND")
    parser.add_argument("--out", type=Path, help="keep the processes' logs in this folder")
    return parser.parse_args()


def _enter_namespace() -> None:
    """Become this program again, with mounts of its own, where that is allowed."""
    if IN_NAMESPACE in os.environ:
        return
    command = private_mounts()
    os.environ[IN_NAMESPACE] = "no" if command is None else "yes"
    if command is not None:
        again = (sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:])
        os.execvp(command[0], (*command, *again))  # noqa: S606  (no shell)


def _print(found: dict[str, Any], table: list[dict[str, Any]], notes: dict[str, str]) -> None:
    for name, value in found.items():
        print(f"{name:24} {value}")
    for row in table:
        print(f"{row['kind']:24} {row['faults']:4d}  {row['mean_recovery_s']} s, at most {row['longest_recovery_s']} s")
    for name, note in notes.items():
        print(f"{name}: {note}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
