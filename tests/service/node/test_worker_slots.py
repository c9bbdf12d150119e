"""Slots under way: the batch that never drains, policies that arrive meanwhile, and engines that fail.

What breaks here costs a contributor the machine's time, or a run its work: slots that nobody hands back, tokens
of a policy that the rules do not allow, a daemon that spins on a broken engine.
"""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec import structs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from node.engines import EngineError
from node.engines.base import BrokenPolicy, DoesNotFit, EngineDied
from node.engines.torch import TorchEngine
from node.environments import EnvironmentFault
from node.errors import EngineFailed
from node.policy.file import save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.submission.reader import read_rollouts
from node.worker import leases as worker_leases


@pytest.fixture
def next_policy(tmp_path):
    """Writes the file of a later version."""

    def write(version):
        path = tmp_path / f"policy-{version}.safetensors"
        save_policy(make_model(seed=30 + version), make_tokenizer(), path)
        return path

    return write


def allow_lead(swarm, lead):
    """A run whose completions may go on under so many later versions."""
    sampling = structs.replace(swarm.spec.sampling, max_version_lead=lead)
    swarm.coordinator.spec = structs.replace(swarm.spec, sampling=sampling)


def segments_of(swarm):
    """Of each submission, the leased version and the versions that its rows name."""
    found = []
    for _, lease, body in swarm.coordinator.submissions.values():
        rows = read_rollouts(body, spec=swarm.coordinator.spec)
        found.append((lease.version, {tuple(row.segment_versions) for row in rows}))
    return found


class Gate:
    """Holds every call of `generate` from the `first` one on until it is opened."""

    def __init__(self, first=1):
        self.first, self.calls, self.under_way, self.most, self.cancelled = first, 0, 0, 0, 0
        self.opened = asyncio.Event()

    async def __call__(self, engine, requests):
        self.calls += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.calls >= self.first:
                await self.opened.wait()
            return await engine.generate(requests)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1


# -- the batch


async def test_a_slot_whose_environment_fails_takes_no_other_along(swarm, caplog):
    """Tokens are forced, so it fails wherever it goes: an engine that began anew for it would end every worker."""
    calls = []

    async def second_fails(engine, requests):
        calls.append(requests)
        if len(calls) == 2:
            raise EnvironmentFault("the environment took more than 30 s", code="environment_slow")
        return await engine.generate(requests)

    async with swarm.working(produce=second_fails, slots=2):
        await swarm.until(lambda: len(swarm.coordinator.submissions) >= 4)
    assert "dropped: the environment took more than 30 s" in caplog.text
    assert "restarting the engine" not in caplog.text
    assert 1 not in {lease.slot for _, lease, _ in swarm.coordinator.submissions.values()}


async def test_new_slots_begin_while_older_ones_go_on(swarm):
    """One long completion must not leave the rest of the batch empty."""
    held, most, under_way, calls = asyncio.Event(), [], [], []

    async def second_is_long(engine, requests):
        number = len(calls)
        calls.append(requests)
        under_way.append(number)
        most.append(len(under_way))
        if number == 1:
            await held.wait()
        rollouts = await engine.generate(requests)
        under_way.remove(number)
        return rollouts

    async with swarm.working(produce=second_is_long, slots=3):
        await swarm.until(lambda: len(swarm.coordinator.submissions) >= 6)
        assert 1 in under_way
        assert max(most) == 3
        held.set()
        await swarm.until(lambda: 1 in {lease.slot for _, lease, _ in swarm.coordinator.submissions.values()})
    assert all(request.slots <= 3 for request in swarm.coordinator.asked)


async def test_completions_that_have_ended_make_room_though_their_slots_are_open(swarm):
    """The last completion of a group may take many times as long as its first; the batch is full meanwhile."""
    gate = Gate(first=2)

    class AllButOneEnd(TorchEngine):
        async def generate(self, requests, *, on_finished=None):
            if gate.calls >= 1:
                for _ in requests[1:]:
                    on_finished()
            return await gate(super(), requests)

    async with swarm.working(make_engine=AllButOneEnd, slots=2):
        await swarm.until(lambda: gate.under_way == 3)
        await asyncio.sleep(0.5)
        assert gate.under_way == 3, "three slots of one completion each are two slots of two"
        gate.opened.set()
        await swarm.until(lambda: len(swarm.coordinator.submissions) >= 4)


async def test_the_status_names_the_slots_under_way(swarm):
    gate = Gate()
    async with swarm.working(produce=gate):
        await swarm.until(lambda: gate.under_way)
        await swarm.until(lambda: swarm.status()["slots"])
        ((slot),) = swarm.status()["slots"]
        assert (slot["version"], slot["slot"]) == (0, 0)
        gate.opened.set()
        await swarm.until(lambda: swarm.status()["tokens_per_s"] > 0)


@pytest.mark.system
async def test_a_slot_whose_lease_ends_is_given_up_and_the_next_goes_on(swarm, caplog):
    """The GPU must not work for a lease that somebody else has by now."""
    gate = Gate()
    swarm.coordinator.lease_seconds, swarm.coordinator.most_slots = 4, 1
    async with swarm.working(produce=gate):
        await swarm.until(lambda: gate.cancelled == 1)
        gate.opened.set()
        swarm.coordinator.lease_seconds, swarm.coordinator.most_slots = 30, 10**6
        await swarm.until(lambda: swarm.coordinator.submissions)
        await swarm.until(lambda: swarm.status()["expired"] == 1)
    assert "its lease expired" in caplog.text
    assert next(iter(swarm.coordinator.leases)) not in swarm.coordinator.returned
    assert swarm.status()["engine_restarts"] == 0


# -- policies


async def test_without_a_lead_slots_end_under_the_policy_that_they_began_with(swarm, next_policy):
    gate = Gate(first=2)
    async with swarm.working(produce=gate):
        await swarm.until(lambda: gate.under_way == 2)
        digest = swarm.announce(next_policy(1), version=1)
        swarm.lease_newest(digest)
        await swarm.until(lambda: swarm.status()["held_versions"] == [1, 0])
        await asyncio.sleep(0.3)
        assert swarm.status()["version"] == 0
        assert {version for request in swarm.coordinator.asked for version in request.held_versions} == {0}
        gate.opened.set()
        await swarm.until(lambda: any(leased == 1 for leased, _ in segments_of(swarm)))
    assert all(rows == {(leased,)} for leased, rows in segments_of(swarm))
    assert swarm.status()["switches"] == 0


async def test_a_lease_of_the_next_policy_is_not_begun_with_the_one_before(swarm, next_policy):
    """A coordinator that leases what was not offered gets it back, and the work under way goes on."""
    gate = Gate(first=2)
    async with swarm.working(produce=gate, slots=3):
        swarm.coordinator.most_slots = 3
        await swarm.until(lambda: gate.under_way == 2)
        swarm.lease_newest(swarm.announce(next_policy(1), version=1))
        await swarm.until(lambda: swarm.status()["held_versions"] == [1, 0])
        swarm.coordinator.most_slots = 4
        await swarm.until(lambda: swarm.coordinator.returned)
        assert gate.cancelled == 0
        gate.opened.set()
        await swarm.until(lambda: len(swarm.coordinator.submissions) == 3)


async def test_with_a_lead_the_next_policy_takes_over_in_flight_and_the_one_after_waits(swarm, next_policy):
    allow_lead(swarm, 1)
    gate = Gate(first=2)
    async with swarm.working(produce=gate):
        await swarm.until(lambda: gate.under_way == 2)
        swarm.announce(next_policy(1), version=1)
        await swarm.until(lambda: swarm.status()["version"] == 1)
        assert gate.under_way == 2
        swarm.announce(next_policy(2), version=2)
        await swarm.until(lambda: 2 in swarm.status()["held_versions"])
        await asyncio.sleep(0.3)
        assert swarm.status()["version"] == 1, "policy 2 is too far from slots of policy 0"
        swarm.coordinator.most_slots = 0
        gate.opened.set()
        await swarm.until(lambda: swarm.status()["version"] == 2)
        await swarm.until(lambda: len(swarm.coordinator.submissions) >= 3)
    assert sorted(segments_of(swarm), key=str) == sorted([(0, {(0,)}), (0, {(1,)}), (0, {(1,)})], key=str)
    assert swarm.status()["switches"] == 1


async def test_a_policy_that_cannot_be_loaded_is_left_out_and_work_goes_on(swarm, tmp_path, caplog):
    broken = tmp_path / "broken"
    broken.write_bytes(b"\0" * 5000)
    async with swarm.working():
        await swarm.until(lambda: swarm.coordinator.submissions)
        swarm.announce(broken, version=1)
        swarm.coordinator.most_slots = swarm.coordinator.next_slot  # nothing to do, so it is tried
        await swarm.until(lambda: "Policy 1 cannot be loaded here" in caplog.text)
        before = len(swarm.coordinator.submissions)
        swarm.coordinator.most_slots += 100
        await swarm.until(lambda: len(swarm.coordinator.submissions) > before)
        assert swarm.coordinator.asked[-1].held_versions == (0,)
    assert caplog.text.count("Policy 1 cannot be loaded here") == 1
    assert swarm.status()["engine_restarts"] == 0


# -- engines that fail


FAULTS = {
    "out_of_memory": MemoryError(),
    "died": EngineDied("its process was killed"),
    "any": EngineError("something else"),
}


@pytest.mark.parametrize("fault", [*FAULTS, "too_few", "wrong_seeds"])
async def test_a_broken_engine_hands_its_slots_back_and_ends_the_daemon_after_a_few_tries(swarm, fault):
    closed = []

    class Broken(TorchEngine):
        async def generate(self, requests, **_):
            if fault in FAULTS:
                raise FAULTS[fault]
            rollouts = await super().generate(requests)
            return rollouts[:1] if fault == "too_few" else rollouts[::-1]

        async def close(self):
            closed.append(self.version)
            await super().close()

    async with swarm.working(make_engine=Broken) as (_, task):
        with pytest.raises(EngineFailed) as caught:
            await asyncio.wait_for(asyncio.shield(task), 120)
    assert len(str(caught.value).splitlines()) == 1
    assert len(swarm.coordinator.returned) == 5
    assert set(swarm.coordinator.returned) == set(swarm.coordinator.leases)
    assert swarm.coordinator.submissions == {}
    assert [version for version in closed if version is not None] == [0] * 5, "it has to be started anew each time"


async def test_a_policy_that_breaks_at_its_first_slot_is_given_up_and_the_next_one_worked_on(swarm, next_policy):
    """One such publication must not end the daemon of everybody who joined."""
    tried = []

    class Particular(TorchEngine):
        async def generate(self, requests, **options):
            tried.append(self.version)
            if self.version == 0:
                raise BrokenPolicy("the policy's log-probabilities are not finite")
            return await super().generate(requests, **options)

    async with swarm.working(make_engine=Particular) as (_, task):
        await swarm.until(lambda: tried)
        await swarm.until(lambda: swarm.status().get("held_versions") == [])
        assert not task.done()
        swarm.lease_newest(swarm.announce(next_policy(1), version=1))
        await swarm.until(lambda: swarm.coordinator.submissions)
    assert tried.count(0) == 1


async def test_a_policy_whose_tokenizer_fails_at_prompts_is_given_up_and_the_next_one_worked_on(
    swarm, next_policy, tmp_path, caplog
):
    """It loads, and fails before the engine is asked: taken for an engine's fault, it would end every daemon."""
    broken = tmp_path / "broken"
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="nowhere")), pad_token="<pad>", eos_token="<eos>"
    )
    save_policy(make_model(seed=30), tokenizer, broken)
    async with swarm.working() as (_, task):
        await swarm.until(lambda: swarm.coordinator.submissions)
        swarm.lease_newest(swarm.announce(broken, version=1))
        await swarm.until(lambda: "MalformedPolicy" in caplog.text)
        await swarm.until(lambda: swarm.status()["held_versions"] == [0])
        await asyncio.sleep(0.5)
        assert not task.done()
        swarm.lease_newest(swarm.announce(next_policy(2), version=2))
        await swarm.until(lambda: any(lease.version == 2 for _, lease, _ in swarm.coordinator.submissions.values()))
    assert caplog.text.count("MalformedPolicy") == 1


async def test_an_engine_that_never_starts_ends_the_daemon_with_the_reason(swarm):
    class TooSmall(TorchEngine):
        async def load(self, path, *, version):
            raise DoesNotFit("The policy takes 14.2 GiB")

    async with swarm.working(make_engine=TooSmall) as (_, task):
        with pytest.raises(EngineFailed, match=r"14\.2 GiB"):
            await asyncio.wait_for(asyncio.shield(task), 120)
    assert swarm.coordinator.asked == [], "no slot is leased before the engine runs"


async def test_when_the_engine_dies_all_its_slots_go_back_at_once_and_the_next_one_goes_on(swarm):
    calls, started = [], asyncio.Event()

    async def dies_once(engine, requests):
        calls.append(requests)
        if len(calls) == 2:
            await started.wait()
            raise EngineDied("its process was killed")
        if len(calls) == 3:
            started.set()
            await asyncio.Event().wait()
        return await engine.generate(requests)

    async with swarm.working(produce=dies_once):
        await swarm.until(lambda: len(swarm.coordinator.returned) == 2)
        await swarm.until(lambda: len(swarm.coordinator.submissions) >= 4)
        await swarm.until(lambda: swarm.status()["engine_restarts"] == 1)
    leases = swarm.coordinator.leases
    assert {leases[name].slot for name in swarm.coordinator.returned[:2]} == {1, 2}


async def test_failures_with_work_in_between_do_not_add_up(swarm, monkeypatch):
    monkeypatch.setattr("node.worker.daemon.MAX_ENGINE_FAILURES", 2)
    calls = []

    async def every_other(engine, requests):
        calls.append(len(requests))
        if len(calls) % 2 == 0:
            raise RuntimeError("out of memory")
        return await engine.generate(requests)

    async with swarm.working(produce=every_other, slots=1) as (_, task):
        await swarm.until(lambda: len(swarm.coordinator.returned) >= 3)
        assert not task.done()


# -- nothing to do


async def test_the_end_of_the_run_is_said_once(swarm, caplog):
    caplog.set_level(logging.INFO)
    swarm.coordinator.most_slots, swarm.coordinator.head_version = 0, swarm.spec.training.steps
    async with swarm.working():
        await swarm.until(lambda: len(swarm.coordinator.asked) >= 4)
        await swarm.until(lambda: swarm.status()["run_is_over"])
    assert caplog.text.count("the run is over") == 1


@pytest.mark.parametrize(("head", "why"), [(0, "its next steps need"), (3, "no relay has brought it here")])
async def test_a_worker_without_work_says_why(swarm, caplog, monkeypatch, head, why):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(worker_leases, "IDLE_SECONDS", 0.2)
    swarm.coordinator.most_slots, swarm.coordinator.head_version = 0, head
    async with swarm.working():
        await swarm.until(lambda: caplog.text.count("No lease for") == 2)
    assert why in caplog.text
