"""A worker in front of a run that asks something of new keys, by a coordinator that may lie about it.

What breaks here burns a contributor's machine for a coordinator that says "solve this", or gives an invite away.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec import UNSET, structs

from node.errors import Refused
from node.protocol.membership import MembershipSpec, Puzzle, work_bits, work_seed
from node.protocol.reasons import Reason

SALT = "5a" * 32
EASY = MembershipSpec(policy="work", bits=4, most_bits=8)


def asking(swarm, rules, *, bits=4, seconds=600):
    """Have the coordinator ask for proofs of work; returns what it is sent."""
    coordinator, registrations = swarm.coordinator, []

    def owed(node, registration):
        registrations.append(registration)
        if registration.work is UNSET:
            return Reason.WORK_REQUIRED
        seed = work_seed(run_id=swarm.run_id, node=node, salt=registration.work.salt)
        done = work_bits(seed, registration.work.counter)
        return Reason.WORK_REQUIRED if done < coordinator.puzzle.bits else None

    coordinator.spec = structs.replace(coordinator.spec, membership=rules)
    coordinator.puzzle = Puzzle(salt=SALT, bits=bits, expires_at=int(time.time()) + seconds)
    coordinator.on_registration = owed
    return registrations


async def test_a_price_that_rises_meanwhile_is_paid(swarm):
    registrations = asking(swarm, EASY)
    judge = swarm.coordinator.on_registration

    def dearer(node, registration):
        if registration.work is not UNSET and len(registrations) == 1:
            swarm.coordinator.puzzle = structs.replace(swarm.coordinator.puzzle, bits=8)
        return judge(node, registration)

    swarm.coordinator.on_registration = dearer
    await swarm.work_once()
    assert swarm.node in swarm.coordinator.nodes
    assert [one.work is UNSET for one in registrations[:2]] == [True, False]


async def test_a_coordinator_that_asks_for_more_work_than_the_rules_allow_gets_none(swarm, caplog):
    registrations = asking(swarm, EASY, bits=28)
    async with swarm.working():
        await swarm.until(lambda: "28 bits against the run's rules" in caplog.text)
        assert all(one.work is UNSET for one in registrations)
        swarm.coordinator.puzzle = structs.replace(swarm.coordinator.puzzle, bits=8)
        await swarm.until(lambda: swarm.node in swarm.coordinator.nodes)


async def test_a_run_that_is_open_by_its_rules_gets_no_work(swarm, caplog):
    registrations = asking(swarm, UNSET)
    async with swarm.working():
        await swarm.until(lambda: "against the run's rules" in caplog.text)
    assert all(one.work is UNSET for one in registrations)


async def test_a_worker_that_solves_says_so_and_ends_when_it_is_told_to(swarm):
    """2^28 attempts take minutes: Ctrl-C must not wait for them."""
    asking(swarm, MembershipSpec(policy="work", bits=28, most_bits=28), bits=28)
    async with swarm.working() as (stop, task):
        await swarm.until(lambda: (swarm.state / "status.json").exists() and "28 bits" in swarm.status()["doing"])
        assert swarm.status()["doing"] == "solving a proof of work of 28 bits, to join the run"
        stop.set()
        await asyncio.wait_for(task, 20)


async def test_a_puzzle_whose_time_is_over_is_given_up_for_the_next_one(swarm, caplog):
    caplog.set_level("INFO")
    asking(swarm, MembershipSpec(policy="work", bits=4, most_bits=28), bits=28, seconds=1)
    async with swarm.working():
        await swarm.until(lambda: "asking for the next puzzle" in caplog.text)
        swarm.coordinator.puzzle = Puzzle(salt=SALT, bits=4, expires_at=int(time.time()) + 600)
        await swarm.until(lambda: swarm.node in swarm.coordinator.nodes)


async def test_a_worker_whose_invite_lets_it_in_no_more_ends_and_says_what_to_do(swarm):
    swarm.coordinator.spec = structs.replace(swarm.coordinator.spec, membership=MembershipSpec(policy="invite"))
    swarm.coordinator.on_registration = lambda _node, _registration: Reason.SPENT_INVITE
    with pytest.raises(Refused) as caught:
        await asyncio.wait_for(swarm.work(asyncio.Event(), invite=b"an invite"), 60)
    assert caught.value.code == Reason.SPENT_INVITE
    assert "--invite" in Reason.SPENT_INVITE.todo


async def test_an_invite_is_not_given_away_to_a_run_that_asks_for_none(swarm):
    sent = []
    swarm.coordinator.on_registration = lambda _node, registration: sent.append(registration.invite)
    async with swarm.working(invite=b"an invite"):
        await swarm.until(lambda: sent)
    assert set(sent) == {UNSET}
