"""What is made of a real swarm's logs: a figure from the wrong line, or against the wrong floor, would mislead."""

from __future__ import annotations

import pytest

from benchmarks.realsize import RUN_TOML
from benchmarks.sizing import tables
from benchmarks.sizing.machine import Bandwidth
from benchmarks.sizing.policy import architecture
from benchmarks.sizing.swarm import RELAY, TORCH, VLLM, Observations
from benchmarks.sizing.usage import RoleMeter
from node.protocol.admission import Outcome
from node.protocol.run import parse_run_toml

SPEC = parse_run_toml(RUN_TOML.read_text())
SIZE = tables.Size.of(architecture())
STATS = {"entropy": 0.5, "tokens": 300.0, "train_seconds": 40.0, "publish_seconds": 7.0, "publish_stall_seconds": 2.0}
RATES = {"bfloat16": 1e11, "float32": 2e11}


class Measured(RoleMeter):
    """Of a swarm that has ended."""

    def peak_bytes(self, role: str) -> int:
        return {"verifier": 2 * SIZE.policy_bytes, TORCH: 2 * SIZE.policy_bytes}.get(role, 64 * 2**20)


def event(second: float, kind: str, **keys: object) -> dict[str, object]:
    return {"event": kind, "time": f"2026-11-24T10:00:{second:06.3f}Z", **keys}


def line(second: float, message: str) -> dict[str, object]:
    return {"time": f"2026-11-24T10:00:{second:06.3f}Z", "message": message}


@pytest.fixture
def found():
    found = Observations(Measured())
    start = found.moment(line(0, ""))
    found.started = {"trainer": start}
    found.logs = {
        "trainer": [line(5, "policy 0 published")],
        TORCH: [
            event(7, "policy_fetched", policy=0, seconds=1.0, transferred_bytes=SIZE.policy_bytes),
            event(9, "policy_loaded", policy=0, seconds=2.0),
            event(14, "slot_generated", policy=0, tokens=150, seconds=5.0),
            event(14, "slot_submitted", policy=0, submission="a"),
            event(24, "slot_admitted", policy=0, submission="a"),
            event(19, "slot_generated", policy=0, tokens=150, seconds=5.0),
            event(19, "slot_submitted", policy=0, submission="b"),
            event(22, "slot_rejected", policy=0, submission="b"),
            event(38, "policy_fetched", policy=1, seconds=1.0, transferred_bytes=2**20),
            event(40, "policy_loaded", policy=1, seconds=2.0),
            event(46, "slot_generated", policy=1, tokens=150, seconds=5.0),
        ],
        VLLM: [],
    }
    found.steps = [
        {"step": 0, "stats": STATS, "finished_at": start + 39},
        {"step": 1, "stats": None, "finished_at": None},
    ]
    found.outcomes = [(TORCH, 0, Outcome.ADMITTED), (TORCH, 0, Outcome.REJECTED)]
    found.arrivals = {0: start + 6, 1: start + 37}
    found.disk = dict.fromkeys(("coordinator", "trainer", "verifier", RELAY, TORCH, "auditor"), SIZE.policy_bytes)
    found.disk["honest-2"] = 0
    found.audit_exit_code, found.audit_seconds = 0, 9.0
    return found


def test_figures_are_those_of_the_issue_and_name_what_honest_work_was_rejected(found):
    figures, notes = tables.figures(found, SIZE, SPEC)
    assert set(tables.KEYS) <= figures.keys()
    assert figures["parameters"] == 596_049_920
    assert figures["delta_end_to_end_s"] == pytest.approx(46 - 5 - 30)
    assert (figures["honest_groups_rejected"], figures["groups_admitted"]) == (1, 1)
    assert (figures["delta_mib"], figures["disk_copies_worker"], figures["relay_peak_mib"]) == (1, 1, 64)
    assert not notes.keys() & set(tables.KEYS)


def test_a_worker_s_cache_of_keys_and_values_is_no_part_of_its_policy(found):
    figures, _ = tables.figures(found, SIZE, SPEC)
    cache = 28 * 2 * 8 * 128 * 2 * SPEC.sampling.group_size * SPEC.sampling.most_tokens
    assert figures["verifier_peak_over_policy"] == 2
    assert figures["worker_peak_over_policy"] == pytest.approx(2 - cache / SIZE.policy_bytes, abs=1e-3)


def test_stages_stand_beside_what_the_machine_would_take_at_least(found):
    rows = tables.stages(found, SIZE, SPEC, Bandwidth(memory=1e10, disk_write=1e9, disk_read=2e9), RATES)
    stages = {row["stage"]: row for row in rows}
    assert stages["first publish"]["seconds"] == 5
    assert stages["first publish"]["floor_seconds"] == pytest.approx(SIZE.policy_bytes * 1.5e-9, abs=0.01)
    assert stages["relay, whole"]["seconds"] == 1
    assert stages["worker, draw"]["seconds"] == 10
    assert stages["verify a group"]["seconds"] == 10  # the group that was judged first waited for the policy
    assert stages["step"]["floor_seconds"] == pytest.approx(6 * 596e6 * 300 / 2e11 + 28 * 596e6 / 1e10, rel=0.01)


def test_what_vllm_took_has_rows_where_it_had_a_part(found):
    def stages():
        rows = tables.stages(found, SIZE, SPEC, Bandwidth(memory=1e10, disk_write=1e9, disk_read=2e9), RATES)
        return {row["stage"]: row["seconds"] for row in rows}

    without = stages()
    found.logs[VLLM] = [
        event(10, "policy_loaded", policy=0, seconds=60.0),
        event(14, "slot_generated", policy=1, tokens=150, seconds=2.0),
        event(14, "slot_submitted", policy=1, submission="c"),
        event(17, "slot_admitted", policy=1, submission="c"),
    ]
    theirs = {"vLLM, start and load": 60, "vLLM, draw": 2, "verify a group of vLLM's": 3}
    assert stages() == without | theirs
