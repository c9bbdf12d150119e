"""The red team's benchmark: its figures follow from what the command reports, and a small run of it ends with them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.redteam import figures, table


def reported(*, hostile_admitted: int = 0, rewards: tuple[float, ...] = (0.1,) * 5 + (0.5,) * 10) -> dict:
    return {
        "slots": 30,
        "hostile_slots": 10,
        "hostile_share": 1 / 3,
        "hostile_admitted": hostile_admitted,
        "succeeded": hostile_admitted,
        "honest_slots": 19,
        "honest_rejected": 1,
        "identities": 4,
        "rewards": list(rewards),
        "audit": {"exit_code": 0},
        "seconds": 12.34,
        "attacks": [
            {
                "attack": "greedy",
                "tries": 10,
                "slots": 10,
                "admitted": hostile_admitted,
                "succeeded": hostile_admitted,
                "stopped": {},
                "honest": 0,
            },
            {
                "attack": "clock-skew",
                "tries": 6,
                "slots": 0,
                "admitted": 0,
                "succeeded": 0,
                "stopped": {"clock_skew": 6},
                "honest": 0,
            },
            {"attack": "abandon", "tries": 0, "slots": 0, "admitted": 0, "succeeded": 0, "stopped": {}, "honest": 0},
        ],
    }


def test_figures_compare_the_ends_of_the_runs_and_count_only_what_was_tried() -> None:
    found = figures(
        reported(),
        reported(rewards=(0.9,) * 5 + (0.4,) * 10),
        reported(hostile_admitted=9),
        reported(hostile_admitted=2),
    )
    assert found["partly_hostile_admitted"] == 2
    assert found["reward_vs_clean_run"] == pytest.approx(1.25)
    assert (found["attacks"], found["slots"], found["honest_slots_rejected"]) == (2, 30, 1)
    assert found["hostile_admitted_share"] == 0.0
    assert found["hostile_requests_refused"] == 6
    assert found["hostile_admitted_without_verification"] == 9
    rows = {row["attack"]: row for row in table(reported(), reported(hostile_admitted=9), None)}
    assert rows["greedy"]["admitted_without_verification"] == 9


def test_without_a_comparison_its_figures_are_null() -> None:
    found = figures(reported(), None, None, None)
    assert found["reward"] == pytest.approx(0.5)
    assert found["reward_vs_clean_run"] is None
    assert found["reward_without_verification"] is None


@pytest.mark.timeout(290)
def test_a_small_run_ends_with_a_line_of_figures() -> None:
    command = [sys.executable, "-m", "benchmarks.redteam", "--json", "--alone", "--slots", "90"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    line = json.loads(finished.stdout.splitlines()[-1])
    assert line["benchmark"] == "redteam"
    assert (line["figures"]["hostile_admitted"], line["figures"]["honest_slots_rejected"]) == (0, 0)
    assert line["figures"]["slots"] >= 60
    assert line["notes"]["reward_vs_clean_run"]
