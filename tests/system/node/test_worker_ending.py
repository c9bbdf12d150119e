"""How the daemon ends, is killed, and copes with its own machine: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from locations import ROOT

from node.errors import StateError
from node.protocol.admission import Outcome
from node.protocol.messages import Lease, Receipt
from node.worker.state import WorkerState


async def test_a_slot_that_takes_too_long_is_handed_back_at_the_end(swarm):
    generating = asyncio.Event()

    async def never(engine, requests):
        generating.set()
        await asyncio.Event().wait()

    async with swarm.working(produce=never, grace_seconds=0.2) as (stop, task):
        await asyncio.wait_for(generating.wait(), 60)
        stop.set()
        await asyncio.wait_for(task, 60)
    assert swarm.coordinator.returned == list(swarm.coordinator.leases)
    assert swarm.coordinator.submissions == {}


async def test_a_slot_that_is_nearly_done_is_finished_and_submitted_at_the_end(swarm):
    generating = asyncio.Event()

    async def slowly(engine, requests):
        generating.set()
        await asyncio.sleep(0.5)
        return await engine.generate(requests)

    async with swarm.working(produce=slowly, grace_seconds=20) as (stop, task):
        await asyncio.wait_for(generating.wait(), 60)
        stop.set()
        await asyncio.wait_for(task, 60)
    assert len(swarm.coordinator.submissions) == 1
    assert swarm.coordinator.returned == []


async def test_stopping_before_the_run_was_reached_does_not_hang(swarm):
    await swarm.stop()
    async with swarm.working() as (stop, task):
        await asyncio.sleep(0.2)
        stop.set()
        await asyncio.wait_for(task, 60)
    await swarm.start()


def worker_process(swarm):
    command = [sys.executable, "-m", "node.cli", "worker", "--coordinator", swarm.url, "--run-id", swarm.run_id]
    return subprocess.Popen(
        [*command, "--state", str(swarm.state)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


async def ended(process):
    return await asyncio.to_thread(process.communicate, timeout=60)


@pytest.mark.usefixtures("forked_commands")
async def test_kill_9_between_generating_and_the_answer_loses_no_work(swarm):
    coordinator, state = swarm.coordinator, swarm.state
    uploads = []

    async def hold(request, submission):
        uploads.append(await request.read())
        await asyncio.Event().wait()

    coordinator.on_submission, coordinator.most_slots = hold, 1
    first = worker_process(swarm)
    await swarm.until(lambda: uploads, 120)
    first.kill()
    await ended(first)
    coordinator.on_submission = None
    second = worker_process(swarm)
    try:
        await swarm.until(lambda: (state / "receipts.ndjson").exists() and coordinator.submissions, 120)
        second.send_signal(signal.SIGTERM)
        _, errors = await ended(second)
    finally:
        second.kill()
    assert second.returncode == 0, errors
    ((_, lease, body),) = coordinator.submissions.values()
    assert (lease.slot, body) == (0, uploads[0])
    status = swarm.status()
    assert (status["admitted"], status["lost"], status["tokens"]) == (1, 0, 0)
    assert "Traceback" not in errors


def test_a_second_signal_ends_the_process_at_once():
    script = (
        "import asyncio, logging, sys\n"
        "from node.runtime.signals import stop_on_signals\n"
        "async def main():\n"
        "    stop = stop_on_signals()\n"
        "    print('ready', flush=True)\n"
        "    await stop.wait()\n"
        "    print('asked', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        for expected in ("ready\n", "asked\n"):
            assert process.stdout.readline() == expected
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130


# -- this machine


async def test_two_workers_do_not_share_a_state_folder(swarm):
    with WorkerState(swarm.state), pytest.raises(StateError, match="own --state"):
        await swarm.work_once()


async def test_a_state_folder_belongs_to_one_run(swarm):
    with WorkerState(swarm.state) as state:
        state.bind("f" * 64, swarm.spec.digest)
    with pytest.raises(StateError, match="belongs to run"):
        await swarm.work_once()


def test_a_receipt_cut_short_by_a_crash_is_asked_for_again(tmp_path):
    lease = Lease(lease_id="a" * 64, version=0, manifest_digest="b" * 64, slot=1, expires_at=9)
    receipt = Receipt(
        run_id="f" * 64,
        submission="c" * 64,
        node="e" * 64,
        version=0,
        slot=1,
        outcome=Outcome.ADMITTED,
        reason=None,
        detail="",
        tokens=7,
        log_index=1,
        leaf_hash="0" * 64,
    )
    receipts, record = tmp_path / "receipts.ndjson", tmp_path / "pending" / f"{'a' * 64}.json"
    with WorkerState(tmp_path) as state:
        pending = state.acknowledge(state.keep(lease, b"body", tokens=7), "c" * 64)
        waiting = record.read_bytes()
        state.settle(pending, receipt, b"envelope")
    whole = receipts.read_bytes()
    record.write_bytes(waiting)  # killed between keeping the receipt and forgetting the slot
    with WorkerState(tmp_path) as state:
        assert state.recover() == []
        assert state.tally.admitted == 1
    record.write_bytes(waiting)
    for cut in range(0, len(whole), 11):  # killed while writing the receipt
        receipts.write_bytes(whole[:cut])
        with WorkerState(tmp_path) as state:
            assert state.recover() == [pending]
            assert state.tally.admitted == 0
    assert receipts.read_bytes() == b""


def test_a_damaged_record_is_named_and_not_guessed_at(tmp_path):
    with WorkerState(tmp_path):
        pass
    (tmp_path / "pending" / "x.json").write_bytes(b"{}")
    with WorkerState(tmp_path) as state, pytest.raises(StateError, match=r"x\.json is damaged"):
        state.recover()
