"""What an auditor sees in the log alone: each test is one way in which an operator could cheat or err."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from logged import (
    FOUND,
    HONEST_TOTALS,
    RUN,
    SHIFTED,
    SPEC,
    TOO_MUCH,
    WRONG,
    ZERO,
    admitted,
    batch,
    drifting,
    policy,
    rejected,
    replace,
    submission,
    together,
    unmeasured,
)
from msgspec import UNSET, UnsetType

from node.audit.gaps import Withholding
from node.audit.leaves import LeafTree, read_entries
from node.audit.log import choose_verdicts, read_log
from node.protocol.admission import Finding, Outcome
from node.protocol.evidence import Total, Totals, drift_limit
from node.protocol.merkle import EMPTY_ROOT, leaf_hash, node_hash
from node.protocol.messages import Gap, LogEntry, MissedSlot, RunEntry, VerdictEntry
from node.protocol.pools import first_candidate
from node.protocol.reasons import Reason
from node.protocol.run import EnvironmentSpec, PoolsSpec, ProblemsSpec
from node.protocol.slots import MOST_CANDIDATES, SlotProblem, slot_problem
from node.protocol.withholding import EVEN, Deliveries
from shardcast.wire import encode

RULES = RunEntry(run_id=RUN, spec_digest=SPEC.digest)
UNDECIDED = unmeasured(4, outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED)
CHEAP = unmeasured(5, reason=Reason.MALFORMED_SUBMISSION, tokens=0)
HONEST: list[LogEntry] = [
    RULES,
    policy(0),
    admitted(1),
    rejected(2),
    admitted(3),
    UNDECIDED,
    CHEAP,
    batch(0, 1),
    policy(1),
    admitted(6, version=1, slot=1),
    batch(1, 3, gaps=[(0, 0), (0, 2)]),
]


def codes(entries: list[LogEntry | None]) -> list[tuple[str, int | None]]:
    return [(problem.code, problem.log_index) for problem in read_log(entries, run_id=RUN, spec=SPEC).problems]


def replace_last_batch(**changes: object) -> list[LogEntry]:
    return [*HONEST[:-1], replace(HONEST[-1], **changes)]


def test_a_step_that_took_a_group_without_signal_is_seen() -> None:
    """Where the run's rules leave such groups out, an operator could dilute a step with them."""
    spec = msgspec.structs.replace(SPEC, batch=msgspec.structs.replace(SPEC.batch, only_signal=True))
    rules = RunEntry(run_id=RUN, spec_digest=spec.digest)
    dull, mixed = admitted(1, rewards=(1.0, 1.0)), admitted(2, slot=2, rewards=(1.0, 0.0))
    assert SPEC.sampling.group_size == 2
    for entries, wanted in (
        ([rules, policy(0), dull, mixed, batch(0, 2)], []),
        ([rules, policy(0), dull, mixed, batch(0, 1, 2)], [("batch_without_signal", 4)]),
    ):
        problems = read_log(entries, run_id=RUN, spec=spec).problems
        assert [(problem.code, problem.log_index) for problem in problems] == wanted


def test_slots_that_an_operator_leaves_out_without_a_word_are_seen() -> None:
    """Who lets slots fall under the table chooses what is trained on, and can blame a worker."""
    silent = replace_last_batch(gaps=())
    assert codes(silent) == [("unexplained_gap", 10)]
    assert "2 slots of policy 0 from 0 on" in read_log(silent, run_id=RUN, spec=SPEC).problems[0].detail
    assert codes(replace_last_batch(gaps=(Gap(version=0, slot=0),))) == [("unexplained_gap", 10)]


def test_a_gap_that_is_none_is_seen() -> None:
    gaps = HONEST[-1].gaps
    for invented in (Gap(version=0, slot=3), Gap(version=1, slot=0), Gap(version=7, slot=0)):
        assert codes(replace_last_batch(gaps=(*gaps, invented))) == [("unfounded_gap", 10)]
    assert codes([*HONEST, admitted(9, slot=0)]) == [("late_admission", 11)]
    assert codes([*HONEST, batch(2, 6, gaps=[(1, 0), (0, 3)])]) == [("unfounded_gap", 11)], "settled long ago"
    blamed = MissedSlot(version=1, slot=5, node="22" * 32, how="expired")
    assert codes(replace_last_batch(missed=(blamed,))) == [("unfounded_gap", 10)]


def test_a_gap_far_beyond_what_any_memory_holds_costs_no_time() -> None:
    far = Gap(version=0, slot=2**53 - 1)
    assert codes(replace_last_batch(gaps=(*HONEST[-1].gaps, far))) == [("unexplained_gap", 10)]


def test_what_a_node_withholds_is_counted_by_what_it_was_for() -> None:
    """A node that lets go one environment's slots differs from one that lets go any: told by log alone."""
    spec = msgspec.structs.replace(
        SPEC,
        environments=tuple(EnvironmentSpec(name=str(at)) for at in range(2)),
        batch=replace(SPEC.batch, groups_per_step=80),
    )
    entries: list[LogEntry] = [RunEntry(run_id=RUN, spec_digest=spec.digest), policy(0)]
    environments = [
        slot_problem(spec, run_id=RUN, manifest_digest=policy(0).manifest_digest, slot=slot).environment
        for slot in range(80)
    ]
    missed = []
    for slot, environment in enumerate(environments):
        node, choosy = f"{slot % 3:02}" * 32, slot % 3 == 1
        if choosy and environment == 1:
            missed.append(MissedSlot(version=0, slot=slot, node=node, how="returned"))
            node = "00" * 32
        elif slot % 3 == 2 and slot % 4 == 0:  # a machine that fails now and then
            missed.append(MissedSlot(version=0, slot=slot, node=node, how="expired"))
            node = "00" * 32
        entries.append(admitted(slot, node=node))
    entries.append(batch(0, *range(80), missed=tuple(missed)))
    reading = read_log(entries, run_id=RUN, spec=spec)
    assert reading.problems == []
    choosy, failing = (reading.withholding.by_environment[f"{at:02}" * 32].unevenness() for at in (1, 2))
    assert choosy.kind == 1
    assert choosy.probability < 1e-5
    assert failing.probability > 0.05


def test_a_node_is_not_shown_as_choosy_because_many_are_looked_at() -> None:
    """Among 300 nodes that are alike, each as uneven as one in 60 is by chance, nobody is to blame."""
    alike = Deliveries(Counter({0: 20, 1: 10}), Counter({0: 1, 1: 7}))
    assert alike.unevenness().probability < EVEN
    choosy = Deliveries(Counter({0: 30}), Counter({1: 20}))
    by_environment = {f"{at:04}" * 16: alike for at in range(300)} | {"ab" * 32: choosy}
    names = ("sums", "words")
    rows = Withholding(names, by_environment=by_environment).rows()
    assert (rows[0].node, rows[0].environment, rows[0].environment_probability < EVEN) == ("ab" * 32, "words", True)
    assert {(row.environment_probability, row.signal_probability) for row in rows[1:]} == {(1.0, 1.0)}
    alone = Withholding(names, by_environment={"ab" * 32: alike}).rows()
    assert alone[0].environment_probability == alike.unevenness().probability


def wide_codes(*entries: LogEntry, groups_per_step: int = 2, **changes: object) -> list[tuple[str, int | None]]:
    """What is seen in a log of steps of several groups, which may use those of the policy before and two more."""
    spec = replace(
        SPEC,
        batch=replace(SPEC.batch, groups_per_step=groups_per_step, max_async=2, **changes),
        standing=replace(SPEC.standing, probation=1, full_rate_floor=0.5),
    )
    rules = RunEntry(run_id=RUN, spec_digest=spec.digest)
    problems = read_log([rules, policy(0), *entries], run_id=RUN, spec=spec).problems
    return [(problem.code, problem.log_index) for problem in problems]


FIVE = [admitted(slot) for slot in range(5)]


def test_a_step_uses_the_oldest_groups_whenever_they_were_admitted() -> None:
    late_first = [FIVE[4], FIVE[2], FIVE[0], FIVE[3], FIVE[1]]
    assert wide_codes(*late_first, batch(0, 0, 1), policy(1), admitted(9, version=1, slot=0), batch(1, 2, 3)) == []
    assert wide_codes(*FIVE[:3], batch(0, 0, 1), *FIVE[3:], policy(1), batch(1, 2, 3)) == []


def test_a_step_that_is_the_last_chance_of_groups_uses_them_all() -> None:
    entries = [*FIVE[:2], batch(0, 0, 1), policy(1), *(admitted(10 + slot, version=1, slot=slot) for slot in range(2))]
    entries += [batch(1, 10, 11), policy(2), *FIVE[2:]]
    assert wide_codes(*entries, batch(2, 2, 3, 4)) == []
    assert wide_codes(*entries, batch(2, 2, 3)) == [("batch_selection", 13)]


def test_a_group_that_was_left_out_is_told_of_once() -> None:
    """Later steps without a fault of their own would else be called lies, until the log is read no further."""
    of_three = [admitted(10 * version + slot, version=version, slot=slot) for version in (1, 2, 3) for slot in (0, 1)]
    entries = [*FIVE[:3], batch(0, 0, 1), policy(1), *of_three[:2], batch(1, 2, 10), policy(2), *of_three[2:4]]
    assert wide_codes(*entries, batch(2, 11, 20), policy(3), *of_three[4:], batch(3, 21, 30)) == []
    left_out = replace(entries[7], submissions=(submission(10), submission(11)))
    entries = [*entries[:7], left_out, *entries[8:], batch(2, 20, 21), policy(3), *of_three[4:]]
    assert wide_codes(*entries, batch(3, 30, 31)) == [("batch_selection", 9), ("batch_selection", 13)]
    assert wide_codes(*entries, batch(3, 2, 30))[2:] == [("batch_stale", 17)]


@pytest.mark.parametrize("used", [(1, 2), (0, 2), (3, 4), (0, 1, 2), (0,), (1, 0)], ids=str)
def test_attack_an_operator_that_picks_which_admitted_groups_are_used_is_seen(used: tuple[int, ...]) -> None:
    """Who leaves out those with low rewards, or of one node, biases what is learned, and each verdict is right."""
    assert wide_codes(*FIVE, batch(0, 0, 1)) == []
    assert wide_codes(*FIVE, batch(0, *used)) == [("batch_selection", 7)]


def test_attack_a_step_of_few_groups_is_seen() -> None:
    assert wide_codes(FIVE[0], batch(0, 0)) == [("batch_incomplete", 3)]
    assert wide_codes(batch(0)) == [("batch_incomplete", 2)]


def test_groups_that_a_run_sets_aside_or_takes_back_have_no_turn() -> None:
    dull = replace(FIVE[0], rewards=(1.0, 1.0))
    assert wide_codes(dull, *FIVE[1:], batch(0, 1, 2), only_signal=True) == []
    spot, again = replace(FIVE[2], spot=0), rejected(2, recheck=True)
    entries = [*FIVE[:2], spot, rejected(77, slot=5), again, *FIVE[3:], batch(0, 0, 1, 3)]
    assert wide_codes(*entries, groups_per_step=3) == []


def test_a_group_that_a_run_sets_aside_is_measured_again_at_any_time() -> None:
    """No step waits for it: an honest coordinator's next step may be logged first."""
    dull = replace(FIVE[2], spot=0, rewards=(1.0, 1.0))
    entries = [*FIVE[:2], dull, rejected(77, slot=5), batch(0, 0, 1), rejected(2, recheck=True)]
    assert wide_codes(*entries, only_signal=True) == []
    assert wide_codes(*entries) == [("batch_before_recheck", 6)], "here a step would use it"


def test_attack_more_blame_than_an_entry_may_hold_is_counted_for_nobody() -> None:
    """One entry could otherwise name thousands of nodes, each of which an auditor keeps."""
    blamed = [MissedSlot(version=0, slot=0, node=f"{at:064x}", how="expired") for at in range(9)]
    spec = SPEC
    for count, wanted in ((8, []), (9, [("unfounded_gap", 3)])):
        entries = [RULES, policy(0), admitted(0), batch(0, 0, missed=tuple(blamed[:count]))]
        reading = read_log(entries, run_id=RUN, spec=spec)
        assert [(problem.code, problem.log_index) for problem in reading.problems] == wanted
        assert len(reading.withholding.by_environment) == (0 if wanted else 9)


def test_attack_a_log_of_lies_is_read_no_further_than_to_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.audit.log.MAX_PROBLEMS", 10)
    lie = batch(0, *range(1000, 2000))
    reading = read_log([RULES, policy(0), lie, lie, lie], run_id=RUN, spec=SPEC)
    assert [problem.code for problem in reading.problems] == ["batch_not_admitted"] * 10 + ["too_many_problems"]
    assert len(reading.index.latest) == 3
    loud = edited(6, replace(CHEAP, finding=replace(FOUND, figure="x" * 10_000 + "_drift")))
    assert max(len(problem.detail) for problem in read_log(loud, run_id=RUN, spec=SPEC).problems) <= 500


def test_attack_a_log_of_too_many_nodes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.audit.log.MAX_NODES", 10)
    invented = [rejected(at, node=f"{at:064x}") for at in range(11)]
    reading = read_log([RULES, policy(0), *invented, RULES], run_id=RUN, spec=SPEC)
    assert reading.fault is not None
    assert (reading.fault.code, reading.problems, len(reading.index.latest)) == ("log_too_large", [], 13)
    lie = rejected(99, finding=None)
    reading = read_log([RULES, policy(0), lie, *invented], run_id=RUN, spec=SPEC)
    assert [problem.code for problem in reading.problems] == ["contradictory_verdict"], "nodes hide no lie"


def test_a_node_that_delivers_and_misses_slots_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.audit.log.MAX_NODES", 2)
    missed = [MissedSlot(version=0, slot=0, node=f"{at:02x}" * 32, how="expired") for at in (0x22, 0x23)]
    for blamed, is_over in ((missed, False), ([*missed, replace(missed[0], node="24" * 32)], True)):
        entries = [RULES, policy(0), admitted(0), batch(0, 0, missed=tuple(blamed))]
        assert (read_log(entries, run_id=RUN, spec=SPEC).fault is not None) == is_over


POOLS = PoolsSpec(easy=1, normal=1, hard=0, easy_from=0.9, hard_to=0.1)
FINITE = (EnvironmentSpec(name="arithmetic", problems=ProblemsSpec(count=4)),)
POOLED = replace(SPEC, environments=FINITE, batch=replace(SPEC.batch, pools=POOLS))


def in_pools(number: int, candidate: int | UnsetType, **changes: object) -> VerdictEntry:
    return admitted(number, candidate=candidate, **changes)


def pool_codes(*entries: LogEntry) -> list[tuple[str, int | None]]:
    rules = RunEntry(run_id=RUN, spec_digest=POOLED.digest)
    problems = read_log([rules, *entries], run_id=RUN, spec=POOLED).problems
    return [(problem.code, problem.log_index) for problem in problems]


def solved_all(problem: SlotProblem) -> float:
    return 1.0


def right_candidate(number: int, version: int, means: Callable[[SlotProblem], float | None]) -> int:
    manifest = f"{version + 100:064x}"
    return first_candidate(POOLED, run_id=RUN, manifest_digest=manifest, slot=number, mean_of=means)


def test_a_coordinator_that_picks_a_slots_problem_is_seen() -> None:
    """At policy 0 all problems are normal: a slot of that pool is for its first candidate, others for the last."""
    wanted = {number: right_candidate(number, 0, lambda _: None) for number in range(20)}
    assert set(wanted.values()) == {0, MOST_CANDIDATES - 1}
    honest = [in_pools(number, candidate) for number, candidate in wanted.items()]
    assert pool_codes(policy(0), *honest) == []
    for number, candidate in wanted.items():
        picked = [*honest[:number], in_pools(number, (candidate + 1) % MOST_CANDIDATES), *honest[number + 1 :]]
        assert pool_codes(policy(0), *picked) == [("wrong_pool", number + 2)]
    refused = unmeasured(3, candidate=wanted[3] - 1 if wanted[3] else 7)
    assert pool_codes(policy(0), refused) == [("wrong_pool", 2)]


def test_pools_are_those_before_the_policy_and_no_later_ones() -> None:
    """A coordinator that could use what it learned after a policy could wait until a favourite is in the pool."""
    solved = [in_pools(n, right_candidate(n, 0, lambda _: None), rewards=(1.0, 1.0)) for n in range(40)]
    # All four problems were solved: each is easy at policy 1, and still normal at policy 0.
    late = in_pools(40, right_candidate(40, 0, lambda _: None), rewards=(1.0, 1.0))
    easy = [in_pools(50 + n, right_candidate(n, 1, solved_all), version=1, slot=n) for n in range(20)]
    stale = [in_pools(50 + n, right_candidate(n, 1, lambda _: None), version=1, slot=n) for n in range(20)]
    assert pool_codes(policy(0), *solved, batch(0, 0), policy(1), late, *easy) == []
    assert {code for code, _ in pool_codes(policy(0), *solved, batch(0, 0), policy(1), *stale)} == {"wrong_pool"}


def test_rewards_of_any_size_end_no_audit() -> None:
    """A log whose sums overflow would otherwise be one that nobody can audit."""
    huge = in_pools(1, right_candidate(1, 0, lambda _: None), rewards=(1e308, 1e308))
    assert pool_codes(policy(0), huge) == [("contradictory_verdict", 2)]


def test_a_candidate_is_named_exactly_where_there_are_pools() -> None:
    unnamed = in_pools(1, UNSET)
    assert pool_codes(policy(0), unnamed) == [("wrong_pool", 2)]
    assert codes([RULES, policy(0), in_pools(1, 0)]) == [("wrong_pool", 2)]


def test_a_second_verdict_is_on_the_same_candidate() -> None:
    wanted = right_candidate(1, 0, lambda _: None)
    spec = replace(POOLED, standing=replace(POOLED.standing, probation=1, full_rate_floor=0.5))
    rules = RunEntry(run_id=RUN, spec_digest=spec.digest)
    first = [in_pools(n, right_candidate(n, 0, lambda _: None)) for n in range(2, 4)]
    partly = in_pools(1, wanted, spot=0)
    again = in_pools(1, 0 if wanted else 5, recheck=True)
    found = read_log([rules, policy(0), *first, partly, again], run_id=RUN, spec=spec).problems
    assert ("unfounded_recheck", 5) in [(problem.code, problem.log_index) for problem in found]


def edited(index: int, entry: LogEntry | None) -> list[LogEntry | None]:
    return [*HONEST[:index], entry, *HONEST[index + 1 :]]


def test_an_honest_log_has_no_problem() -> None:
    assert codes(list(HONEST)) == []


ATTACKS: dict[str, tuple[list[LogEntry | None], list[tuple[str, int]]]] = {
    "the rules of another run": (edited(0, replace(RULES, run_id="99" * 32)), [("wrong_rules", 0)]),
    "other limits than were signed": (edited(0, replace(RULES, spec_digest="99" * 32)), [("wrong_rules", 0)]),
    "no rules": (list(HONEST[1:]), [("wrong_rules", 0)]),
    "rules changed half way": ([*HONEST, RULES], [("wrong_rules", 11)]),
    "one version twice": ([*HONEST, policy(1)], [("policy_order", 11)]),
    "a policy trained on what the log does not say": ([*HONEST, policy(3)], [("unlogged_step", 11)]),
    "a policy published before its step is logged": (
        [*HONEST[:7], policy(1), HONEST[7]],
        [("unlogged_step", 7)],
    ),
    "a step left out": ([*HONEST, batch(3, gaps=[(1, 0)])], [("unlogged_step", 11)]),
    "an older policy published anew": ([*HONEST, policy(0)], [("policy_order", 11)]),
    "a verdict on a policy nobody saw": ([*HONEST, admitted(9, version=7)], [("unknown_policy", 11)]),
    "a verdict on other weights": (edited(2, admitted(1, manifest_digest="99" * 32)), [("unknown_policy", 2)]),
    "one submission judged twice": ([*HONEST, rejected(2)], [("duplicate_verdict", 11)]),
    "one slot admitted twice": (
        [*HONEST[:7], admitted(9, slot=1), *HONEST[7:]],
        [("duplicate_admission", 7)],
    ),
    "work credited after no step can use it": ([*HONEST, admitted(9, slot=1)], [("late_admission", 11)]),
    "training on rejected work": ([*HONEST, batch(2, 2, gaps=[(1, 0)])], [("batch_not_admitted", 11)]),
    "training on undecided work": ([*HONEST, batch(2, 4, gaps=[(1, 0)])], [("batch_not_admitted", 11)]),
    "training on work nobody submitted": ([*HONEST, batch(2, 77, gaps=[(1, 0)])], [("batch_not_admitted", 11)]),
    "training on work before it is admitted": (
        [*HONEST[:2], batch(0, 1), *HONEST[2:7], policy(1)],
        [("batch_not_admitted", 2)],
    ),
    "one group trained on twice": ([*HONEST, batch(2, 3, gaps=[(1, 0)])], [("batch_reuse", 11)]),
    "one group twice in a step": (edited(7, batch(0, 1, 1)), [("batch_reuse", 7)]),
    "work that is too old": (
        [*replace_last_batch(submissions=(submission(6),)), batch(2, 3, gaps=[(1, 0)])],
        [("batch_selection", 10), ("batch_stale", 11)],
    ),
    "work of a later policy": (
        [*HONEST[:9], policy(2), admitted(8, version=2, slot=0), batch(1, 8, gaps=[(0, 0), (0, 2)])],
        [("unlogged_step", 9), ("batch_stale", 11)],
    ),
    "a step done again": ([*HONEST, batch(1)], [("batch_order", 11)]),
    "admitted over its limit": (edited(2, admitted(1, figures=WRONG)), [("contradictory_verdict", 2)]),
    "admitted without figures": (edited(2, admitted(1, figures=None)), [("contradictory_verdict", 2)]),
    "admitted with a reason": (
        edited(2, admitted(1, reason=Reason.WRONG_TOKEN)),
        [("contradictory_verdict", 2)],
    ),
    "a reward for a row too few": (edited(2, admitted(1, rewards=(1.0,))), [("contradictory_verdict", 2)]),
    "a reward above one": (edited(2, admitted(1, rewards=(1.0, 2.0))), [("contradictory_verdict", 2)]),
    "rejected with good figures": (edited(3, rejected(2, figures=ZERO)), [("contradictory_verdict", 3)]),
    "rejected for another reason than its figures": (
        edited(3, rejected(2, reason=Reason.PROOF_MISMATCH)),
        [("contradictory_verdict", 3)],
    ),
    "rejected for a finding without figures": (edited(3, rejected(2, figures=None)), [("contradictory_verdict", 3)]),
    "rejected for a finding without totals": (edited(3, rejected(2, totals=None)), [("contradictory_verdict", 3)]),
    "admitted without totals": (edited(2, admitted(1, totals=None)), [("contradictory_verdict", 2)]),
    "totals that nobody measured, to drive a node out": (
        edited(6, replace(CHEAP, totals=SHIFTED)),
        [("contradictory_verdict", 6)],
    ),
    "totals of a failure, to drive a node out": (
        edited(5, replace(UNDECIDED, totals=SHIFTED)),
        [("contradictory_verdict", 5)],
    ),
    "a sum of nothing": (
        edited(2, admitted(1, totals=Totals(margin=Total(count=0, sum=0.001)))),
        [("contradictory_verdict", 2)],
    ),
    "a sum above what its values can be": (
        edited(3, rejected(2, totals=Totals(margin=Total(count=100, sum=10.1)))),
        [("contradictory_verdict", 3)],
    ),
    "totals of a statistic that the run has no level for": (
        edited(2, admitted(1, totals=replace(HONEST_TOTALS, sketch=Total(count=1, sum=-1.0)))),
        [("contradictory_verdict", 2)],
    ),
    "admitted although its totals show too much": (
        edited(2, admitted(1, totals=TOO_MUCH, node="77" * 32)),
        [("contradictory_verdict", 2)],
    ),
    "rejected by figures without a finding": (edited(3, rejected(2, finding=None)), [("contradictory_verdict", 3)]),
    "rejected for a row that no group has": (
        edited(3, rejected(2, finding=replace(FOUND, row=2))),
        [("contradictory_verdict", 3)],
    ),
    "rejected under a limit that is not the run's": (
        edited(3, rejected(2, finding=replace(FOUND, value=0.2, limit=0.1))),
        [("contradictory_verdict", 3)],
    ),
    "rejected for a figure that is not measured": (
        edited(3, rejected(2, finding=replace(FOUND, figure="__class__"))),
        [("contradictory_verdict", 3)],
    ),
    "rejected for a value above the worst": (
        edited(3, rejected(2, finding=replace(FOUND, value=6.0))),
        [("contradictory_verdict", 3)],
    ),
    "admitted with a finding": (edited(2, admitted(1, finding=FOUND)), [("contradictory_verdict", 2)]),
    "rejected without a reason": (edited(3, unmeasured(2, reason=None)), [("contradictory_verdict", 3)]),
    "rejected and rewarded": (edited(3, rejected(2, rewards=(1.0, 1.0))), [("contradictory_verdict", 3)]),
    "the verifier's failure called a rejection": (
        edited(5, replace(UNDECIDED, outcome=Outcome.REJECTED)),
        [("contradictory_verdict", 5)],
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_log_that_breaks_a_rule_is_found_out(attack: str) -> None:
    entries, expected = ATTACKS[attack]
    assert codes(entries) == expected


# -- what a group, and a node's slots, show together


def test_a_rejection_for_what_the_rows_show_together_is_borne_out_by_its_totals() -> None:
    assert codes(edited(3, together(TOO_MUCH))) == []


@pytest.mark.parametrize(
    "lie",
    [
        together(HONEST_TOTALS),
        together(SHIFTED),
        together(TOO_MUCH, value=50.0),
        together(TOO_MUCH, limit=5.0),
        together(TOO_MUCH, row=1),
        together(TOO_MUCH, figure="margin"),
        together(TOO_MUCH, figure="sketch_evidence", reason=Reason.PROOF_MISMATCH),
        together(TOO_MUCH, figure="margin_drift", limit=drift_limit(SPEC.limits)),
    ],
    ids=["honest", "shifted", "more", "limit", "row", "no figure", "another statistic", "the node's slots"],
)
def test_a_finding_of_all_rows_that_their_totals_do_not_show(lie: VerdictEntry) -> None:
    assert codes(edited(3, lie)) == [("contradictory_verdict", 3)]


def log_of(*entries: LogEntry) -> list[LogEntry | None]:
    return [RULES, policy(0), *entries]


def test_a_node_that_drifts_is_rejected_once_its_slots_show_it() -> None:
    slots = drifting(*[SHIFTED] * 40)
    stopped = [entry.outcome is Outcome.REJECTED for entry in slots]
    assert stopped == sorted(stopped)
    assert 0 < stopped.index(True) < 39
    assert codes(log_of(*slots)) == []


def test_nodes_drift_by_themselves() -> None:
    """Two honest coordinators' logs of two nodes, slot by slot in turn: neither counts for the other."""
    pairs = zip(drifting(*[SHIFTED] * 20), drifting(*[HONEST_TOTALS] * 20, node="66" * 32, first=500), strict=True)
    assert codes(log_of(*(entry for pair in pairs for entry in pair))) == []


def test_a_slot_that_is_rejected_for_itself_does_not_count_against_the_good_ones_after_it() -> None:
    """Else one slot from a machine that failed once would cost its owner hundreds of good ones."""
    bad = [together(TOO_MUCH), rejected(3, totals=TOO_MUCH), rejected(4, totals=TOO_MUCH)]
    assert codes(log_of(admitted(1), *bad, admitted(5), admitted(6))) == []


def test_a_coordinator_that_admits_despite_a_drift() -> None:
    """A friend who cheats a little in every slot: no single slot shows it, and the log as a whole does."""
    slots = drifting(*[SHIFTED] * 40)
    stopped = next(at for at, entry in enumerate(slots) if entry.outcome is Outcome.REJECTED)
    favoured = [admitted(100 + at, node=entry.node, totals=entry.totals) for at, entry in enumerate(slots)]
    expected = [("contradictory_verdict", 2 + at) for at in range(stopped, 40)]
    assert codes(log_of(*favoured)) == expected


def test_a_drift_made_up_for_an_honest_node() -> None:
    slots = drifting(*[HONEST_TOTALS] * 5)
    limit = drift_limit(SPEC.limits)
    lie = Finding(reason=Reason.WRONG_TOKEN, row=None, figure="margin_drift", value=limit + 1, limit=limit)
    changes = {"outcome": Outcome.REJECTED, "reason": Reason.WRONG_TOKEN, "finding": lie, "rewards": None}
    assert codes(log_of(*slots[:4], replace(slots[4], **changes))) == [("contradictory_verdict", 6)]


def test_a_drift_that_leaves_out_the_good_slots() -> None:
    """Honest slots make up for small deviations: an operator may not count the bad ones alone."""
    slots = drifting(*[SHIFTED] * 40)
    stop = next(entry for entry in slots if entry.outcome is Outcome.REJECTED)
    before = slots[: slots.index(stop)]
    better = [HONEST_TOTALS] * 3
    middle = drifting(*better, first=900)
    assert codes(log_of(*before, *middle, stop)) == [("contradictory_verdict", 2 + len(before) + len(middle))]


def test_an_empty_log_is_a_problem() -> None:
    assert codes([]) == [("wrong_rules", None)]


def test_signed_bytes_that_are_no_entry_are_a_problem_and_not_a_gap() -> None:
    leaves = [encode(entry) for entry in HONEST]
    leaves[3] = leaves[3].replace(b'"tokens":100', b'"tokens": 100')
    leaves[4] = b'{"type":"coup"}'
    entries = list(read_entries(leaves))
    assert entries[5] == HONEST[5]
    found = codes(entries)
    assert [at for code, at in found if code == "malformed_entry"] == [3, 4]
    assert ("batch_not_admitted", 10) in found, "what cannot be read was not admitted"


def test_the_tree_is_that_of_the_log() -> None:
    tree = LeafTree()
    assert tree.root() == EMPTY_ROOT
    a, b, c = (leaf_hash(leaf) for leaf in (b"a", b"b", b"c"))
    for leaf, expected in ((b"a", a), (b"b", node_hash(a, b)), (b"c", node_hash(node_hash(a, b), c))):
        tree.append(leaf)
        assert tree.root() == expected


# -- which verdicts are drawn


@pytest.mark.parametrize(
    ("admissions", "rejections", "count", "expected"),
    [
        (90, 10, 10, (5, 5)),
        (90, 2, 10, (8, 2)),
        (2, 90, 10, (2, 8)),
        (3, 3, 10, (3, 3)),
        (50, 0, 10, (10, 0)),
        (0, 50, 10, (0, 10)),
        (50, 50, 1, (1, 0)),
        (50, 50, 0, (0, 0)),
        (50, 50, None, (50, 50)),
    ],
)
def test_both_kinds_are_drawn(admissions: int, rejections: int, count: int | None, expected: tuple[int, int]) -> None:
    """Rejections are rare in a good run: a plain draw would never look at how honest workers are refused."""
    admitted_at, rejected_at = range(admissions), range(1000, 1000 + rejections)
    drawn = choose_verdicts(admitted_at, rejected_at, count=count, rng=random.Random(1))
    assert (len(set(drawn).intersection(admitted_at)), len(set(drawn).intersection(rejected_at))) == expected
    assert len(drawn) == sum(expected)


def test_a_seed_repeats_a_draw_and_another_does_not() -> None:
    def draw(seed: int) -> list[int]:
        return choose_verdicts(range(100), range(100, 200), count=20, rng=random.Random(seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
