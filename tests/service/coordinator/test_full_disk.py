"""What is left of a write for which the disk had no room.

An operator's disk that gets full would else fill up with halves of blobs, one for each attempt, and a worker that
goes on would find its receipts, the proof of what it is owed, unreadable at its next start.

The kernel cuts a write where the limit on a file's size is, as it does where a disk ends.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from full_disk import room_for
from swarm import Peer, serve, small_spec

from coordinator.run.home import create_home
from coordinator.run.service import Coordinator
from coordinator.storage.folder_blobs import FolderBlobs
from node.protocol.admission import Outcome
from node.protocol.messages import Lease, Receipt
from node.worker.state import WorkerState

ROOM_BYTES = 4096


def test_a_blob_for_which_there_is_no_room_leaves_nothing(tmp_path: Path) -> None:
    blobs, data = FolderBlobs(tmp_path), bytes(3 * ROOM_BYTES)
    with room_for(ROOM_BYTES), pytest.raises(OSError, match="too large"):
        blobs.put(data)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert blobs.get(blobs.put(data), max_bytes=len(data)) == data


def test_blobs_that_are_stored_together_have_names_once_all_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is there for the verdict that names it, and a disk that fails one of them leaves no file of any."""
    blobs, data, sync = FolderBlobs(tmp_path), [b"a", b"b", b"a"], os.fsync
    synced: list[int] = []

    def fails_at_last(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == len(data):
            raise OSError("the disk is full")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_at_last)
    with pytest.raises(OSError, match="full"):
        blobs.put_many(data)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    assert [blobs.get(name, max_bytes=1) for name in blobs.put_many(data)] == data
    assert blobs.put_many([]) == []


def lease(slot: int) -> Lease:
    return Lease(lease_id=f"{slot:064x}", version=0, manifest_digest="ab" * 32, slot=slot, expires_at=1)


def receipt(slot: int) -> Receipt:
    return Receipt(
        run_id="cd" * 32,
        submission=f"{slot:064x}",
        node="ef" * 32,
        version=0,
        slot=slot,
        outcome=Outcome.ADMITTED,
        reason=None,
        detail="",
        tokens=7,
        log_index=slot,
        leaf_hash="01" * 32,
    )


def test_a_receipt_for_which_there_is_no_room_spoils_no_later_one(tmp_path: Path) -> None:
    envelope = bytes(ROOM_BYTES // 2)
    with WorkerState(tmp_path) as state:
        first, second = (state.keep(lease(slot), b"rollouts", tokens=7) for slot in (1, 2))
        first, second = (state.acknowledge(one, receipt(one.lease.slot).submission) for one in (first, second))
        with room_for(ROOM_BYTES // 2), pytest.raises(OSError, match="too large"):
            state.settle(first, receipt(1), envelope)
        state.settle(second, receipt(2), envelope)
    with WorkerState(tmp_path) as state:
        waiting = state.recover()
        assert [one.lease.slot for one in waiting] == [1], "the slot without its receipt is forgotten"
        assert state.tally.admitted == 1
        state.settle(waiting[0], receipt(1), envelope)
    with WorkerState(tmp_path) as state:
        assert (state.recover(), state.tally.admitted) == ([], 2)


def test_a_worker_that_asks_meanwhile_hears_that_it_should_ask_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log gets a line, not a stack trace for each request of each worker."""
    key = Ed25519PrivateKey.generate()
    home = create_home(tmp_path, public_key=key.public_key().public_bytes_raw(), spec=small_spec())
    with serve(Coordinator(home, key=key)) as url:
        peer = Peer(url, home.run_id)
        with room_for(ROOM_BYTES):
            replies = [peer.register() for _ in range(5)]
        assert peer.register().status == 200
    home.database.close()
    assert {(reply.status, reply.code) for reply in replies} == {(503, "unavailable")}
    assert sum("disk, database or object store unavailable" in record.getMessage() for record in caplog.records) == 1
    assert not any(record.exc_info for record in caplog.records)
