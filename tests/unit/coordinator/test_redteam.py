"""What a red team says about its run must be true: who got through, what stopped the others, and who is to blame."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from coordinator.lab.processes.journal import (
    ACCEPTED,
    HANDED_BACK,
    HELD,
    STORED,
    Journal,
    JournalEntry,
    read_journal,
    read_nodes,
)
from coordinator.lab.processes.layout import demo_run_toml
from coordinator.lab.processes.ledger import Ledger
from coordinator.lab.redteam.attacks import ATTACKS
from coordinator.lab.redteam.command import redteam
from coordinator.lab.redteam.rules import redteam_run_toml
from coordinator.lab.redteam.tally import SCHEMA, AttackResult, AttackRow, attack_rows
from coordinator.lab.redteam.view import render
from node.protocol.admission import Figures, Outcome, judge_rows
from node.protocol.messages import BatchEntry, Gap, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import parse_run_toml
from shardcast.wire import encode

GREEDY = ATTACKS["greedy"]
NODE = "ab" * 32


def submission(number: int) -> str:
    return f"{number:064x}"


def verdict(
    number: int, *, reason: Reason | None = None, slot: int = 0, spot: int | None = None, recheck: bool = False
) -> VerdictEntry:
    return VerdictEntry(
        submission=submission(number),
        node=NODE,
        version=3,
        manifest_digest=submission(0),
        slot=slot,
        request=submission(0),
        body=submission(0),
        outcome=Outcome.REJECTED if reason else Outcome.ADMITTED,
        reason=reason,
        finding=None,
        detail="",
        figures=None,
        totals=None,
        rewards=None if reason else (1.0,),
        tokens=7,
        decided_at=0,
        spot=spot,
        recheck=recheck,
    )


def ledger(*entries: VerdictEntry | BatchEntry) -> Ledger:
    found = Ledger("http://127.0.0.1:1")
    found.add([encode(entry) for entry in entries], now=0.0)
    return found


def stored(number: int, *, hostile: bool = True) -> JournalEntry:
    return JournalEntry(0.0, GREEDY.name, NODE, hostile, STORED, submission=submission(number), slot="3/0")


def row(entries: list[JournalEntry], log: Ledger) -> AttackRow:
    (found,) = attack_rows([GREEDY], entries, log)
    return found


def test_a_hostile_slot_that_was_admitted_got_through() -> None:
    found = row([stored(1), stored(2)], ledger(verdict(1), verdict(2, reason=Reason.WRONG_TOKEN)))
    assert (found.tries, found.slots, found.admitted, found.succeeded, found.stopped) == (
        2,
        2,
        1,
        1,
        {"wrong_token": 1},
    )


def test_a_second_verdict_undoes_the_first_unless_training_has_used_the_group() -> None:
    first, second = verdict(1, spot=0), verdict(1, reason=Reason.WRONG_TOKEN, recheck=True)
    assert row([stored(1)], ledger(first, second)).succeeded == 0
    used = BatchEntry(step=0, submissions=(submission(1),))
    assert row([stored(1)], ledger(first, used, second)).succeeded == 1


def test_what_an_attacker_did_honestly_is_not_held_against_the_verifier() -> None:
    found = row([stored(1, hostile=False)], ledger(verdict(1)))
    assert (found.tries, found.succeeded, found.honest) == (0, 0, 1)


def test_a_hostile_request_that_was_granted_got_through() -> None:
    found = row([JournalEntry(0.0, GREEDY.name, NODE, True, ACCEPTED, count=3)], ledger())
    assert (found.tries, found.succeeded, found.admitted) == (3, 3, 0)


def test_a_slot_without_a_verdict_is_neither_stopped_nor_through() -> None:
    found = row([stored(1)], ledger())
    assert (found.tries, found.slots, found.stopped, found.unexpected) == (1, 0, {"undecided": 1}, ())


def test_what_nobody_expected_to_stop_an_attack_is_pointed_out() -> None:
    found = row([stored(1)], ledger(verdict(1, reason=Reason.MALFORMED_SUBMISSION)))
    assert found.unexpected == ("malformed_submission",)


@pytest.mark.parametrize("code", [HANDED_BACK, HELD])
@pytest.mark.parametrize(("slot", "came_to"), [("3/5", "done_by_others"), ("3/6", "left_over"), ("3/7", "gap")])
def test_a_slot_that_was_not_done_is_followed_to_whoever_did_it(code: str, slot: str, came_to: str) -> None:
    entry = JournalEntry(0.0, GREEDY.name, NODE, True, code, slot=slot)
    step = BatchEntry(step=5, submissions=(), gaps=(Gap(version=3, slot=7),))
    assert row([entry], ledger(verdict(1, slot=5), step)).stopped == {came_to: 1}


def test_a_second_verdict_is_not_another_submission_in_the_nodes_record() -> None:
    log = ledger(verdict(1, spot=0), verdict(2), verdict(1, reason=Reason.WRONG_TOKEN, recheck=True))
    record = log.record(NODE)
    assert (record.submitted, record.admitted, record.rejected, record.tokens) == (2, 1, 1, 7)


def test_a_journal_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.introduce(NODE)
    journal.write("greedy", NODE, code=STORED, submission=submission(1), slot="3/0")
    journal.close()
    with (tmp_path / "journal.ndjson").open("ab") as file:
        file.write(b'{"at":1.0,"attack":"gre')
    assert [entry.submission for entry in read_journal(tmp_path)] == [submission(1)]
    assert read_nodes(tmp_path) == {NODE}
    again = Journal(tmp_path)
    assert again.stored == 1, "a process that is started again keeps its share"
    again.close()


def test_wide_open_limits_are_those_that_nothing_exceeds() -> None:
    """What is compared with must differ from the red team's run in its limits, and in nothing else."""
    own = parse_run_toml(redteam_run_toml(steps=3, seed=1))
    wide = parse_run_toml(redteam_run_toml(steps=3, seed=1, wide_open=True))
    assert msgspec.structs.replace(wide, limits=own.limits) == own
    awful = Figures(**dict.fromkeys(Figures.__struct_fields__, 1e6))
    evidence = {name: 0.0 for name in Figures.__struct_fields__ if name.endswith("_evidence")}
    assert judge_rows({0: msgspec.structs.replace(awful, **evidence)}, limits=wide.limits) is None
    assert judge_rows({0: msgspec.structs.replace(awful, **evidence)}, limits=own.limits) is not None
    assert (wide.limits.suspects, wide.limits.second_looks) == ((), 0.0)


def test_the_demonstrations_rules_have_the_keys_that_are_changed() -> None:
    assert parse_run_toml(demo_run_toml(name='"other"', steps=3)).name == "other"
    with pytest.raises(ValueError, match="no key nothing"):
        demo_run_toml(nothing=1)


def test_every_attack_says_what_it_is_and_what_stops_it() -> None:
    assert len(ATTACKS) >= 40
    doors = {code for attack in ATTACKS.values() for code in attack.stopped_by}
    assert {str(reason) for reason in Reason} & doors
    for name, attack in ATTACKS.items():
        assert (attack.name, bool(attack.about), bool(attack.stands_for)) == (name, True, True)
        assert attack.stopped_by, name
        assert ACCEPTED not in attack.stopped_by


def result(**changes: object) -> AttackResult:
    attack = AttackRow(
        "greedy", "", "", tries=3, slots=3, admitted=0, succeeded=0, stopped={"wrong_token": 3}, unexpected=(), honest=1
    )
    found = AttackResult(
        schema=SCHEMA,
        run_id=NODE,
        seconds=12.0,
        steps=2,
        slots=9,
        hostile_slots=3,
        hostile_share=1 / 3,
        hostile_admitted=0,
        succeeded=0,
        honest_slots=5,
        honest_rejected=0,
        honest_by_attackers=1,
        identities=2,
        rewards=(0.25, 0.75),
        attacks=(attack,),
        audit=None,
        restarts={},
    )
    return msgspec.structs.replace(found, **changes)


def test_the_table_has_what_happened() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(render(result(succeeded=1, hostile_admitted=1)))
    text = console.file.getvalue()
    for said in (
        "greedy",
        "wrong_token 3",
        "1 done honestly",
        "1 of 3 slots admitted",
        "0 of 5 slots rejected",
        "33.3%",
    ):
        assert said in text
    assert result().is_sound
    assert not result(succeeded=1).is_sound
    assert result().reward() == 0.5


def test_the_command_lists_attacks_and_refuses_unknown_ones() -> None:
    listed = CliRunner().invoke(redteam, ["--attacks", "help"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in ATTACKS)
    refused = CliRunner().invoke(redteam, ["--attacks", "greedy,nonsense"])
    assert refused.exit_code == 2
    assert "nonsense" in refused.output
