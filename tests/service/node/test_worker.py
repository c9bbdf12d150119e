"""The daemon's work: against a coordinator that is honest, one that lies, and one that comes and goes.

What breaks here costs a contributor work or credit, or lets a coordinator make a worker work for a lie.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs
from verifying import InMemory

from node.environments import load_environment
from node.errors import BadReply, StateError
from node.joining import session as joining
from node.joining.session import JoinSettings
from node.policy.file import load_policy
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason
from node.relay.advice import Serving
from node.relay.daemon import RelaySettings, run_relay
from node.submission.reader import read_rollouts
from node.verification.plan import Rules
from node.verification.verify import verify
from node.worker.leases import LeaseClient
from shardcast import Client

OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"\3" * 32)


# -- honest work


async def test_a_leased_slot_becomes_a_submission_that_the_verifier_admits(swarm, tiny_policy_path):
    coordinator = swarm.coordinator
    await swarm.work_once()
    ((node, lease, body),) = coordinator.submissions.values()
    judgement = await verify(
        body,
        version=0,
        manifest_digest=coordinator.manifest_digest,
        slot=lease.slot,
        policies=InMemory({0: load_policy(tiny_policy_path, dtype=torch.float32)}),
        published=[0],
        rules=Rules(swarm.run_id, swarm.spec, [load_environment(spec) for spec in swarm.spec.environments]),
    )
    verdict = judgement.verdict
    assert verdict.outcome is Outcome.ADMITTED, verdict.detail
    assert node == swarm.node
    status = swarm.status()
    assert (status["admitted"], status["rejected"], status["admitted_tokens"]) == (1, 0, 7)
    assert status["tokens"] == verdict.tokens
    assert list((swarm.state / "pending").iterdir()) == []


async def test_generation_does_not_wait_for_receipts_and_more_slots_follow_the_first(swarm):
    swarm.coordinator.receipts_withheld = True
    async with swarm.working():
        await swarm.until(lambda: len(swarm.coordinator.submissions) >= 5)
    assert [request.slots for request in swarm.coordinator.asked[:2]] == [1, 2]
    assert swarm.coordinator.asked[0].held_versions == (0,)


async def test_a_pause_that_ends_while_the_worker_decides_does_not_make_it_wait_for_ever(swarm, monkeypatch):
    reads = itertools.cycle([0.05, 0.0])
    monkeypatch.setattr(LeaseClient, "pause_seconds", property(lambda _: next(reads)))
    async with swarm.working():
        await swarm.until(lambda: swarm.coordinator.submissions, seconds=20)


async def test_credit_survives_restarts_and_is_kept_with_its_proof(swarm):
    state = swarm.state
    await swarm.work_once()
    await swarm.work_once()
    assert swarm.status()["admitted"] == 2
    lines = (state / "receipts.ndjson").read_bytes().splitlines()
    assert len(lines) == 2
    assert all(json.loads(line)["receipt"]["node"] == swarm.node for line in lines)


async def test_a_rejection_is_counted_by_reason_and_comes_with_advice(swarm, caplog):
    swarm.coordinator.outcome, swarm.coordinator.reason = Outcome.REJECTED, Reason.PROOF_MISMATCH
    await swarm.work_once()
    status = swarm.status()
    assert (status["admitted"], status["rejected"]) == (0, 1)
    assert status["reasons"] == {"proof_mismatch": 1}
    assert Reason.PROOF_MISMATCH.meaning in caplog.text
    assert Reason.PROOF_MISMATCH.todo in caplog.text


async def test_another_producer_can_take_the_engines_place(swarm):
    async def constant(engine, requests):
        return [
            structs.replace(rollout, logprobs=[0.0] * len(rollout.completion_ids))
            for rollout in await engine.generate(requests)
        ]

    async with swarm.working(produce=constant):
        await swarm.until(lambda: swarm.coordinator.submissions)
    _, _, body = next(iter(swarm.coordinator.submissions.values()))
    assert all(set(rollout.logprobs) == {0.0} for rollout in read_rollouts(body, spec=swarm.spec))


# -- a coordinator that lies


async def test_attack_a_descriptor_signed_by_another_key_is_refused(swarm):
    swarm.coordinator.key = OTHER_KEY
    with pytest.raises(BadReply, match="--run-id"):
        await swarm.work_once()
    assert swarm.coordinator.nodes == set()


async def test_attack_equivocation_a_lease_of_another_manifest_is_not_worked_on(swarm, caplog):
    swarm.coordinator.manifest_digest = "e" * 64
    async with swarm.working():
        await swarm.until(lambda: swarm.coordinator.returned)
    assert swarm.coordinator.submissions == {}
    assert swarm.status()["tokens"] == 0
    assert "not the one that the run signed" in caplog.text


async def test_attack_a_lease_on_a_candidate_is_not_worked_on_in_a_run_without_pools(swarm, caplog):
    """There a slot has one problem: an operator that may name another picks what the run learns."""
    swarm.coordinator.candidate = 3
    async with swarm.working():
        await swarm.until(lambda: swarm.coordinator.returned)
    assert swarm.coordinator.submissions == {}
    assert swarm.status()["tokens"] == 0
    assert "on a problem that the run's rules do not know" in caplog.text


async def test_attack_a_lease_of_a_policy_that_was_never_verified_is_not_worked_on(swarm):
    swarm.coordinator.version = 7
    async with swarm.working():
        await swarm.until(lambda: swarm.coordinator.returned)
    assert swarm.coordinator.submissions == {}


async def test_attack_rules_that_change_under_the_runs_id_are_refused(swarm):
    await swarm.work_once()
    swarm.coordinator.spec = structs.replace(swarm.spec, seed=1)
    with pytest.raises(StateError) as caught:
        await swarm.work_once()
    assert caught.value.code == "spec_changed"


async def test_attack_a_receipt_that_the_run_did_not_sign_counts_for_nothing(swarm):
    runs_key, swarm.coordinator.receipt_key = swarm.coordinator.receipt_key, OTHER_KEY
    async with swarm.working():
        await swarm.until(lambda: len(swarm.coordinator.submissions) >= 2)
        await asyncio.sleep(0.3)
        swarm.coordinator.receipt_key = runs_key
        await swarm.until(lambda: swarm.status()["admitted"] >= 2)


# -- things that go away


async def test_a_coordinator_that_goes_away_is_waited_for_in_two_lines(swarm, caplog):
    caplog.set_level(logging.INFO)
    async with swarm.working():
        await swarm.until(lambda: swarm.coordinator.submissions)
        await swarm.stop()
        await swarm.until(lambda: "is away" in caplog.text)
        await asyncio.sleep(1.0)
        before = len(swarm.coordinator.submissions)
        await swarm.start()
        await swarm.until(lambda: len(swarm.coordinator.submissions) > before)
        await swarm.until(lambda: "is back after" in caplog.text)
    lines = [record.message for record in caplog.records if record.name.startswith("node.")]
    assert sum("is away" in line for line in lines) == 1
    assert sum("is back after" in line for line in lines) == 1


async def test_a_coordinator_that_starts_later_is_waited_for(swarm):
    await swarm.stop()
    async with swarm.working():
        await asyncio.sleep(0.3)
        await swarm.start()
        await swarm.until(lambda: swarm.coordinator.submissions)


async def test_relays_that_come_later_are_waited_for(swarm):
    swarm.coordinator.relays = ("http://127.0.0.1:9",)
    async with swarm.working():
        await swarm.until(lambda: swarm.coordinator.nodes)
        assert swarm.coordinator.asked == []
        swarm.coordinator.relays = (swarm.origin_url,)
        await swarm.until(lambda: swarm.coordinator.submissions)


async def test_attack_a_poisoned_list_of_relays_does_not_keep_workers_from_the_good_ones(swarm):
    poison = ("http://user:secret@h/", "http://h:0/", "http://[::1", "http://\x1b]0;owned/", "http://h/?x")
    swarm.coordinator.relays = (*poison, swarm.origin_url)
    await swarm.work_once()
    assert swarm.status()["admitted"] == 1


async def test_a_coordinator_that_forgot_the_node_is_told_again(swarm):
    async with swarm.working():
        await swarm.until(lambda: swarm.coordinator.submissions)
        swarm.coordinator.nodes.clear()
        before = len(swarm.coordinator.submissions)
        await swarm.until(lambda: len(swarm.coordinator.submissions) > before + 2)


async def test_a_submission_whose_answer_was_lost_still_gets_its_receipt(swarm):
    coordinator = swarm.coordinator

    async def store_and_hang_up(request, submission):
        lease = coordinator.leases[request.match_info["lease"]]
        coordinator.submissions[submission] = (swarm.node, lease, b"")
        coordinator.on_submission = None
        request.transport.abort()

    coordinator.on_submission = store_and_hang_up
    await swarm.work_once()
    assert swarm.status()["admitted"] == 1
    assert swarm.status()["lost"] == 0


async def test_a_lease_that_ended_is_let_go_and_work_goes_on(swarm):
    async def too_late(request, submission):
        swarm.coordinator.on_submission = None
        return swarm.refusal(409, Reason.EXPIRED_LEASE)

    swarm.coordinator.on_submission = too_late
    async with swarm.working():
        await swarm.until(lambda: swarm.coordinator.submissions)
        await swarm.until(lambda: swarm.status()["lost"] == 1)


# -- relays


async def test_a_relay_announces_itself_and_workers_fetch_through_it(swarm, tmp_path):
    stop = asyncio.Event()
    swarm.coordinator.relays = ()
    settings = RelaySettings(
        join=JoinSettings(run_id=swarm.run_id, coordinators=(swarm.url,)),
        state=tmp_path / "relay",
        host="127.0.0.1",
        port=0,
        upstreams=(swarm.origin_url,),
    )
    relay = asyncio.create_task(run_relay(settings, key=OTHER_KEY, stop=stop))
    await swarm.until(lambda: swarm.coordinator.relays)
    assert swarm.coordinator.relays != (swarm.origin_url,)
    await swarm.work_once()
    assert swarm.status()["admitted"] == 1
    stop.set()
    await asyncio.wait_for(relay, 120)


async def test_attack_rules_that_change_under_a_running_relay_end_it_with_the_reason(swarm, tmp_path, monkeypatch):
    """It would go on serving, else, and hear of no new coordinator any more without a word."""
    monkeypatch.setattr(joining, "REFRESH_SECONDS", 0.2)
    swarm.coordinator.relays = ()
    settings = RelaySettings(
        join=JoinSettings(run_id=swarm.run_id, coordinators=(swarm.url,)),
        state=tmp_path / "relay",
        host="127.0.0.1",
        port=0,
        upstreams=(swarm.origin_url,),
    )
    relay = asyncio.create_task(run_relay(settings, key=OTHER_KEY, stop=asyncio.Event()))
    await swarm.until(lambda: swarm.coordinator.relays)
    swarm.coordinator.spec = structs.replace(swarm.spec, seed=1)
    with pytest.raises(StateError) as caught:
        await asyncio.wait_for(relay, 120)
    assert caught.value.code == "spec_changed"


async def test_a_worker_that_serves_announces_itself_and_passes_policies_on(swarm, tmp_path):
    """Ten thousand workers over a few relays would wait for the relays' links, unless they help each other."""
    async with swarm.working(serving=Serving(host="127.0.0.1", port=0)):
        await swarm.until(lambda: swarm.coordinator.relays != (swarm.origin_url,))
        (url,) = swarm.coordinator.relays
        await swarm.until(lambda: swarm.coordinator.submissions)
        async with Client(
            swarm.run_id, swarm.coordinator.key.public_key().public_bytes_raw(), [url], tmp_path / "other"
        ) as other:
            head = await other.wait_head(timeout_s=60)
            path = await other.fetch(head, timeout_s=60)
        assert path.read_bytes() == next((swarm.state / "shardcast" / "versions").iterdir()).read_bytes()
        await swarm.until(lambda: swarm.status()["broadcast_bytes"]["results"] == path.stat().st_size)
