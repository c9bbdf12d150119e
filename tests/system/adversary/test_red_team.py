"""The red team's attacks, one by one, against the real processes of a run: nothing hostile gets through.

Each attack is the very class that `swarmproof redteam` runs. It speaks HTTP with a coordinator, a verifier and an
origin that are processes of their own, and says in its journal what it did; what came of it is in the coordinator's
log.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import insert

from coordinator.lab.processes.journal import STORED, JournalEntry, read_journal, read_nodes
from coordinator.lab.processes.layout import Swarm, free_ports, lay_out
from coordinator.lab.processes.ledger import Ledger
from coordinator.lab.processes.local_http import get_json
from coordinator.lab.processes.supervisor import Command, Supervisor
from coordinator.lab.redteam.attack import Attack, DoorAttack, SlotAttack
from coordinator.lab.redteam.attacks import ATTACKS
from coordinator.lab.redteam.attacks.registrations import Registrations
from coordinator.lab.redteam.attacks.slow_upload import SlowUpload
from coordinator.lab.redteam.attacks.turncoat import Turncoat
from coordinator.lab.redteam.raid import RaidSettings, open_raid
from coordinator.lab.redteam.tally import AttackRow, attack_rows
from coordinator.run.home import open_home
from coordinator.storage import log
from coordinator.storage.schema import steps
from node.protocol.messages import BatchEntry

RUN_TOML = """
name = "red team"

[model]
initial = "random-tiny"

[[environments]]
name = "arithmetic"

[[environments]]
name = "reverse"

[sampling]
group_size = 4
max_new_tokens = 24

[proofs]
sketch_step = 0.001

[batch]
groups_per_step = 64
max_async = 2
lease_seconds = 20.0
rejection_backoff_seconds = 0.1
rejection_backoff_max_seconds = 0.5

[standing]
probation = 2

[limits]
exponent_mismatches = 4.0
mantissa_mean = 0.05
mantissa_median = 0.5
token_margin = 0.00002
rollout_margin_mean = 0.000002
logprob_error = 0.0002
sketch_distance = 1.2

[training]
steps = 4

[broadcast]
"""
START_SECONDS = 120.0
STRIKE_SECONDS = 80.0
VERDICT_SECONDS = 80.0
DOOR = sorted(name for name, attack in ATTACKS.items() if issubclass(attack, DoorAttack))
SLOTS = sorted(name for name, attack in ATTACKS.items() if issubclass(attack, SlotAttack))
ELSEWHERE = {Turncoat.name, "copycat", "stale-policy", "withheld-signal"}
"""Tried by tests of their own; a random policy's groups have no signal, so that one is in the mixture alone."""
ADDRESSES = (f"127.0.1.{number}" for number in count(10))


@pytest.fixture(scope="module")
def swarm(forked_commands: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A run whose only workers are hostile: so many groups are wanted that it never gets to its first step."""
    swarm = lay_out(tmp_path_factory.mktemp("red") / "run", RUN_TOML, honest=0, hostile=(), leaves=1)
    with Supervisor(swarm.folder / "logs", grace_seconds=4.0) as supervisor:
        supervisor.start(swarm.commands)
        deadline = time.monotonic() + START_SECONDS
        while status(swarm).get("head_version", -1) < 0:
            supervisor.poll()
            assert time.monotonic() < deadline, supervisor.log_tail("trainer")
            time.sleep(0.1)
        yield swarm


def status(swarm: Swarm) -> dict:
    return get_json(f"{swarm.coordinator_url}/v1/status", seconds=5.0) or {}


def unfold(
    swarm: Swarm,
    state: Path,
    attack: Attack,
    *,
    until: Callable[[list[JournalEntry]], bool],
    seconds: float = STRIKE_SECONDS,
) -> AttackRow:
    """Strike until the journal says so, and wait for verdicts on all that was stored."""
    settings = RaidSettings(
        coordinator=swarm.coordinator_url, run_id=swarm.run_id, state=state, attacks=(attack,), address=next(ADDRESSES)
    )

    def enough() -> bool:
        return until(list(read_journal(state)))

    async def strike() -> None:
        async with open_raid(settings) as raid, asyncio.timeout(seconds):
            await raid.arrived.wait()
            while not enough():
                if not await attack.strike(raid):
                    await asyncio.sleep(0.1)

    asyncio.run(strike())
    entries = list(read_journal(state))
    (row,) = attack_rows([type(attack)], entries, judged(swarm, entries))
    return row


def judged(swarm: Swarm, entries: list[JournalEntry]) -> Ledger:
    """The log, once it has a verdict on everything that the door has stored."""
    ledger = Ledger(swarm.coordinator_url)
    wanted = {entry.submission for entry in entries if entry.code == STORED}
    deadline = time.monotonic() + VERDICT_SECONDS
    while True:
        ledger.catch_up(status(swarm).get("log_size", 0))
        if wanted <= set(ledger.verdicts):
            return ledger
        assert time.monotonic() < deadline, "no verdict in time"
        time.sleep(0.2)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in DOOR if name not in {Registrations.name, SlowUpload.name}])
def test_what_is_done_at_the_door_is_refused_there(swarm: Swarm, tmp_path: Path, name: str) -> None:
    attack = ATTACKS[name]()
    row = unfold(swarm, tmp_path / "state", attack, until=bool)
    assert row.tries > 0
    assert (row.succeeded, row.unexpected) == (0, ()), row


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_ten_thousand_registrations_from_one_address_are_refused_and_others_are_let_in(
    swarm: Swarm, tmp_path: Path
) -> None:
    row = unfold(swarm, tmp_path / "flood", Registrations(burst=10_000), until=bool)
    assert row.tries == 10_000
    assert (row.succeeded, row.unexpected) == (0, ())
    assert row.stopped["let_in"] <= 300
    neighbour = unfold(swarm, tmp_path / "neighbour", ATTACKS["foreign-lease"](), until=bool)
    assert neighbour.stopped == {"foreign_lease": 2}, "two keys of another address were let in at once"


@pytest.mark.nightly
@pytest.mark.timeout(250)
def test_an_upload_of_a_byte_a_second_takes_no_second_one_and_is_thrown_out(swarm: Swarm, tmp_path: Path) -> None:
    row = unfold(swarm, tmp_path / "state", SlowUpload(), until=bool, seconds=200.0)
    assert row.tries == 2
    assert (row.succeeded, row.unexpected) == (0, ()), row
    assert row.stopped["too_many_requests"] == 1


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in SLOTS if name not in ELSEWHERE])
def test_what_is_done_to_a_slot_is_rejected(swarm: Swarm, tmp_path: Path, name: str) -> None:
    """What is not rejected is what an honest worker would have sent: the journal says so, and the log bears it out."""
    attack = ATTACKS[name]()
    row = unfold(swarm, tmp_path / "state", attack, until=lambda entries: any(entry.hostile for entry in entries))
    assert row.tries > 0
    assert (row.succeeded, row.unexpected) == (0, ()), row


@pytest.mark.timeout(400)
def test_a_copy_of_what_was_admitted_is_known_at_the_door(swarm: Swarm, tmp_path: Path) -> None:
    honest = unfold(swarm, tmp_path / "author", ATTACKS["replay"](), until=bool)
    assert (honest.tries, honest.honest) == (0, 1)
    row = unfold(swarm, tmp_path / "copycat", ATTACKS["copycat"](), until=bool)
    assert (row.tries, row.stopped) == (1, {"duplicate_submission": 1})


@pytest.mark.timeout(400)
def test_a_node_that_worked_well_at_first_is_caught_as_soon_as_it_cheats(swarm: Swarm, tmp_path: Path) -> None:
    row = unfold(
        swarm, tmp_path / "state", Turncoat(), until=lambda entries: sum(entry.hostile for entry in entries) >= 2
    )
    assert row.honest >= 2
    assert (row.succeeded, row.unexpected) == (0, ()), row


@pytest.mark.timeout(400)
def test_a_node_that_is_thrown_out_comes_back_under_another_key_and_gets_no_further(
    swarm: Swarm, tmp_path: Path
) -> None:
    """Identities are free, so nothing may rest on a ban: the attackers of a red team make use of that."""
    state = tmp_path / "state"
    strikes = swarm.spec.standing.ban_after
    row = unfold(swarm, state, ATTACKS["other-model"](), until=lambda entries: len(entries) > strikes)
    assert len(read_nodes(state)) >= 2
    assert (row.succeeded, row.unexpected) == (0, ())
    assert row.stopped["proof_mismatch"] == row.slots > 0


def test_two_histories_under_one_key_are_seen_by_an_auditor(swarm: Swarm, tmp_path: Path) -> None:
    """A second coordinator, with the run's key and a log of its own: both are sound, and both cannot be true."""
    copy, (port,) = tmp_path / "data", free_ports(1)
    shutil.copytree(swarm.folder / "data", copy)
    home = open_home(copy)
    with home.database.write() as connection:  # with the row that an honest start looks for
        log.append(connection, BatchEntry(step=0, submissions=()))
        connection.execute(insert(steps).values(step=0, assigned_at=0.0, reward_mean=0.0, staleness_mean=0.0))
    home.database.close()
    forked = f"http://127.0.0.1:{port}"
    arguments = ("-m", "node.cli", "coordinator", "--no-peer", "--run", str(swarm.folder / "run.toml"))
    own = ("--key", str(swarm.folder / "run.key"), "--data", str(copy), "--host", "127.0.0.1", "--port", str(port))
    with Supervisor(tmp_path / "logs", grace_seconds=4.0) as supervisor:
        supervisor.start([Command("forked", (*arguments, *own))])
        deadline = time.monotonic() + START_SECONDS
        while get_json(f"{forked}/v1/status", seconds=5.0) is None:
            supervisor.poll()
            assert time.monotonic() < deadline, supervisor.log_tail("forked")
            time.sleep(0.1)
        first = audit(forked, swarm, tmp_path)
        second = audit(swarm.coordinator_url, swarm, tmp_path)
    assert [problem["code"] for problem in first["problems"]] != ["log_forked"]
    assert second["exit_code"] == 1
    assert {problem["code"] for problem in second["problems"]} & {"log_forked", "log_shrank"}
    assert len(list((tmp_path / "auditor").glob("evidence-*/*.checkpoint"))) == 2


def audit(url: str, swarm: Swarm, folder: Path) -> dict:
    command = [sys.executable, "-m", "node.cli", "audit", url, "--run-id", swarm.run_id, "--sample", "0", "--json"]
    finished = subprocess.run(
        [*command, "--state", str(folder / "auditor")], stdout=subprocess.PIPE, timeout=150, check=False
    )
    return json.loads(finished.stdout)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_mixture_of_attacks_leaves_a_run_sound(tmp_path: Path) -> None:
    """As a person starts it: hostile processes, a corrupting relay, honest workers, an audit, and a table."""
    rules = tmp_path / "run.toml"
    smaller = RUN_TOML.replace("groups_per_step = 64", "groups_per_step = 8").replace("steps = 4", "steps = 3")
    rules.write_text(smaller.replace("lease_seconds = 20.0", "lease_seconds = 8.0"))
    command = [sys.executable, "-m", "node.cli", "redteam", "--headless", "--json", "--run", str(rules)]
    finished = subprocess.run(
        [*command, "--folder", str(tmp_path / "runs")], capture_output=True, text=True, timeout=390, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    result = json.loads(finished.stdout.splitlines()[-1])
    rows = {row["attack"]: row for row in result["attacks"]}
    assert (result["succeeded"], result["honest_rejected"]) == (0, 0)
    assert result["hostile_slots"] > 0
    assert result["honest_slots"] >= 3 * 8 - 8
    assert result["audit"]["exit_code"] == 0
    assert rows["corrupt-relay"]["tries"] > 0
    # By a relay or by a worker: who comes first depends on who fetches faster.
    assert any("(corrupt_chunk)" in log.read_text() for log in (tmp_path / "runs").glob("*/logs/*.log"))
    assert "got through" in finished.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert not list(folder.rglob("*key*")), "a run's keys are not left behind"
