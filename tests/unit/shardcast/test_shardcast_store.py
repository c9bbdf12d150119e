"""The chunk store: what a relay serves after any crash must be what the publisher signed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shardcast import wire
from shardcast.errors import CorruptChunk, LocalFault
from shardcast.manifest import SignedManifest, seal_manifest
from shardcast.store import ChunkStore

CHUNK = 4096


def version(publisher: Any, number: int, payload: bytes) -> SignedManifest:
    return seal_manifest(publisher.manifest(payload, version=number), publisher.key)


def fill(store: ChunkStore, signed: SignedManifest, payload: bytes) -> None:
    for index in store.missing(signed.manifest.version):
        store.put(signed.manifest.chunk_digest(index), payload[index * CHUNK : (index + 1) * CHUNK])


def payload_of(seed: int, chunks: int = 3) -> bytes:
    return random.Random(seed).randbytes(chunks * CHUNK)


def opened(folder: Path, publisher: Any, **options: Any) -> ChunkStore:
    return ChunkStore(folder, run_id=publisher.run_id, **options)


def test_a_chunk_is_visible_only_as_what_it_is(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher)
    payload = payload_of(1)
    signed = version(publisher, 1, payload)
    store.add_manifest(signed)
    digest = signed.manifest.chunk_digest(0)
    with pytest.raises(CorruptChunk):
        store.put(digest, b"y" + payload[1:CHUNK])
    assert store.verified_path(digest) is None
    assert store.put(digest, payload[:CHUNK]) is True
    assert store.put(digest, payload[:CHUNK]) is False
    path = store.verified_path(digest)
    assert path is not None
    assert path.read_bytes() == payload[:CHUNK]
    store.close()


def test_a_chunk_nobody_asked_for_is_refused(tmp_path: Path, publisher: Any) -> None:
    """A peer must not fill the disk with valid but useless chunks."""
    store = opened(tmp_path, publisher)
    with pytest.raises(LocalFault) as caught:
        store.put(wire.digest(b"x"), b"x")
    assert caught.value.code == "unwanted"
    store.close()


def test_retention_keeps_the_last_versions_and_shared_chunks(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher, keep=2)
    shared = payload_of(9, 1)
    for number in range(1, 5):
        payload = shared + payload_of(number, 2)
        signed = version(publisher, number, payload)
        store.add_manifest(signed)
        fill(store, signed, payload)
    assert [held.manifest.version for held in store.versions()] == [3, 4]
    assert store.verified_path(wire.digest(shared)) is not None
    assert store.verified_path(wire.digest(payload_of(1, 2)[:CHUNK])) is None
    assert len(list((tmp_path / "chunks").glob("*/*"))) == 5
    assert store.planned_bytes == 5 * CHUNK
    store.close()


def test_keep_none_keeps_everything(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher, keep=None)
    for number in range(1, 12):
        store.add_manifest(version(publisher, number, payload_of(number)))
    assert len(store.versions()) == 11
    store.close()


def test_a_version_older_than_what_is_kept_is_refused(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher, keep=1)
    store.add_manifest(version(publisher, 5, payload_of(5)))
    with pytest.raises(LocalFault) as caught:
        store.add_manifest(version(publisher, 4, payload_of(4)))
    assert caught.value.code == "too_old"
    store.close()


def test_two_manifests_for_one_version_are_refused(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher)
    store.add_manifest(version(publisher, 5, payload_of(5)))
    store.add_manifest(version(publisher, 5, payload_of(5)))
    with pytest.raises(LocalFault) as caught:
        store.add_manifest(version(publisher, 5, payload_of(6)))
    assert caught.value.code == "version_conflict"
    store.close()


def test_quota_evicts_older_versions_and_refuses_what_cannot_fit(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher, keep=9, quota_bytes=8 * CHUNK)
    for number in (1, 2):
        payload = payload_of(number)
        signed = version(publisher, number, payload)
        store.add_manifest(signed)
        fill(store, signed, payload)
    store.add_manifest(version(publisher, 3, payload_of(3, 4)))
    assert [held.manifest.version for held in store.versions()] == [2, 3]
    with pytest.raises(LocalFault) as caught:
        store.add_manifest(version(publisher, 4, payload_of(4, 9)))
    assert caught.value.code == "quota"
    assert [held.manifest.version for held in store.versions()] == [2, 3], "what is held stays held"
    store.close()


def test_quota_holds_for_staged_chunks_too(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher, quota_bytes=2 * CHUNK)
    for seed in (1, 2):
        data = payload_of(seed, 1)
        store.put(wire.digest(data), data, staged=True)
    with pytest.raises(LocalFault) as caught:
        store.put(wire.digest(b"z"), b"z", staged=True)
    assert caught.value.code == "quota"
    store.discard_staged()
    assert store.planned_bytes == 0
    assert list((tmp_path / "chunks").glob("*/*")) == []
    store.close()


def test_a_chunk_of_a_dropped_version_does_not_stay_behind(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher)
    payload = payload_of(1)
    signed = version(publisher, 1, payload)
    store.add_manifest(signed)
    store.drop(1)
    with pytest.raises(LocalFault):
        fill_one = signed.manifest.chunk_digest(0)
        store.put(fill_one, payload[:CHUNK])
    assert store.planned_bytes == 0
    store.close()


def test_recovery_after_a_crash_at_any_point(tmp_path: Path, publisher: Any) -> None:
    """Leftovers of every interrupted step are gone, what was finished is still served."""
    payload = payload_of(1)
    signed = version(publisher, 1, payload)
    store = opened(tmp_path, publisher)
    store.add_manifest(signed)
    fill(store, signed, payload)
    store.close()
    (tmp_path / "incoming" / "half.0").write_bytes(b"half")
    orphan = wire.digest(b"orphan")
    (tmp_path / "chunks" / orphan[:2] / orphan).write_bytes(b"orphan")
    torn, flipped = signed.manifest.chunk_digest(1), signed.manifest.chunk_digest(2)
    (tmp_path / "chunks" / torn[:2] / torn).write_bytes(payload[CHUNK : CHUNK + 10])
    (tmp_path / "chunks" / flipped[:2] / flipped).write_bytes(bytes(CHUNK))
    envelope = (tmp_path / "manifests" / f"{1:016d}").read_bytes()
    (tmp_path / "manifests" / f"{2:016d}").write_bytes(envelope[:100])
    (tmp_path / "manifests" / f"{3:016d}.tmp").write_bytes(envelope)

    store = opened(tmp_path, publisher)
    assert [held.digest for held in store.versions()] == [signed.digest]
    assert list((tmp_path / "incoming").iterdir()) == []
    assert len(list((tmp_path / "manifests").iterdir())) == 1
    assert store.verified_path(orphan) is None
    assert store.verified_path(torn) is None
    assert store.holds(flipped), "contents are hashed when they are first needed, not at the start"
    assert store.verified_path(flipped) is None
    assert store.missing(1) == [1, 2]
    fill(store, signed, payload)
    assert store.missing(1) == []
    store.close()


def test_one_folder_serves_one_process(tmp_path: Path, publisher: Any) -> None:
    """Two relays on one folder would delete each other's temporary files."""
    store = opened(tmp_path, publisher)
    with pytest.raises(LocalFault) as caught:
        opened(tmp_path, publisher)
    assert caught.value.code == "in_use"
    store.close()
    opened(tmp_path, publisher).close()


def test_the_folder_of_another_run_is_refused(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher)
    store.add_manifest(version(publisher, 1, payload_of(1)))
    store.close()
    with pytest.raises(LocalFault) as caught:
        ChunkStore(tmp_path, run_id="00" * 32)
    assert caught.value.code == "wrong_run"
    opened(tmp_path, publisher).close()


def test_equal_chunks_are_stored_once(tmp_path: Path, publisher: Any) -> None:
    payload = bytes(4 * CHUNK)
    signed = version(publisher, 1, payload)
    store = opened(tmp_path, publisher)
    store.add_manifest(signed)
    assert store.missing(1) == [0]
    fill(store, signed, payload)
    assert store.missing(1) == []
    assert store.planned_bytes == CHUNK
    store.close()
