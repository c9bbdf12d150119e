"""A run that has stopped says so, with what stopped and the command that starts it, within a minute."""

from __future__ import annotations

import json

import pytest
import yaml
from actors import spec_of
from locations import ROOT

from coordinator.run import health
from coordinator.run.health import RULES, Signs, State, judge_health
from coordinator.storage.heartbeats import Heartbeat, Role
from coordinator.storage.progress import Progress
from node.commands.status_report import health_lines

NOW, SPEC = 1_000_000.0, spec_of(steps=10)


def signs(**changed: object) -> Signs:
    there = [Heartbeat(role, "x", NOW - 5) for role in Role]
    found = Signs(
        at=Progress.of(3, 2),
        heartbeats=there,
        waiting_since=NOW - 10,
        last_step_at=NOW - 60,
        has_sources=True,
        free_share=0.5,
        free_bytes=10**9,
    )
    return Signs(**{name: changed.get(name, getattr(found, name)) for name in Signs.__dataclass_fields__})


def without(role: Role, *, since: float | None = None) -> list[Heartbeat]:
    rest = [Heartbeat(other, "x", NOW - 5) for other in Role if other is not role]
    return rest if since is None else [*rest, Heartbeat(role, "x", NOW - since)]


def waiting(role: Role, trouble: str) -> list[Heartbeat]:
    """All processes, one of which waits, and a healthy one that was seen later."""
    there = [Heartbeat(role, "waiting", NOW - 6, trouble)]
    return [*(Heartbeat(each, "x", NOW - 5) for each in Role), *there]


def test_a_run_whose_parts_are_all_there_works():
    found = judge_health(signs(), spec=SPEC, now=NOW)
    assert (found.state, found.problems, found.headline) == (State.WORKS, [], "Everything works.")
    said = "Last step 1 min ago, the oldest submission has waited less than a minute, 50% of the disk free."
    assert str(found.figures) == said
    assert found.as_json()["seen_seconds"] == dict.fromkeys(("trainer", "verifier", "leader"), 5)


@pytest.mark.parametrize(
    ("changed", "state", "code", "said"),
    [
        ({"heartbeats": without(Role.TRAINER, since=45)}, State.STOPPED, "no_trainer", "The trainer stopped 45 s ago."),
        ({"heartbeats": without(Role.TRAINER)}, State.STOPPED, "no_trainer", "No trainer has been started."),
        (
            {"heartbeats": without(Role.VERIFIER, since=600)},
            State.STOPPED,
            "no_verifier",
            "The verifier stopped 10 min",
        ),
        ({"heartbeats": without(Role.LEADER, since=31)}, State.SLOW, "no_leader", "The leader stopped 31 s ago."),
        (
            {"heartbeats": waiting(Role.TRAINER, "disk_full")},
            State.STOPPED,
            "trainer_waits",
            "waits: its disk is full.",
        ),
        ({"heartbeats": waiting(Role.VERIFIER, "no_access")}, State.SLOW, "verifier_waits", "A verifier waits: it may"),
        (
            {"heartbeats": waiting(Role.VERIFIER, "no_source")},
            State.SLOW,
            "verifier_waits",
            "--source addresses serves",
        ),
        ({"has_sources": False}, State.STOPPED, "no_relay", "workers cannot fetch policies"),
        ({"waiting_since": NOW - 700}, State.SLOW, "queue_too_old", "has waited 12 min for a verdict"),
        ({"last_step_at": NOW - 7300}, State.SLOW, "no_step", "No training step has ended for 2.0 h."),
        ({"free_share": 0.04}, State.SLOW, "disk_nearly_full", "1.0 GB of the disk of the run's data are free, 4% of"),
    ],
)
def test_what_is_wrong_is_named_with_what_mends_it(changed, state, code, said):
    found = judge_health(signs(**changed), spec=SPEC, now=NOW)
    (problem,) = found.problems
    assert (found.state, problem.rule.code) == (state, code)
    assert said in problem.text
    assert problem.rule.todo


def test_a_large_disk_with_room_is_not_nearly_full():
    """A tenth of 4 TB is more than most runs ever write, and a line that is red for weeks is read by nobody."""
    assert judge_health(signs(free_share=0.07, free_bytes=300 * 10**9), spec=SPEC, now=NOW).state is State.WORKS
    assert judge_health(signs(free_share=0.09, free_bytes=20 * 10**9), spec=SPEC, now=NOW).state is State.WORKS


def test_the_worst_comes_first_and_a_run_that_is_over_needs_nobody():
    bad = {"heartbeats": [], "free_share": 0.01}
    found = judge_health(signs(**bad), spec=SPEC, now=NOW)
    assert [one.rule.code for one in found.problems] == ["no_trainer", "no_verifier", "no_leader", "disk_nearly_full"]
    over = judge_health(signs(**bad, at=Progress.of(10, 9), waiting_since=None), spec=SPEC, now=NOW)
    assert (over.state, over.problems) == (State.OVER, ())
    last = judge_health(signs(**bad, at=Progress.of(10, 9)), spec=SPEC, now=NOW)
    assert last.state is State.STOPPED, "the last groups still wait for verdicts"


def test_the_alerts_have_the_same_rules_and_bounds():
    """A page that is green while the pager rings, or red while it does not, is believed once."""
    text = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    alerts = {rule["alert"]: rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}
    assert {rule.alert for rule in RULES} - {""} <= alerts.keys()
    for name in ("SwarmproofNoTrainer", "SwarmproofNoVerifier", "SwarmproofNoLeader"):
        assert f"> {health.AWAY_SECONDS:.0f}" in alerts[name]
    assert alerts["SwarmproofQueueTooOld"].endswith(f"> {health.OLD_SECONDS:.0f}")
    assert f"[{health.STEP_SECONDS / 3600:.0f}h]" in alerts["SwarmproofNoStep"]
    full = f"< {health.LEAST_FREE_SHARE:g} and swarmproof_disk_free_bytes < {health.LEAST_FREE_BYTES:.0e}"
    assert alerts["SwarmproofDiskNearlyFull"].endswith(full.replace("e+", "e"))


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"{}",
        b'{"health": 1}',
        b"[" * 100_000,
        b'{"health": {"state": "x" }}',
        b'{"health": {"state": "works", "problems": [{"text": "\xd7"}]}}',
    ],
    ids=["nothing", "no health", "a number", "deep", "no problems", "no UTF-8"],
)
def test_a_coordinator_that_talks_nonsense_of_its_health_says_nothing(nonsense):
    assert health_lines(nonsense) == []


def test_a_contributor_sees_that_it_is_not_their_machine():
    found = judge_health(signs(heartbeats=without(Role.VERIFIER, since=40)), spec=SPEC, now=NOW)
    (line,) = health_lines(json.dumps({"health": found.as_json(), "more": 1}).encode())
    assert line.said == "The verifier stopped 40 s ago."
