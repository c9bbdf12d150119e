"""The tables of a calibration, as an operator's terminal shows them."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from coordinator.calibration.fit import single_value_limits
from coordinator.calibration.result import CalibrationResult, CheatOutcome
from coordinator.calibration.trial import TrialCounts
from coordinator.calibration.view import render
from node.protocol.run import EnvironmentSpec, RunSpec

SPEC = RunSpec(name="shown", environments=(EnvironmentSpec(name="arithmetic"),))


def outcome(name: str, figure: str) -> CheatOutcome:
    caught = TrialCounts(
        rollouts=1024, groups=128, rejected_groups=128, first_drifted=12, figures=Counter({figure: 128})
    )
    return CheatOutcome(
        name=name, caught=caught, second_looks=(), tokens=123456, rollout_evidence=13.7, group_evidence=10.9
    )


@pytest.mark.parametrize("width", [80, 100])
def test_no_word_of_the_tables_is_cut_off(width: int) -> None:
    cheats = [outcome("int4's tokens, right proofs", "exponent_mismatches"), outcome("greedy", "token_margin")]
    result = CalibrationResult(
        spec=SPEC,
        swarmproof="0.1.0",
        policy="ab" * 32,
        verifier="torch",
        groups=128,
        least_groups=128,
        largest=dict.fromkeys(single_value_limits(SPEC.proofs), 0.0123),
        honest=[replace(cheats[0], name="torch sdpa, 32 slots")],
        recorded=[],
        cheats=cheats,
        measured={},
    )
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(result, written=[]))
    shown = console.export_text()
    assert "…" not in shown
    assert {"rollouts", "rejected", "stopped", "exponent_mismatches", "drifted"} <= set(shown.split())
