"""Fault injection into a swarm: `python -m benchmarks.chaos [--json] [--faults N] [--seed S] [--only KIND ...]`.

A swarm of real processes (coordinator, verifier, trainer with its origin, two relays, two workers) trains a tiny policy
on loopback while they are killed and stopped, their disk gets full and slow, their clocks jump, their database is
locked, and their connections are cut (`benchmarks.faults`). Meanwhile a witness keeps every checkpoint and entry that
the coordinator shows, and strangers attack under free keys: hostile relays that change their addresses, and hoarders of
leases (`benchmarks.attacking`). At the end everything that was seen is compared with the log, `swarmproof audit --all`
derives every verdict again, and the blobs and the database are checked for damage. Figures:

    faults                faults that were done to the run
    admitted_lost         what was admitted or acknowledged, and is gone
    admitted_twice        what was judged, admitted or trained on twice
    log_inconsistencies   whatever in the log, its checkpoints, receipts or evidence contradicts what was seen before,
                          what the audit disagrees with, and damage on disk
    mean_recovery_s       from a fault's end until the log shows the work of whatever it harmed (`faults.campaign`)
    longest_recovery_s    likewise; not_recovered counts the faults that took longer than 180 s, and have no time
    hostile_relays_asked  requests to the hostile relays; leases_hoarded counts what the hoarders were given
    gaps                  slots that steps went on without
    honest_rejected       honest groups that were rejected: none is to be

Every violation is a line on standard error; --out keeps the logs. Linux only. Full disks want a mount namespace (root,
or user namespaces), and clocks that jump a C compiler; without them these faults are left out, and the notes say so.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.attacking.crowd import Crowd
from benchmarks.attacking.hoarders import Hoarders
from benchmarks.attacking.loop import Loop
from benchmarks.faults.campaign import FaultCampaign, Recovery, damage
from benchmarks.faults.checks import Evidence, Violations, judge
from benchmarks.faults.clocked import has_compiler
from benchmarks.faults.disk import private_mounts
from benchmarks.faults.kinds import KINDS, FaultKind, plan
from benchmarks.faults.stage import Stage, staged
from benchmarks.report import make_parser, report, say
from coordinator.lab.processes.supervisor import interrupted_by_signals
from node.protocol.admission import Outcome
from node.protocol.messages import BatchEntry, LogEntry, VerdictEntry

FAULTS: Final = 210
STRANGERS: Final = 12
IN_NAMESPACE: Final = "SWARMPROOF_CHAOS_IN_NAMESPACE"
_ENTRY: Any = LogEntry


@dataclass(frozen=True, slots=True)
class CampaignResult:
    """A campaign that has ended."""

    recoveries: list[Recovery]
    violations: Violations
    evidence: Evidence
    audit: dict[str, Any]
    strangers: Strangers
    seconds: float


@dataclass(slots=True)
class Strangers:
    """What free keys did: relays announced, chunks and manifests asked of them, leases taken and returned."""

    announced: int = 0
    asked: int = 0
    leased: int = 0
    returned: int = 0


@contextlib.contextmanager
def attacked(stage: Stage, *, strangers: int) -> Iterator[Strangers]:
    """Have so many hostile relays and as many hoarders attack within the block; counts are there at its end."""
    run, counts = (stage.swarm.coordinator_url, stage.swarm.run_id), Strangers()
    with contextlib.closing(Loop()) as loop:
        crowd = Crowd(*run, stage.swarm.origin_url, count=strangers)
        with loop.attacking(crowd), loop.attacking(Hoarders(*run, count=strangers)) as hoarders:
            yield counts
    counts.announced, counts.asked = crowd.announced, crowd.asked
    counts.leased, counts.returned = hoarders.leased, hoarders.returned


def run(
    kinds: list[FaultKind], folder: Path, logs: Path, *, mounts: bool, rng: random.Random, strangers: int
) -> CampaignResult:
    """Inject each of `kinds`, and judge what is left."""
    started = time.monotonic()
    with interrupted_by_signals(), staged(folder, logs=logs, mounts=mounts) as stage:
        campaign = FaultCampaign(stage, rng=rng, say=say)
        campaign.start()
        with attacked(stage, strangers=strangers) as counts:
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
    return CampaignResult(campaign.recoveries, violations, evidence, audit, counts, time.monotonic() - started)


def audit_complaints(audit: dict[str, Any]) -> list[str]:
    """List what an audit does not agree with, or could not derive again."""
    said = [f"audit: {problem['code']}: {problem['detail']}" for problem in audit["problems"]]
    said += [
        f"audit: entry {one['log_index']} is {one['logged']}, {one['result']}: {one['detail']}"
        for one in audit["verdicts"]
        if one["result"] != "agree"
    ]
    if audit["outcome"] != "agree" and not said:
        said.append(f"audit: {audit['outcome']}: {audit['error']}")
    return said


def figures(result: CampaignResult) -> dict[str, Any]:
    """Compute the figures."""
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
        "relays_announced": result.strangers.announced,
        "hostile_relays_asked": result.strangers.asked,
        "leases_hoarded": result.strangers.leased,
        "gaps": sum(len(entry.gaps) for entry in entries if isinstance(entry, BatchEntry)),
        "receipts": len(result.evidence.receipts),
        "checkpoints": len(result.evidence.checkpoints),
        "steps": sum(isinstance(entry, BatchEntry) for entry in entries),
        "audited": len(result.audit["verdicts"]),
        "audit_exit_code": result.audit["exit_code"],
        "seconds": round(result.seconds, 1),
    }


def rows(recoveries: Sequence[Recovery]) -> list[dict[str, Any]]:
    """Return a row for each kind of fault: how many, and the recovery times."""
    table = []
    for kind in KINDS:
        of_kind = [one for one in recoveries if one.kind == kind.name]
        times = [one.seconds for one in of_kind if one.seconds is not None]
        mean, longest = (round(sum(times) / len(times), 2), round(max(times), 2)) if times else (None, None)
        row = {"kind": kind.name, "faults": len(of_kind), "mean_recovery_s": mean, "longest_recovery_s": longest}
        table.append(row)
    return table


def possible(kinds: Sequence[FaultKind], *, mounts: bool) -> tuple[tuple[FaultKind, ...], dict[str, str]]:
    """Return the kinds of faults that this machine can do, and why not the others."""
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
        result = run(planned, Path(folder), logs, mounts=mounts, rng=rng, strangers=arguments.strangers)
    for violation in result.violations.all:
        say(f"VIOLATION  {violation}")
    table = rows(result.recoveries)
    report("chaos", arguments, figures(result), notes, rows=table, seed=arguments.seed)
    return int(bool(result.violations.all))


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument(
        "--strangers", type=int, default=STRANGERS, help="hostile relays, and as many hoarders of leases"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the faults' order and lengths")
    parser.add_argument("--only", action="append", choices=[kind.name for kind in KINDS], metavar="KIND")
    parser.add_argument("--out", type=Path, help="keep the processes' logs in this folder")
    return parser.parse_args()


def _enter_namespace() -> None:
    """Execute this program again in a mount namespace of its own, where that is allowed."""
    if IN_NAMESPACE in os.environ:
        return
    command = private_mounts()
    os.environ[IN_NAMESPACE] = "no" if command is None else "yes"
    if command is not None:
        again = (sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:])
        os.execvp(command[0], (*command, *again))  # noqa: S606  (no shell)


if __name__ == "__main__":
    sys.exit(main())
