"""The folder of versions: what a node serves after any crash must be what the publisher signed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shardcast.errors import LocalFault
from shardcast.manifest import SignedManifest, seal_manifest
from shardcast.store.versions import Store

CHUNK = 4096
DELTA = b"a delta"


def version(publisher: Any, number: int, data: bytes, **changes: Any) -> SignedManifest:
    return seal_manifest(publisher.manifest(data, version=number, **changes), publisher.key)


def fill(store: Store, signed: SignedManifest, data: bytes) -> None:
    file = store.result(signed)
    for index in file.missing():
        file.write(index, data[index * CHUNK : (index + 1) * CHUNK])
    store.finish(file, signed)


def data_of(seed: int, chunks: int = 3) -> bytes:
    return random.Random(seed).randbytes(chunks * CHUNK)


def opened(folder: Path, publisher: Any, **options: Any) -> Store:
    return Store(folder, run_id=publisher.run_id, **options)


def results(store: Store) -> list[int]:
    return sorted(signed.manifest.version for signed, _ in store.whole_results())


def files(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[0] + path.suffix for path in folder.iterdir())


def test_the_last_results_stay_and_more_of_the_deltas(tmp_path: Path, publisher: Any) -> None:
    """Who is some versions behind catches up by deltas, which weigh a hundredth of a result."""
    store = opened(tmp_path, publisher, keep=2, keep_deltas=3)
    for number in range(1, 6):
        signed = version(publisher, number, data_of(number), deltas=(publisher.delta(DELTA),))
        store.add_manifest(signed)
        delta = store.delta(signed, 0)
        delta.write(0, DELTA)
        store.finish(delta, signed)
        fill(store, signed, data_of(number))
    assert results(store) == [4, 5]
    assert [held.manifest.version for held in store.versions()] == [3, 4, 5]
    assert files(tmp_path / "versions") == ["4.bin", "5.bin"]
    assert files(tmp_path / "deltas") == ["3.delta", "4.delta", "5.delta"]
    assert store.payload(store.versions()[0].manifest.full.digest) is None
    assert store.payload(store.versions()[0].manifest.deltas[0].payload.digest) is not None
    store.close()


def test_the_result_that_was_completed_longest_ago_goes_first(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher, keep=2, keep_deltas=0)
    made = [version(publisher, number, data_of(number)) for number in (1, 2, 3)]
    for number in (2, 1, 3):
        store.add_manifest(made[number - 1])
        fill(store, made[number - 1], data_of(number))
    assert results(store) == [1, 3]
    assert [held.manifest.version for held in store.versions()] == [1, 3]
    store.close()


def test_a_relay_keeps_the_base_of_the_folded_delta_rather_than_the_version_before(
    tmp_path: Path, publisher: Any
) -> None:
    """A newcomer on a slow link must find some version that stays for as long as its download takes."""
    store = opened(tmp_path, publisher, keep=2, keep_base=True)
    for number in range(16, 26):
        base = 16 if number <= 24 else 24
        deltas = () if number == 16 else (publisher.delta(bytes([number]), base_version=base),)
        signed = version(publisher, number, data_of(number), deltas=deltas)
        store.add_manifest(signed)
        fill(store, signed, data_of(number))
        assert results(store) == sorted({number, base})
    store.close()


def test_a_relay_of_versions_without_deltas_keeps_the_last_two(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher, keep=2, keep_base=True)
    for number in (1, 2, 3):
        signed = version(publisher, number, data_of(number))
        store.add_manifest(signed)
        fill(store, signed, data_of(number))
    assert results(store) == [2, 3]
    store.close()


def test_what_is_pinned_stays(tmp_path: Path, publisher: Any) -> None:
    """A base must not be deleted under the delta that is being applied to it."""
    store = opened(tmp_path, publisher, keep=1, keep_deltas=0)
    store.pin(1)
    for number in (1, 2, 3):
        signed = version(publisher, number, data_of(number))
        store.add_manifest(signed)
        fill(store, signed, data_of(number))
    assert results(store) == [1, 3]
    store.unpin(1)
    signed = version(publisher, 4, data_of(4))
    store.add_manifest(signed)
    fill(store, signed, data_of(4))
    assert results(store) == [4]
    store.close()


def test_keep_none_keeps_everything(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher, keep=None, keep_deltas=None)
    for number in range(1, 12):
        signed = version(publisher, number, data_of(number))
        store.add_manifest(signed)
        fill(store, signed, data_of(number))
    assert len(results(store)) == 11
    store.close()


def test_versions_that_never_arrive_do_not_pile_up(tmp_path: Path, publisher: Any) -> None:
    """A relay on a slow link, or one that is shown version after version, must not fill its disk with beginnings."""
    store = opened(tmp_path, publisher, keep=2, keep_deltas=2)
    for number in range(1, 20):
        signed = version(publisher, number, data_of(number))
        store.add_manifest(signed)
        store.result(signed).write(0, data_of(number)[:CHUNK])
    assert len(list((tmp_path / "downloads").glob("*.part"))) == 3
    store.close()


def test_two_manifests_for_one_version_are_refused(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher)
    store.add_manifest(version(publisher, 5, data_of(5)))
    store.add_manifest(version(publisher, 5, data_of(5)))
    with pytest.raises(LocalFault) as caught:
        store.add_manifest(version(publisher, 5, data_of(6)))
    assert caught.value.code == "version_conflict"
    store.close()


def test_quota_evicts_older_versions_and_refuses_what_cannot_fit(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher, keep=9, quota_bytes=8 * CHUNK)
    for number in (1, 2):
        signed = version(publisher, number, data_of(number))
        store.add_manifest(signed)
        fill(store, signed, data_of(number))
    store.add_manifest(version(publisher, 3, data_of(3, 4)))
    assert [held.manifest.version for held in store.versions()] == [2, 3]
    with pytest.raises(LocalFault) as caught:
        store.add_manifest(version(publisher, 4, data_of(4, 9)))
    assert caught.value.code == "quota"
    assert [held.manifest.version for held in store.versions()] == [2, 3], "what is held stays held"
    assert store.planned_bytes == 7 * CHUNK
    store.close()


def test_a_dropped_version_leaves_nothing_behind(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher)
    signed = version(publisher, 1, data_of(1), deltas=(publisher.delta(DELTA),))
    store.add_manifest(signed)
    fill(store, signed, data_of(1))
    file = store.delta(signed, 0)
    store.drop(1)
    file.write(0, DELTA)
    assert store.planned_bytes == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"] == []
    with pytest.raises(LocalFault) as caught:
        store.result(signed)
    assert caught.value.code == "not_held"
    store.close()


def test_recovery_after_a_crash_at_any_point(tmp_path: Path, publisher: Any) -> None:
    """Leftovers of every interrupted step are gone, what was finished is still served."""
    data = data_of(1)
    signed = version(publisher, 1, data)
    begun = version(publisher, 2, data_of(2))
    store = opened(tmp_path, publisher)
    store.add_manifest(signed)
    fill(store, signed, data)
    store.add_manifest(begun)
    store.result(begun).write(1, data_of(2)[CHUNK : 2 * CHUNK])
    store.close()
    (tmp_path / "incoming" / "result").write_bytes(b"half")
    (tmp_path / "versions" / "9-00.bin").write_bytes(b"orphan")
    (tmp_path / "downloads" / "9-00.bin.part").write_bytes(b"orphan")
    envelope = (tmp_path / "manifests" / f"{1:016d}").read_bytes()
    (tmp_path / "manifests" / f"{3:016d}").write_bytes(envelope[:100])
    (tmp_path / "manifests" / f"{4:016d}.tmp").write_bytes(envelope)

    store = opened(tmp_path, publisher)
    assert [held.digest for held in store.versions()] == [signed.digest, begun.digest]
    assert list((tmp_path / "incoming").iterdir()) == []
    assert len(list((tmp_path / "manifests").iterdir())) == 2
    assert files(tmp_path / "versions") == ["1.bin"]
    assert results(store) == [1]
    assert store.result(begun).missing() == [0, 2]
    assert not store.is_whole(2)
    fill(store, begun, data_of(2))
    assert results(store) == [1, 2]
    store.close()


def test_the_order_of_use_survives_a_restart(tmp_path: Path, publisher: Any) -> None:
    store = opened(tmp_path, publisher, keep=2, keep_deltas=0)
    made = [version(publisher, number, data_of(number)) for number in (1, 2, 3)]
    for number in (2, 1):
        store.add_manifest(made[number - 1])
        fill(store, made[number - 1], data_of(number))
    store.close()
    store = opened(tmp_path, publisher, keep=2, keep_deltas=0)
    store.add_manifest(made[2])
    fill(store, made[2], data_of(3))
    assert results(store) == [1, 3]
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
    store.add_manifest(version(publisher, 1, data_of(1)))
    store.close()
    with pytest.raises(LocalFault) as caught:
        Store(tmp_path, run_id="00" * 32)
    assert caught.value.code == "wrong_run"
    opened(tmp_path, publisher).close()
