"""What an auditor sees in the log alone: each test is one way in which an operator could cheat or err."""

from __future__ import annotations

import random
from dataclasses import replace as replace_verdict

import msgspec
import pytest

from node.audit_evidence import BORDERLINE_FACTOR, TOTALS_APART, compare, is_borderline
from node.audit_log import LeafTree, LoggedVerdict, check_log, choose_verdicts, read_entries
from node.audit_report import Result
from node.protocol.admission import Figures, Finding, Outcome, judge, judge_drift, judge_group, worst
from node.protocol.evidence import Drift, Total, Totals, drift_limit, evidence_limit, follow
from node.protocol.merkle import EMPTY_ROOT, leaf_hash, node_hash
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry, RunEntry, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import BatchSpec, EnvironmentSpec, HonestSpec, LevelSpec, LimitsSpec, RunSpec, SamplingSpec
from node.verification import Verdict
from shardcast.wire import encode

RUN = "11" * 32
SPEC = RunSpec(
    name="t",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=2),
    batch=BatchSpec(max_async=1),
    limits=LimitsSpec(honest=HonestSpec(margin=LevelSpec(mean=0.001, variance=1e-4, largest=0.1))),
)
ZERO = Figures(**dict.fromkeys(Figures.__struct_fields__, 0.0))
WRONG = msgspec.structs.replace(ZERO, token_margin=5.0)
FOUND = Finding(reason=Reason.WRONG_TOKEN, row=1, figure="token_margin", value=5.0, limit=SPEC.limits.token_margin)
HONEST_TOTALS = Totals(margin=Total(count=100, sum=0.1))
SHIFTED = Totals(margin=Total(count=100, sum=0.35))
replace = msgspec.structs.replace


def submission(number: int) -> str:
    return f"{number:064x}"


def admitted(number: int, *, version: int = 0, slot: int | None = None, **changes: object) -> VerdictEntry:
    entry = VerdictEntry(
        submission=submission(number),
        node="22" * 32,
        version=version,
        manifest_digest=f"{version + 100:064x}",
        slot=number if slot is None else slot,
        request=submission(number),
        body="33" * 32,
        outcome=Outcome.ADMITTED,
        reason=None,
        finding=None,
        detail="",
        figures=ZERO,
        totals=HONEST_TOTALS,
        rewards=(0.0, 1.0),
        tokens=100,
        decided_at=1,
    )
    return replace(entry, **changes)


def rejected(number: int, **changes: object) -> VerdictEntry:
    entry = admitted(number, outcome=Outcome.REJECTED, reason=Reason.WRONG_TOKEN, figures=WRONG, rewards=None)
    return replace(entry, **({"finding": FOUND} | changes))


def unmeasured(number: int, **changes: object) -> VerdictEntry:
    return rejected(number, **({"finding": None, "figures": None, "totals": None} | changes))


def policy(version: int) -> PolicyEntry:
    return PolicyEntry(version=version, manifest_digest=f"{version + 100:064x}", result_digest="44" * 32)


def batch(step: int, *numbers: int) -> BatchEntry:
    return BatchEntry(step=step, submissions=tuple(map(submission, numbers)))


RULES = RunEntry(run_id=RUN, spec_digest=SPEC.digest)
TOO_MUCH = Totals(margin=Total(count=100, sum=2.5))
UNDECIDED = unmeasured(4, outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED)
CHEAP = unmeasured(5, reason=Reason.NOT_PARQUET, tokens=0)
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
    batch(1, 3, 6),
]


def codes(entries: list[LogEntry | None]) -> list[tuple[str, int | None]]:
    return [(problem.code, problem.log_index) for problem in check_log(entries, run_id=RUN, spec=SPEC)]


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
    "an older policy published anew": ([*HONEST, policy(0)], [("policy_order", 11)]),
    "a verdict on a policy nobody saw": ([*HONEST, admitted(9, version=7)], [("unknown_policy", 11)]),
    "a verdict on other weights": (edited(2, admitted(1, manifest_digest="99" * 32)), [("unknown_policy", 2)]),
    "one submission judged twice": ([*HONEST, rejected(2)], [("duplicate_verdict", 11)]),
    "one slot admitted twice": ([*HONEST, admitted(9, slot=1)], [("duplicate_admission", 11)]),
    "training on rejected work": ([*HONEST, batch(2, 2)], [("batch_not_admitted", 11)]),
    "training on undecided work": ([*HONEST, batch(2, 4)], [("batch_not_admitted", 11)]),
    "training on work nobody submitted": ([*HONEST, batch(2, 77)], [("batch_not_admitted", 11)]),
    "training on work before it is admitted": (
        [*HONEST[:2], batch(0, 1), *HONEST[2:7], policy(1)],
        [("batch_not_admitted", 2)],
    ),
    "one group trained on twice": ([*HONEST, batch(2, 6)], [("batch_reuse", 11)]),
    "one group twice in a step": (edited(7, batch(0, 1, 1)), [("batch_reuse", 7)]),
    "work that is too old": ([*HONEST[:7], batch(2, 1)], [("batch_stale", 7)]),
    "work of a later policy": ([*HONEST[:7], policy(1), admitted(6, version=1), batch(0, 6)], [("batch_stale", 9)]),
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


def together(totals: Totals, **changes: object) -> VerdictEntry:
    """A rejection for what all rows show, with `changes` to its finding."""
    found = judge_group(totals, limits=SPEC.limits)
    finding = Finding(
        reason=Reason.WRONG_TOKEN,
        row=None,
        figure="margin_evidence",
        value=found.value if found else 20.0,
        limit=evidence_limit(SPEC.limits),
    )
    reason = changes.get("reason", finding.reason)
    return rejected(2, finding=replace(finding, **changes), reason=reason, figures=ZERO, totals=totals, node="77" * 32)


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


def drifting(*slots: Totals, node: str = "55" * 32, first: int = 100) -> list[VerdictEntry]:
    """What an honest coordinator logs of a node whose slots sum up to these."""
    drift, entries = Drift(), []
    for number, totals in enumerate(slots, first):
        drift = follow(drift, totals, limits=SPEC.limits)
        finding = judge_drift(drift, limits=SPEC.limits)
        entry = admitted(number, node=node, totals=totals)
        if finding is not None:
            changes = {"outcome": Outcome.REJECTED, "reason": finding.reason, "rewards": None}
            entry = replace(entry, finding=finding, **changes)
        entries.append(entry)
    return entries


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
    entries, problems = read_entries(leaves)
    assert [(problem.code, problem.log_index) for problem in problems] == [
        ("malformed_entry", 3),
        ("malformed_entry", 4),
    ]
    assert entries[3] is None
    assert entries[5] == HONEST[5]
    assert ("batch_not_admitted", 10) in codes(entries), "what cannot be read was not admitted"


def test_the_tree_is_that_of_the_log() -> None:
    tree = LeafTree()
    assert tree.root() == EMPTY_ROOT
    a, b, c = (leaf_hash(leaf) for leaf in (b"a", b"b", b"c"))
    for leaf, expected in ((b"a", a), (b"b", node_hash(a, b)), (b"c", node_hash(node_hash(a, b), c))):
        tree.append(leaf)
        assert tree.root() == expected


# -- which verdicts are drawn


def population(admissions: int, rejections: int) -> list[LoggedVerdict]:
    entries = [admitted(number) for number in range(admissions)]
    entries += [rejected(1000 + number) for number in range(rejections)]
    return [LoggedVerdict(index, entry) for index, entry in enumerate([*entries, UNDECIDED])]


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
    drawn = choose_verdicts(population(admissions, rejections), count=count, rng=random.Random(1))
    kinds = [verdict.entry.outcome for verdict in drawn]
    assert (kinds.count(Outcome.ADMITTED), kinds.count(Outcome.REJECTED)) == expected
    assert len({verdict.log_index for verdict in drawn}) == len(drawn)


def test_a_seed_repeats_a_draw_and_another_does_not() -> None:
    def draw(seed: int) -> list[int]:
        return [v.log_index for v in choose_verdicts(population(100, 100), count=20, rng=random.Random(seed))]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


# -- how a derived verdict is compared

LIMITS = LimitsSpec(token_margin=1.0, mantissa_mean=10.0, honest=SPEC.limits.honest)
JUDGED = replace(SPEC, limits=LIMITS)


def verdict_of(entry: VerdictEntry, **changes: object) -> Verdict:
    values = {
        "outcome": entry.outcome,
        "reason": entry.reason,
        "figures": entry.figures,
        "totals": entry.totals,
        "rewards": entry.rewards,
        "tokens": entry.tokens,
    }
    return Verdict(**(values | changes))


def measured(**figures: float) -> Figures:
    return replace(ZERO, **figures)


def summed(each: float, *, count: int = 100) -> Totals:
    return Totals(margin=Total(count=count, sum=count * each))


def rejection(figures: Figures, reason: Reason) -> Verdict:
    return derived_from(figures, figures, reason=reason)


def derived_from(*rows: Figures, reason: Reason = Reason.WRONG_TOKEN) -> Verdict:
    """A rejection of a group with these figures."""
    return Verdict(
        outcome=Outcome.REJECTED,
        reason=reason,
        finding=judge(rows, limits=LIMITS),
        figures=worst(rows),
        totals=HONEST_TOTALS,
        row_figures=dict(enumerate(rows)),
        tokens=100,
    )


def found(row: int, figure: str, value: float) -> VerdictEntry:
    """A logged rejection for this."""
    (reason, limit) = (Reason.WRONG_TOKEN, 1.0) if figure == "token_margin" else (Reason.PROOF_MISMATCH, 10.0)
    finding = Finding(reason=reason, row=row, figure=figure, value=value, limit=limit)
    return rejected(1, reason=reason, finding=finding, figures=measured(**{figure: value}))


def test_the_same_decision_agrees_whatever_its_figures() -> None:
    assert compare(admitted(1), verdict_of(admitted(1), figures=measured(token_margin=0.5)), spec=JUDGED)[0] == "agree"
    assert compare(CHEAP, verdict_of(CHEAP), spec=JUDGED)[0] == "agree"


@pytest.mark.parametrize(
    "changes",
    [{"rewards": (1.0, 1.0)}, {"rewards": (1.0, 0.0)}, {"tokens": 101}],
)
def test_other_rewards_or_tokens_disagree(changes: dict) -> None:
    assert compare(admitted(1), verdict_of(admitted(1), **changes), spec=JUDGED)[0] is Result.DISAGREE


def test_junk_that_was_admitted_disagrees() -> None:
    derived = rejection(measured(token_margin=9.0), Reason.WRONG_TOKEN)
    assert compare(admitted(1), derived, spec=JUDGED)[0] is Result.DISAGREE


def test_junk_admitted_under_invented_figures_near_the_limit_still_disagrees() -> None:
    """An operator cannot hide behind rounding: what counts is this machine's figure too."""
    entry = admitted(1, figures=measured(token_margin=0.99))
    assert compare(entry, rejection(measured(token_margin=9.0), Reason.WRONG_TOKEN), spec=JUDGED)[0] == "disagree"


def test_an_honest_worker_rejected_under_invented_figures_still_disagrees() -> None:
    figures = measured(token_margin=0.0001)
    derived = verdict_of(admitted(1), figures=figures, row_figures={0: figures, 1: figures})
    assert compare(found(1, "token_margin", 1.1), derived, spec=JUDGED)[0] is Result.DISAGREE


def test_a_finding_may_be_any_of_those_that_are_there() -> None:
    """Which row is measured first is the verifier's to draw: an auditor who finds more must not call it a liar."""
    derived = derived_from(measured(mantissa_mean=99.0), measured(token_margin=9.0, mantissa_mean=40.0))
    for row, figure, value in ((0, "mantissa_mean", 80.0), (1, "token_margin", 7.0), (1, "mantissa_mean", 41.0)):
        assert compare(found(row, figure, value), derived, spec=JUDGED)[0] is Result.AGREE
    other = replace(found(0, "mantissa_mean", 80.0), tokens=101)
    assert compare(other, derived, spec=JUDGED)[0] is Result.DISAGREE


def test_a_finding_invented_for_an_honest_row_beside_a_bad_one_disagrees() -> None:
    """The verdict would be right, but what it says of that row is a lie."""
    derived = derived_from(measured(mantissa_mean=99.0, token_margin=0.1), measured(token_margin=9.0))
    assert compare(found(0, "token_margin", 9.0), derived, spec=JUDGED)[0] is Result.DISAGREE
    assert compare(found(1, "mantissa_mean", 99.0), derived, spec=JUDGED)[0] is Result.DISAGREE


def test_a_finding_close_to_its_limit_is_nobodys_fault_whatever_another_row_shows() -> None:
    derived = derived_from(measured(mantissa_mean=99.0, token_margin=0.9), ZERO)
    assert compare(found(0, "token_margin", 1.1), derived, spec=JUDGED)[0] is Result.INDETERMINATE
    assert compare(found(0, "token_margin", 1.3), derived, spec=JUDGED)[0] is Result.DISAGREE


@pytest.mark.parametrize(
    "change",
    [{"row": 2}, {"row": -1}, {"figure": "figures"}, {"limit": 0.5}, {"value": 1.0}, {"reason": Reason.WRONG_LOGPROB}],
)
def test_a_finding_that_no_verifier_makes_convicts_and_does_not_stop_the_audit(change: dict) -> None:
    derived = derived_from(measured(token_margin=9.0), measured(token_margin=9.0))
    entry = found(0, "token_margin", 9.0)
    assert compare(entry, derived, spec=JUDGED)[0] is Result.AGREE
    assert compare(replace(entry, finding=replace(entry.finding, **change)), derived, spec=JUDGED)[0] == "disagree"


def test_a_rejection_by_measurement_names_what_was_found() -> None:
    derived = derived_from(measured(token_margin=9.0), ZERO)
    assert compare(unmeasured(1), derived, spec=JUDGED)[0] is Result.DISAGREE


@pytest.mark.parametrize(("ours", "theirs"), [(0.81, 1.24), (1.24, 0.81), (1.01, 1.0), (1.0, 1.01)])
def test_figures_on_both_sides_of_a_limit_are_nobodys_fault(ours: float, theirs: float) -> None:
    figures = measured(token_margin=ours), measured(token_margin=theirs)
    entry = found(1, "token_margin", theirs) if theirs > 1 else admitted(1, figures=figures[1])
    rows = {0: ZERO, 1: figures[0]}
    admission = verdict_of(admitted(1), figures=figures[0], row_figures=rows)
    derived = rejection(figures[0], Reason.WRONG_TOKEN) if ours > 1 else admission
    assert is_borderline(entry, derived, limits=LIMITS)
    assert compare(entry, derived, spec=JUDGED)[0] is Result.INDETERMINATE


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"token_margin": 0.79}, {"token_margin": 1.01}),
        ({"token_margin": 1.26}, {"token_margin": 0.99}),
        ({"token_margin": 0.9}, {"token_margin": 0.9}),
        ({"mantissa_mean": 10.1, "token_margin": 9.0}, {"mantissa_mean": 1.0, "token_margin": 9.0}),
    ],
)
def test_what_rounding_does_not_explain_is_not_borderline(ours: dict, theirs: dict) -> None:
    assert not borders(measured(**ours), measured(**theirs))


def borders(ours: Figures, theirs: Figures, *, limits: LimitsSpec = LIMITS) -> bool:
    return is_borderline(admitted(1, figures=theirs), verdict_of(admitted(1), figures=ours), limits=limits)


def test_one_figure_near_its_limit_does_not_excuse_another_that_is_far_over() -> None:
    ours = measured(mantissa_mean=10.1, token_margin=1.1)
    assert borders(ours, measured(mantissa_mean=9.9, token_margin=0.9))
    assert not borders(ours, measured(mantissa_mean=9.9, token_margin=0.1))


def test_a_limit_of_zero_has_no_border() -> None:
    assert not borders(ZERO, measured(token_margin=1e-9), limits=LimitsSpec(token_margin=0.0))


def test_what_all_rows_show_together_borders_likewise() -> None:
    """13.8 nats are the limit; 0.0095, 0.0105 and 0.012 a token are 12.8, 15.2 and 18.9."""
    near, over, far = (summed(each) for each in (0.0095, 0.0105, 0.012))
    derived = verdict_of(admitted(1), totals=over, outcome=Outcome.REJECTED, reason=Reason.WRONG_TOKEN)
    assert is_borderline(admitted(1, totals=near), derived, limits=LIMITS)
    assert not is_borderline(admitted(1, totals=HONEST_TOTALS), derived, limits=LIMITS)
    derived = replace_verdict(derived, totals=far)
    assert not is_borderline(admitted(1, totals=near), derived, limits=LIMITS)


def test_a_check_without_a_model_has_no_border() -> None:
    unseen = verdict_of(admitted(1), figures=None, totals=None)
    assert not is_borderline(admitted(1), unseen, limits=LIMITS)
    derived = Verdict(outcome=Outcome.REJECTED, reason=Reason.WRONG_SEED, tokens=9)
    assert compare(admitted(1), derived, spec=JUDGED)[0] is Result.DISAGREE


def test_this_machines_failure_is_no_disagreement() -> None:
    derived = Verdict(outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED, detail="MemoryError.")
    assert compare(admitted(1), derived, spec=JUDGED)[0] is Result.UNAVAILABLE


# -- totals: a run judges its nodes by them, so what they say of a slot must be true


@pytest.mark.parametrize(
    ("theirs", "result"),
    [
        (0.001, Result.AGREE),
        (0.0034, Result.AGREE),
        (0.0045, Result.INDETERMINATE),
        (0.0115, Result.DISAGREE),
        (-0.01, Result.DISAGREE),
    ],
)
def test_totals_are_compared_in_standard_deviations_of_one_value(theirs: float, result: Result) -> None:
    """A level of 0.001 with a standard deviation of 0.01: a quarter of one is rounding, a whole one is a lie."""
    derived = verdict_of(admitted(1), totals=summed(0.001))
    assert compare(admitted(1, totals=summed(theirs)), derived, spec=JUDGED)[0] is result


@pytest.mark.parametrize("theirs", [summed(0.001, count=99), summed(0.001, count=0), Totals()])
def test_totals_of_fewer_values_disagree(theirs: Totals) -> None:
    """Leaving out the tokens that show a friend's cheating would be the simplest way to hide it."""
    derived = verdict_of(admitted(1), totals=summed(0.001))
    assert compare(admitted(1, totals=theirs), derived, spec=JUDGED)[0] is Result.DISAGREE


def test_a_sum_of_nothing_disagrees() -> None:
    derived = verdict_of(admitted(1), totals=Totals())
    entry = admitted(1, totals=Totals(sketch=Total(count=0, sum=5.0)))
    assert compare(entry, derived, spec=JUDGED)[0] is Result.DISAGREE


def test_totals_that_rounding_may_explain_do_not_hide_other_rewards() -> None:
    derived = verdict_of(admitted(1), totals=summed(0.001))
    entry = admitted(1, totals=summed(0.0045), rewards=(1.0, 1.0))
    assert compare(entry, derived, spec=JUDGED)[0] is Result.DISAGREE
    assert compare(replace(entry, rewards=(0.0, 1.0), tokens=7), derived, spec=JUDGED)[0] is Result.DISAGREE


@pytest.mark.parametrize(
    ("ours", "result"), [(0.0105, Result.AGREE), (0.0095, Result.INDETERMINATE), (0.001, Result.DISAGREE)]
)
def test_a_finding_of_all_rows_must_be_there_here_too(ours: float, result: Result) -> None:
    entry = together(summed(0.0105))
    derived = verdict_of(admitted(1), totals=summed(ours), row_figures={0: ZERO, 1: ZERO})
    assert compare(entry, derived, spec=JUDGED)[0] is result


@pytest.mark.parametrize(("ours", "result"), [(0.0035, Result.AGREE), (-0.0075, Result.DISAGREE)])
def test_of_a_drift_a_slots_own_share_must_be_true(ours: float, result: Result) -> None:
    slots = drifting(*[SHIFTED] * 40)
    entry = next(entry for entry in slots if entry.outcome is Outcome.REJECTED)
    derived = verdict_of(admitted(1), totals=summed(ours), row_figures={0: ZERO, 1: ZERO})
    assert compare(entry, derived, spec=JUDGED)[0] is result


def test_the_documented_factor_is_the_one_used() -> None:
    assert (BORDERLINE_FACTOR, TOTALS_APART) == (1.25, 1.0)
