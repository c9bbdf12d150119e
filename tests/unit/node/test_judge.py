"""The order of section 7: what is measured next, and which of several faults a verdict names."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest
from logged import HONEST_TOTALS, RUN, SPEC, TOO_MUCH, WRONG, ZERO, admitted, row_of

from node.policy.file import Blueprint
from node.protocol.admission import GAIN_LIMIT, Outcome, Verdict
from node.protocol.submission import Rollout
from node.verification.judge import Measurements, NeedsGain, NeedsRewards, NeedsRows, judge_claim
from node.verification.plan import Claim, Look, Plan, Rules, always, look_if_suspicious, never

ROLLOUT = Rollout(
    seed=bytes(16),
    prompt_ids=[1],
    completion_ids=[2] * 50,
    logprobs=[-1.0] * 50,
    segment_versions=[0],
    segment_tokens=[50],
    proofs=[],
)
GOOD, BAD = row_of(ZERO), row_of(WRONG)
REWARDS = (0.0, 1.0)


def plan(*stages: list[int], look: Look = always) -> Plan:
    return Plan(
        claim=Claim(version=0, manifest_digest="00" * 32, slot=0, rollouts=[ROLLOUT] * 2),
        rules=Rules(RUN, SPEC, []),
        blueprint=cast("Blueprint", None),
        replies=[(), ()],
        stages=stages,
        look=look,
    )


WHOLE, SPOT = plan([1], [0]), plan([1])


def verdict(seen: Measurements, of: Plan = WHOLE) -> Verdict:
    found = judge_claim(of, seen)
    assert isinstance(found, Verdict)
    return found


def test_each_measurement_is_asked_for_once_nothing_else_speaks_against_the_group() -> None:
    """Asked for earlier, garbage would buy prefills, an environment's time, or two more policies."""
    rows = {1: GOOD, 0: GOOD}
    steps = [
        (Measurements(), NeedsRows([1])),
        (Measurements({1: GOOD}), NeedsRows([0])),
        (Measurements(rows), NeedsRewards()),
        (Measurements(rows, REWARDS), NeedsGain("int8")),
        (Measurements(rows, REWARDS, {"int8": 0.1}), NeedsGain("previous")),
    ]
    for seen, due in steps:
        assert judge_claim(WHOLE, seen) == due
    found = verdict(Measurements(rows, REWARDS, {"int8": 0.1, "previous": GAIN_LIMIT}))
    assert (found.outcome, found.rewards, found.spot, found.tokens) == (Outcome.ADMITTED, REWARDS, None, 100)


@pytest.mark.parametrize(
    ("seen", "row", "figure"),
    [
        (Measurements({1: BAD}), 1, "token_margin"),
        (Measurements({1: GOOD, 0: BAD}), 0, "token_margin"),
        (Measurements({1: GOOD, 0: row_of(WRONG, TOO_MUCH)}), 0, "token_margin"),
        (Measurements({1: GOOD, 0: row_of(ZERO, TOO_MUCH)}, REWARDS, {"int8": 1.0}), None, "margin_evidence"),
        (Measurements({1: GOOD, 0: GOOD}, REWARDS, {"int8": 1.0, "previous": 1.0}), None, "int8_gain"),
        (Measurements({1: GOOD, 0: GOOD}, REWARDS, {"int8": 0.0, "previous": 1.0}), None, "previous_gain"),
    ],
)
def test_a_rejection_names_the_first_fault_and_earns_nothing(seen: Measurements, row: int | None, figure: str) -> None:
    """A single row comes before all rows together, and these before weights that somebody may have used instead."""
    found = verdict(seen)
    assert found.finding is not None
    assert (found.outcome, found.finding.row, found.finding.figure) == (Outcome.REJECTED, row, figure)
    assert (found.reason, found.rewards) == (found.finding.reason, None)
    assert found.detail.startswith("All rows together: " if row is None else f"Row {row}: ")


def test_one_row_that_is_enough_is_named_and_gets_no_second_look() -> None:
    assert judge_claim(SPOT, Measurements({1: GOOD})) == NeedsRewards()
    found = verdict(Measurements({1: GOOD}, REWARDS), SPOT)
    assert (found.outcome, found.spot, found.totals) == (Outcome.ADMITTED, 1, HONEST_TOTALS)
    assert verdict(Measurements({1: row_of(ZERO, TOO_MUCH)}), SPOT).finding is not None, "it shows enough by itself"


def test_a_second_look_is_taken_by_a_draw_that_the_judge_does_not_make() -> None:
    """The judge must say the same twice; whether chance asks for a look is settled in the plan."""
    seen = Measurements({1: GOOD, 0: GOOD}, REWARDS)
    share = SPEC.limits.second_looks
    assert judge_claim(plan([0, 1], look=look_if_suspicious(share - 1e-9)), seen) == NeedsGain("int8")
    assert verdict(seen, plan([0, 1], look=look_if_suspicious(share))).outcome is Outcome.ADMITTED
    assert verdict(seen, plan([0, 1], look=never)).outcome is Outcome.ADMITTED


def test_the_logs_entry_holds_the_verdict_whole() -> None:
    """A field that one of the two lacks would be lost on the way to the log, and to every auditor."""
    found = verdict(Measurements({1: GOOD}, REWARDS), SPOT)
    entry = admitted(1, **msgspec.structs.asdict(found))
    assert entry.verdict == found
