"""Faults upon a swarm of real processes, and the eyes that look for what they broke.

What would break for whom: an operator whose machine dies, fills up or has a wrong clock would lose admitted work, or
train on it twice; a worker's receipt would name an entry that is not there; an auditor would find another log than
yesterday. And whoever reads the benchmark's zeros would believe eyes that do not see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import msgspec
import pytest
from locations import ROOT

from benchmarks.chaos import audit_complaints
from benchmarks.faults.campaign import damage, kept_receipts
from benchmarks.faults.checks import Evidence, judge
from benchmarks.faults.kinds import KINDS, plan
from coordinator.storage.database import Database, sqlite_url
from coordinator.storage.folder_blobs import FolderBlobs
from node.audit.leaves import LeafTree
from node.protocol.admission import Figures, Outcome
from node.protocol.checkpoints import Checkpoint, origin_of
from node.protocol.evidence import Totals
from node.protocol.merkle import leaf_hash
from node.protocol.messages import (
    BatchEntry,
    KeptReceipt,
    LogEntry,
    PolicyEntry,
    Receipt,
    RunEntry,
    VerdictEntry,
)
from node.protocol.run import BatchSpec, EnvironmentSpec, RunSpec
from shardcast.wire import encode

RUN_ID = "ab" * 32
SPEC = RunSpec(name="chaos", environments=(EnvironmentSpec(name="reverse"),), batch=BatchSpec(groups_per_step=1))
FAULTS = 20


def name(index: int) -> str:
    return f"{index:064x}"


def verdict(submission: int, *, slot: int, version: int = 0) -> VerdictEntry:
    """An honest admission."""
    return VerdictEntry(
        submission=name(submission),
        node=name(99),
        version=version,
        manifest_digest=name(1000 + version),
        slot=slot,
        request=name(submission),
        body=name(200 + submission),
        outcome=Outcome.ADMITTED,
        reason=None,
        finding=None,
        detail="",
        figures=Figures(
            exponent_mismatches=0.0,
            mantissa_mean=0.0,
            mantissa_median=0.0,
            token_margin=0.0,
            margin_mean=0.0,
            logprob_error=0.0,
        ),
        totals=Totals(),
        rewards=(0.0,) * SPEC.sampling.group_size,
        tokens=10,
        decided_at=1,
    )


def policy(version: int) -> PolicyEntry:
    return PolicyEntry(version=version, manifest_digest=name(1000 + version), result_digest=name(2000 + version))


HONEST: list[LogEntry] = [
    RunEntry(run_id=RUN_ID, spec_digest=SPEC.digest),
    policy(0),
    verdict(1, slot=0),
    verdict(2, slot=1),
    BatchEntry(step=0, submissions=(name(1),)),
    policy(1),
]
"""Of two admitted groups one was used, the other waits."""


def checkpoint(leaves: list[bytes], size: int) -> Checkpoint:
    tree = LeafTree()
    for leaf in leaves[:size]:
        tree.append(leaf)
    return Checkpoint(origin_of(RUN_ID), size, tree.root())


def receipt(leaves: list[bytes], index: int) -> Receipt:
    entry = msgspec.json.decode(leaves[index], type=VerdictEntry)
    return Receipt(
        run_id=RUN_ID,
        submission=entry.submission,
        node=entry.node,
        version=entry.version,
        slot=entry.slot,
        outcome=entry.outcome,
        reason=None,
        detail="",
        tokens=10,
        log_index=index,
        leaf_hash=leaf_hash(leaves[index]).hex(),
    )


def evidence(entries: list[LogEntry], **changes: object) -> Evidence:
    """What is seen of a run with this log, whose first three entries were seen before; `changes` are what is wrong."""
    leaves = [encode(entry) for entry in entries]
    honest = [encode(entry) for entry in HONEST]
    seen = Evidence(
        leaves=leaves,
        witnessed=honest[:3],
        checkpoints=[checkpoint(honest, 3)],
        receipts=[receipt(honest, 2), receipt(honest, 3)],
        acknowledged={name(1): name(31), name(2): name(32)},
        waiting=1,
    )
    values = {field: getattr(seen, field) for field in Evidence.__dataclass_fields__} | changes
    return Evidence(**values)


def violations(entries: list[LogEntry], **changes: object) -> dict[str, int]:
    found = judge(evidence(entries, **changes), run_id=RUN_ID, spec=SPEC)
    counts = {
        "lost": len(found.admitted_lost),
        "twice": len(found.admitted_twice),
        "log": len(found.log_inconsistencies),
    }
    return {kind: count for kind, count in counts.items() if count}


def test_an_honest_run_shows_no_violation() -> None:
    assert violations(HONEST) == {}


def test_an_admitted_group_that_vanished_is_lost() -> None:
    without = [entry for entry in HONEST if entry != HONEST[3]]
    # Its receipt names another entry, nobody judged what was acknowledged, and a group waits that no verdict admits.
    assert violations(without)["lost"] == 2


def test_an_admitted_group_that_no_step_takes_is_lost() -> None:
    later: list[LogEntry] = []
    for step in range(1, SPEC.batch.max_async + 1):
        later += [verdict(10 + step, slot=0, version=step), BatchEntry(step=step, submissions=(name(10 + step),))]
        later.append(policy(step + 1))
    # Each of these steps, the group's last chance among them, takes another before its turn.
    assert violations([*HONEST, *later]) == {"lost": 1, "log": SPEC.batch.max_async}


def test_an_admitted_group_that_the_trainer_does_not_know_is_lost() -> None:
    assert violations(HONEST, waiting=0) == {"lost": 1}


def test_an_acknowledged_submission_without_a_verdict_is_lost() -> None:
    assert violations(HONEST, acknowledged={name(7): name(37)}) == {"lost": 1}


def test_a_slot_that_is_admitted_twice_counts_twice() -> None:
    assert violations([*HONEST, verdict(3, slot=1)], waiting=2)["twice"] == 1


def test_two_admissions_under_one_lease_count_twice() -> None:
    both = {name(1): name(31), name(2): name(31)}
    assert violations(HONEST, acknowledged=both) == {"twice": 1}


def test_a_group_that_is_trained_on_twice_counts_twice() -> None:
    again = BatchEntry(step=1, submissions=(name(1), name(2)))
    assert violations([*HONEST, again], waiting=0)["twice"] == 1


def test_a_step_that_is_done_again_counts_twice() -> None:
    again = BatchEntry(step=0, submissions=(name(2),))
    assert violations([*HONEST, again], waiting=0)["twice"] == 1


def test_a_rewritten_entry_is_found_by_what_was_seen_before() -> None:
    rewritten = msgspec.structs.replace(HONEST[2], tokens=11)
    found = violations([*HONEST[:2], rewritten, *HONEST[3:]])
    # The entry itself, and the checkpoint that was signed over it; and the worker's receipt is for another entry.
    assert found == {"log": 2, "lost": 1}


def test_a_log_that_shrank_is_found() -> None:
    assert violations(HONEST[:2], receipts=[], acknowledged={}, waiting=0)["log"] == 2


def test_an_entry_that_no_honest_log_has_is_found() -> None:
    of_nothing = BatchEntry(step=1, submissions=(name(55),))
    assert violations([*HONEST, of_nothing], waiting=1)["log"] == 1


def test_what_an_audit_could_not_derive_again_is_a_complaint() -> None:
    checked = {"log_index": 4, "logged": {"outcome": "admitted", "reason": None}, "detail": "no policy"}
    base = {"problems": [], "outcome": "agree", "error": None}
    assert audit_complaints(base | {"verdicts": [checked | {"result": "agree"}]}) == []
    assert len(audit_complaints(base | {"verdicts": [checked | {"result": "unavailable"}]})) == 1
    assert len(audit_complaints(base | {"verdicts": [], "outcome": "incomplete", "error": {"code": "x"}})) == 1


def test_torn_blobs_and_a_damaged_database_are_found(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    kept = blobs.put(b"a submission")
    database = Database(sqlite_url(tmp_path))
    database.migrate()
    database.close()
    path = tmp_path / "swarmproof.sqlite3"
    assert damage(tmp_path, path) == []
    blobs.path(kept).write_bytes(b"a subm")
    assert len(damage(tmp_path, path)) == 1


def test_a_receipt_that_was_cut_short_is_none_yet(tmp_path: Path) -> None:
    one = receipt([encode(entry) for entry in HONEST], 2)
    line = encode(KeptReceipt(receipt=one, envelope=b"signed")) + b"\n"
    (tmp_path / "receipts.ndjson").write_bytes(line + line[:50])
    assert list(kept_receipts(tmp_path)) == [one]


def test_a_plan_has_every_kind_of_fault_and_the_same_for_the_same_seed() -> None:
    planned = plan(len(KINDS) + 5, rng=Random(3))
    assert {kind.name for kind in planned} == {kind.name for kind in KINDS}
    assert planned == plan(len(KINDS) + 5, rng=Random(3))
    assert len(plan(3, rng=Random(3))) == 3


@pytest.mark.timeout(900)
def test_every_kind_of_fault_upon_one_swarm_loses_nothing_and_contradicts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--json", "--faults", str(FAULTS), "--out", str(tmp_path)]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    line = json.loads(ended.stdout.splitlines()[-1])
    figures = line["figures"]
    assert figures["faults"] == FAULTS
    assert (figures["admitted_lost"], figures["admitted_twice"], figures["log_inconsistencies"]) == (0, 0, 0)
    assert (figures["not_recovered"], figures["honest_rejected"]) == (0, 0), ended.stderr[-4000:]
    assert figures["mean_recovery_s"] > 0
    # The zeros are of a run that worked: groups were admitted, receipts kept, and all of it derived again.
    assert figures["admitted"] >= figures["receipts"] >= 50
    assert figures["audited"] == figures["admitted"]
    assert {row["kind"] for row in line["rows"] if not row["faults"]} == set(line["notes"])
