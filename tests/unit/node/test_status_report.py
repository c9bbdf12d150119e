"""What `swarmproof status` says in words, also of what a coordinator invents."""

from __future__ import annotations

import io

import pytest
from msgspec import structs
from rich.console import Console

from node.commands.status_report import LocalWorker, deciding, line_of, lines_of, show
from node.protocol.messages import NodeStanding, Rejection
from node.protocol.reasons import Reason
from node.protocol.run import StandingSpec

RULES = StandingSpec()
STANDING = NodeStanding(
    node="ab" * 32,
    known=True,
    banned=False,
    banned_at=None,
    verified=3,
    strikes=0,
    probation=8,
    ban_after=3,
    admitted=3,
    rejected=0,
    indeterminate=0,
    vested=12345,
    unvested=0,
    void=0,
    stake=0,
    leases=1,
    unjudged=2,
    most_slots=4,
    wait_seconds=0.0,
    full_rate=1.0,
    rejections=(),
)
WORKER = LocalWorker(run_id="c" * 64, coordinator="http://c", doing="generating 2 slots", updated_at=1000.0)


def rejection(number: int) -> Rejection:
    return Rejection(
        submission=f"{number:064x}", reason=Reason.WRONG_TOKEN, detail="", decided_at=number, log_index=number
    )


def said(standing: NodeStanding, *, rules: StandingSpec = RULES) -> dict[str, str]:
    return {line.name: line.said for line in lines_of(standing, rules)}


def test_a_node_that_lost_its_trust_reads_how_near_a_ban_is() -> None:
    text = said(structs.replace(STANDING, verified=1, strikes=2, rejected=2))["standing"]
    assert text.startswith("On probation again: 1 of 8")
    assert "2 of the 3 rejections that end in a ban" in text


def test_a_nickname_stands_beside_the_id() -> None:
    assert said(structs.replace(STANDING, nickname="Ada"))["node"] == f"{STANDING.node} (Ada)"


def test_credit_says_what_may_still_be_lost() -> None:
    assert said(STANDING)["credit"] == "12,345 tokens vested."
    text = said(structs.replace(STANDING, unvested=64, void=7))["credit"]
    assert text == "12,345 tokens vested, 64 not yet: a rejection would void them, 7 void since a rejection."


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "It may have 4 slots at a time, and has 3 (1 leased, 2 without a verdict). Each is measured in full."),
        ({"wait_seconds": 12.3}, "No lease for another 12 s: a slot was rejected, or a lease lapsed."),
        ({"most_slots": 0}, "The run is over"),
        ({"most_slots": 0, "banned": True}, "gives this key no more work"),
        ({"full_rate": 0.25}, "measured in full with 25%"),
    ],
)
def test_what_the_coordinator_will_do_next(changes: dict[str, object], expected: str) -> None:
    assert expected in said(structs.replace(STANDING, **changes))["next"]


def test_a_stake_that_is_missing_is_named_as_the_reason() -> None:
    rules = StandingSpec(stake=100)
    lines = said(structs.replace(STANDING, verified=9), rules=rules)
    assert lines["stake"] == "0 of the 100 that the run asks for."
    assert "because too little is staked" in lines["next"]


def test_the_rejections_that_banned_a_node_are_shown_not_those_that_came_after() -> None:
    last = tuple(rejection(number) for number in (5, 4, 3, 2, 1))
    assert deciding(structs.replace(STANDING, banned=True, strikes=5, rejections=last)) == last[2:5]
    assert deciding(structs.replace(STANDING, banned=True, strikes=3, rejections=last)) == last[:3]
    assert deciding(structs.replace(STANDING, strikes=1, rejections=last)) == last
    assert deciding(structs.replace(STANDING, banned=True, strikes=50, rejections=last)) == last


@pytest.mark.parametrize(
    ("changes", "now", "expected"),
    [
        ({}, 1001.0, "generating 2 slots; 0 tokens/s, 0 slots without a receipt yet."),
        ({"coordinator_away": True}, 1001.0, "The coordinator is away."),
        ({}, 2000.0, "Not running: it was last generating 2 slots, at 1970-01-01 00:16:40 UTC."),
        ({"doing": "ended"}, 1001.0, "Not running: it ended at 1970-01-01 00:16:40 UTC."),
        ({"dismissed": "key_in_use: alpha"}, 1001.0, "Ended: key_in_use: alpha"),
        ({}, 0.0, "generating 2 slots"),
    ],
)
def test_what_the_local_worker_does(changes: dict[str, object], now: float, expected: str) -> None:
    assert expected in line_of(structs.replace(WORKER, **changes), now=now).said


def test_attack_a_coordinators_inventions_neither_break_the_report_nor_drive_the_terminal() -> None:
    far = 2**53 - 1
    bad = Rejection(
        submission="a" * 64, reason=Reason.WRONG_SEED, detail="[red]x[/red] \u202e", decided_at=far, log_index=far
    )
    standing = structs.replace(
        STANDING, banned=True, banned_at=far, strikes=far, vested=far, wait_seconds=1e300, rejections=(bad,) * 10
    )
    worker = structs.replace(WORKER, doing="\x1b[2J", updated_at=1e300, dismissed=None)
    screen = io.StringIO()
    show([*lines_of(standing, RULES), line_of(worker, now=0.0)], deciding(standing), Console(file=screen, width=200))
    shown = screen.getvalue()
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[red]x[/red]" in shown, "nothing is taken for markup"
    assert Reason.WRONG_SEED.meaning in shown
    assert shown.count(Reason.WRONG_SEED.todo) == 1, "once, not once for each rejection"
