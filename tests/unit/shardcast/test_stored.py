"""Versions are read out of a folder that another process has in use: an operator must not have to stop the trainer.

What would break for whom: whoever takes a policy out of a run, and gets other bytes than were published.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from broadcast_swarm import contents
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast import Origin, wire
from shardcast.errors import LocalFault
from shardcast.store.folder import StoreFolder
from shardcast.store.reading import StoredVersions

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
RUN = wire.digest(b"stored")


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    """An origin in use, with versions 0 to 3."""
    origin = Origin(tmp_path / "origin", KEY, RUN, chunk_bytes=4096)
    for version in range(4):
        (tmp_path / "file").write_bytes(contents(version))
        origin.publish(tmp_path / "file", version=version)
    yield origin
    origin.close()


def without_results(origin_folder: Path, *versions: int) -> None:
    """Leave of these versions nothing but their deltas, as a store does that keeps few results."""
    for version in versions:
        (found,) = (origin_folder / "versions").glob(f"{version}-*.bin")
        found.unlink()


@pytest.mark.usefixtures("origin")
def test_a_version_is_read_beside_the_process_that_has_the_folder(tmp_path: Path) -> None:
    held = StoredVersions(tmp_path / "origin")
    assert held.versions() == [0, 1, 2, 3]
    for version in range(4):
        held.write(version, tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == contents(version)
        (tmp_path / "out").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "origin"]


@pytest.mark.usefixtures("origin")
def test_a_version_of_which_only_deltas_are_left_is_computed(tmp_path: Path) -> None:
    for delta in (tmp_path / "origin" / "deltas").glob("2-*"):
        assert delta.stat().st_size < 100_000
    without_results(tmp_path / "origin", 1, 2, 3)
    before = sorted((tmp_path / "origin").rglob("*"))
    held = StoredVersions(tmp_path / "origin")
    assert held.versions() == [0, 1, 2, 3]
    held.write(3, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == contents(3)
    assert sorted((tmp_path / "origin").rglob("*")) == before


@pytest.mark.usefixtures("origin")
def test_a_version_without_a_way_to_it_is_not_offered(tmp_path: Path) -> None:
    without_results(tmp_path / "origin", 0, 1)
    held = StoredVersions(tmp_path / "origin")
    assert held.versions() == [2, 3]
    with pytest.raises(LocalFault) as caught:
        held.write(0, tmp_path / "out")
    assert caught.value.code == "not_held"


@pytest.mark.parametrize("folder", ["versions", "deltas"])
@pytest.mark.usefixtures("origin")
def test_damage_on_the_disk_is_no_policy(tmp_path: Path, folder: str) -> None:
    if folder == "deltas":
        without_results(tmp_path / "origin", 1, 2, 3)
    for path in (tmp_path / "origin" / folder).iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(LocalFault) as caught:
        StoredVersions(tmp_path / "origin").write(3, tmp_path / "out")
    assert caught.value.code == "damaged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "origin"]


def test_what_is_no_manifest_is_passed_over(origin: Origin, tmp_path: Path) -> None:
    path = StoreFolder(origin.store.root).manifest(3)
    path.write_bytes(path.read_bytes()[:-7])
    path.with_name("x.tmp").write_bytes(b"half")
    assert StoredVersions(tmp_path / "origin").versions() == [0, 1, 2]
