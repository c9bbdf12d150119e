"""Standing and credit as anybody follows them in the log, and logs in which an operator did not keep the rules."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import msgspec
import pytest
from logged import RUN, SHIFTED, SPEC, admitted, batch, drifting, policy, rejected, row_of

from node.audit.compare import compare
from node.audit.log import LogReading, read_log
from node.audit.report import AuditResult
from node.protocol.admission import Outcome, Verdict
from node.protocol.evidence import Total, Totals, add
from node.protocol.messages import LogEntry, RunEntry, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import StandingSpec
from node.protocol.standing import Account, Standing
from node.verification.judge import JudgedClaim

RULES = StandingSpec(probation=2, full_rate_floor=0.25, vesting=2, ban_after=3)
BATCH = msgspec.structs.replace(SPEC.batch, groups_per_step=4)
RUN_SPEC = msgspec.structs.replace(SPEC, standing=RULES, batch=BATCH)
NODE = "22" * 32
PROVEN = [admitted(number) for number in range(1, 4)]


def spot(number: int, **changes: object) -> VerdictEntry:
    return admitted(number, **({"spot": 0} | changes))


def recheck(number: int, outcome: Outcome = Outcome.ADMITTED, **changes: object) -> VerdictEntry:
    if outcome is Outcome.ADMITTED:
        return admitted(number, recheck=True, **changes)
    if outcome is Outcome.REJECTED:
        return rejected(number, recheck=True, **changes)
    nothing = {"finding": None, "figures": None, "totals": None, "reason": Reason.VERIFIER_FAILED}
    return rejected(number, recheck=True, outcome=outcome, **(nothing | changes))


def reading(*entries: LogEntry) -> LogReading:
    start = [RunEntry(run_id=RUN, spec_digest=RUN_SPEC.digest), policy(0)]
    return read_log([*start, *entries], run_id=RUN, spec=RUN_SPEC)


def codes(*entries: LogEntry) -> list[str]:
    return [problem.code for problem in reading(*entries).problems]


def account(entries: Sequence[VerdictEntry]) -> Account:
    found = Account()
    for entry in entries:
        found.follow(entry, rules=RULES)
    return found


@pytest.mark.parametrize(
    ("verified", "rate"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2 / 3), (4, 0.5), (8, 0.25), (10**9, 0.25)]
)
def test_the_rate_falls_with_what_was_verified_to_the_floor(verified: int, rate: float) -> None:
    assert Standing(verified=verified).full_rate(RULES) == rate


def test_the_rate_is_never_zero() -> None:
    """However long a node has been right, it cannot know that nobody looks."""
    rules = msgspec.structs.replace(RULES, full_rate_floor=1e-6)
    assert Standing(verified=2**53).full_rate(rules) == 1e-6


def test_credit_for_what_was_not_measured_is_pending_until_enough_was() -> None:
    entries = [*PROVEN, spot(4)]
    assert (account(entries).vested, account(entries).pending) == (300, 100)
    entries.append(admitted(5))
    assert (account(entries).vested, account(entries).pending) == (400, 100)
    entries.append(admitted(6))
    assert (account(entries).vested, account(entries).pending) == (600, 0)


def test_attack_a_log_of_slots_that_stay_pending_is_followed_in_bounded_time() -> None:
    """An operator could otherwise keep every auditor busy for days, with a log that its rules allow."""
    begun, found = time.process_time(), Account()
    rules = msgspec.structs.replace(RULES, vesting=10**6)
    for entry in (*(spot(number) for number in range(20_000)), *(admitted(number) for number in range(20_000, 40_000))):
        found.follow(entry, rules=rules)
    assert (found.vested, found.pending) == (2_000_000, 2_000_000)
    assert time.process_time() - begun < 8


def test_a_rejection_voids_what_is_pending_and_nothing_else() -> None:
    entries = [*PROVEN, spot(4), spot(5), rejected(6)]
    found = account(entries)
    assert (found.vested, found.pending, found.void) == (300, 0, 200)
    assert found.standing == Standing(verified=0, strikes=1)


def test_a_second_verdict_that_confirms_gives_what_was_pending() -> None:
    assert account([*PROVEN, spot(4), recheck(4)]).vested == 400


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.INDETERMINATE])
def test_a_second_verdict_that_does_not_confirm_voids_it(outcome: Outcome) -> None:
    found = account([*PROVEN, spot(4), recheck(4, outcome)])
    assert (found.vested, found.void) == (300, 100)
    assert found.standing.strikes == (outcome is Outcome.REJECTED)


def test_an_honest_log_with_second_verdicts_has_no_problems() -> None:
    log = reading(
        *PROVEN, spot(4), spot(5), rejected(6), recheck(4), recheck(5, Outcome.REJECTED), batch(0, 1, 2, 3, 4)
    )
    assert log.problems == []
    assert log.reached_training == []


def test_a_friend_on_probation_that_is_measured_in_part_is_seen() -> None:
    assert codes(admitted(1), spot(2)) == ["spot_without_standing"]


def test_a_friend_that_is_caught_and_measured_in_part_again_is_seen() -> None:
    assert codes(*PROVEN, rejected(4), spot(5)) == ["spot_without_standing"]


def test_training_on_before_the_second_verdicts_is_seen() -> None:
    assert codes(*PROVEN, spot(4), rejected(5), batch(0, 1, 2, 3, 4)) == ["batch_before_recheck"]


def test_using_what_a_second_verdict_rejected_is_seen() -> None:
    log = (*PROVEN, spot(4), rejected(5), recheck(4, Outcome.REJECTED), batch(0, 1, 2, 3, 4))
    assert codes(*log) == ["batch_not_admitted"]


def test_bad_work_that_reached_training_is_named_with_its_step() -> None:
    log = reading(*PROVEN, spot(4), batch(0, 1, 2, 3, 4), rejected(5), recheck(4, Outcome.REJECTED))
    assert log.problems == []
    assert [(submission, step) for _, submission, step in log.reached_training] == [(f"{4:064x}", 0)]


@pytest.mark.parametrize(
    "entry",
    [
        recheck(1),
        recheck(9),
        recheck(4, node="77" * 32),
        recheck(4, tokens=99),
        recheck(4, body="34" * 32),
        recheck(4, slot=5),
    ],
    ids=["of a full one", "of none", "of another node", "other tokens", "other evidence", "another slot"],
)
def test_a_second_verdict_on_what_was_not_admitted_in_part_is_seen(entry: VerdictEntry) -> None:
    assert codes(*PROVEN, spot(4), entry) == ["unfounded_recheck"]


def test_a_second_verdict_is_the_only_one() -> None:
    assert codes(*PROVEN, spot(4), recheck(4), recheck(4)) == ["unfounded_recheck"]


@pytest.mark.parametrize(
    "entry",
    [spot(4, recheck=True), rejected(4, spot=0), spot(4, spot=SPEC.sampling.group_size)],
    ids=["second", "rejected", "no such row"],
)
def test_one_row_is_not_enough_for_other_verdicts(entry: VerdictEntry) -> None:
    assert "contradictory_verdict" in codes(*PROVEN, entry)


def test_a_slot_that_a_second_verdict_gave_back_may_be_admitted_again() -> None:
    log = (*PROVEN, spot(4), rejected(5), recheck(4, Outcome.REJECTED), admitted(6, slot=4, node="77" * 32))
    assert codes(*log) == []


def test_measuring_less_than_the_rules_ask_for_is_seen_over_many_slots() -> None:
    """Each single slot is within the rules; that nobody looked at any of two hundred is not chance."""
    lucky = [spot(number) for number in range(4, 204)]
    assert codes(*PROVEN, *lucky) == ["too_little_measured"]
    every_second = [admitted(n) if n % 2 else spot(n) for n in range(4, 204)]
    assert codes(*PROVEN, *every_second) == []


def test_a_friend_that_is_measured_in_part_whenever_it_may_be_is_seen_among_many() -> None:
    """Among thousands of slots that others did, a few dozen of one node are no share of all."""
    others = [admitted(1000 + n, node=f"{n % 8 + 30:02d}" * 32) for n in range(4000)]
    friend = [spot(number) for number in range(4, 64)]
    log = reading(*others, *PROVEN, *friend)
    assert [problem.code for problem in log.problems] == ["too_little_measured"]
    assert NODE[:16] in log.problems[0].detail


def test_cheats_whose_bad_slots_are_found_by_full_measurement_accuse_no_coordinator() -> None:
    """A slot that is rejected was measured as the coin said too: counted only when it passes, the coin looks loaded."""
    coin, log, number = random.Random(0), [], 0
    for key in range(1500):
        node, held = f"{key:064x}", Account()
        while held.standing.strikes == 0:
            number += 1
            full = coin.random() < held.standing.full_rate(RULES)
            bad = held.standing.verified >= 4
            entry = (rejected if bad else admitted)(number, node=node) if full else spot(number, node=node)
            log.append(entry)
            owed = held.follow(entry, rules=RULES)
        log += [recheck(int(name, 16), Outcome.REJECTED, node=node) for name in sorted(owed)]
    assert codes(*log) == []


def test_a_banned_node_that_goes_on_being_served_is_seen() -> None:
    """What it held when it was banned may still be judged, and no more."""
    held = SPEC.batch.max_leases_per_node
    banned = [rejected(number) for number in range(1, 4)]
    later = [rejected(number) for number in range(4, 5 + held)]
    assert codes(*banned, *later[:held]) == []
    assert codes(*banned, *later) == ["banned_node_served"]
    back = [admitted(50), admitted(51)]
    assert codes(*banned, *later[: held - 2], *back, *[admitted(60 + n) for n in range(20)]) == []


def test_training_need_not_wait_for_second_verdicts_on_what_it_has_used() -> None:
    later = batch(1, 6, 7, 8, 9, gaps=[(0, 0), (0, 5)])
    log = (*PROVEN, spot(4), batch(0, 1, 2, 3, 4), rejected(5), *map(admitted, range(6, 10)))
    assert codes(*log, later) == []
    assert codes(*log, later, recheck(4)) == []
    assert [(name, step) for _, name, step in reading(*log, later).reached_training] == [(f"{4:064x}", 0)]
    assert reading(*log, later, recheck(4)).reached_training == []


def test_a_slot_of_which_one_row_made_the_node_drift_is_compared_in_that_row() -> None:
    """An honest coordinator logs the sums of the row that it measured; an auditor measures all of them."""
    entry = next(one for one in drifting(*[SHIFTED] * 100) if one.outcome is Outcome.REJECTED)
    entry = msgspec.structs.replace(entry, spot=1)
    rows = {0: Totals(margin=Total(count=40, sum=0.04)), 1: SHIFTED}
    assert entry.figures is not None
    derived = JudgedClaim(
        verdict=Verdict(
            outcome=Outcome.ADMITTED,
            figures=entry.figures,
            totals=add(rows.values()),
            rewards=(0.0, 1.0),
            tokens=entry.tokens,
        ),
        rows={number: row_of(entry.figures, totals) for number, totals in rows.items()},
    )
    assert compare(entry, derived, spec=SPEC)[0] is AuditResult.AGREE
    assert compare(msgspec.structs.replace(entry, spot=0), derived, spec=SPEC)[0] is AuditResult.DISAGREE
    assert compare(msgspec.structs.replace(entry, spot=2), derived, spec=SPEC)[0] is AuditResult.DISAGREE
    assert compare(msgspec.structs.replace(entry, spot=None), derived, spec=SPEC)[0] is AuditResult.DISAGREE


def test_a_drift_may_be_found_with_one_row_where_the_standing_allows_it() -> None:
    """It is a rejection like others: a strike, and no group that could be measured again."""
    slots = drifting(*[SHIFTED] * 100, node=NODE)
    found = next(n for n, one in enumerate(slots) if one.outcome is Outcome.REJECTED)
    last = msgspec.structs.replace(slots[found], spot=0)
    log = reading(*slots[:found], last)
    assert log.problems == []
    assert log.accounts[NODE].standing == Standing(verified=0, strikes=1)
    assert codes(*slots[:found], last, recheck(100 + found)) == ["unfounded_recheck"]
