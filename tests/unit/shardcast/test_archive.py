"""Old versions of an origin are kept as deltas: an auditor must still get every one, bit for bit, after any crash."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broadcast_swarm import SIZE, contents
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast import DeltaSettings, Origin, wire
from shardcast.store.reading import StoredVersions
from tests.support.waiting import until

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
RUN = wire.digest(b"archive")
FOLDS = DeltaSettings(fold_every=2)
LAST = 13
STAYING = [0, 8, 12, 13]
"""Every eighth, the base of deltas to come, and the newest."""


def opened(folder: Path, **options: Any) -> Origin:
    return Origin(folder / "origin", KEY, RUN, chunk_bytes=4096, deltas=FOLDS, threads=2, **options)


def publish(origin: Origin, folder: Path, *versions: int, content: Callable[[int], bytes] = contents) -> None:
    for version in versions:
        (folder / "file").write_bytes(content(version))
        origin.publish(folder / "file", version=version)


def whole(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[0]) for path in (folder / "origin" / "versions").glob("*.bin"))


def everything_is_there(folder: Path, last: int = LAST) -> None:
    held = StoredVersions(folder / "origin")
    assert held.versions() == list(range(last + 1))
    for version in range(last + 1):
        held.write(version, folder / "out")
        assert (folder / "out").read_bytes() == contents(version)
        (folder / "out").unlink()


def test_old_versions_stay_as_deltas_and_can_all_be_read(tmp_path: Path) -> None:
    origin = opened(tmp_path, keep_whole=1)
    publish(origin, tmp_path, *range(LAST + 1))
    until(lambda: whole(tmp_path) == STAYING)
    everything_is_there(tmp_path)
    origin.close()


def test_the_newest_stay_whole(tmp_path: Path) -> None:
    """Who is a version behind fetches what it began."""
    origin = opened(tmp_path, keep_whole=4)
    publish(origin, tmp_path, *range(8))
    until(lambda: whole(tmp_path) == [0, 4, 5, 6, 7])
    origin.close()


def test_an_origin_that_kept_everything_is_tidied_by_its_next_publication(tmp_path: Path) -> None:
    origin = opened(tmp_path)
    publish(origin, tmp_path, *range(LAST))
    origin.close()
    assert whole(tmp_path) == list(range(LAST))
    origin = opened(tmp_path, keep_whole=1)
    publish(origin, tmp_path, LAST)
    until(lambda: whole(tmp_path) == STAYING)
    everything_is_there(tmp_path)
    origin.close()


def test_a_version_without_deltas_stays_whole(tmp_path: Path) -> None:
    """Another file altogether has no delta that is worth its bytes, and nothing else reproduces it."""
    origin = opened(tmp_path, keep_whole=1)

    def unlike(version: int) -> bytes:
        return random.Random(version).randbytes(SIZE) if version == 3 else contents(version)

    publish(origin, tmp_path, *range(8), content=unlike)
    until(lambda: whole(tmp_path) == [0, 3, 6, 7])
    StoredVersions(tmp_path / "origin").write(3, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == unlike(3)
    origin.close()


@pytest.mark.parametrize("folder", ["deltas", "versions"])
def test_damage_on_the_disk_deletes_nothing(tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture) -> None:
    """A delta that rotted, or its base, does not reproduce a version: the whole file is the last copy of it."""
    origin = opened(tmp_path)
    publish(origin, tmp_path, 0, 1, 2)
    origin.close()
    name = "1-*" if folder == "deltas" else "0-*"
    for path in (tmp_path / "origin" / folder).glob(name):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    origin = opened(tmp_path, keep_whole=1)
    with caplog.at_level(logging.WARNING):
        publish(origin, tmp_path, 3)
        until(lambda: "version 1 stays whole" in caplog.text)
    assert 1 in whole(tmp_path)
    origin.close()


def test_closing_in_the_middle_leaves_whole_files(tmp_path: Path) -> None:
    """A trainer that is told to stop does not wait for a terabyte, and its next start finds everything."""
    origin = opened(tmp_path, keep_whole=1)
    publish(origin, tmp_path, *range(LAST + 1))
    origin.close()
    everything_is_there(tmp_path)
    assert set(whole(tmp_path)) >= set(STAYING)


def test_an_old_version_may_be_published_again(tmp_path: Path) -> None:
    """A trainer that starts from a backup publishes again what it has."""
    origin = opened(tmp_path, keep_whole=1)
    publish(origin, tmp_path, *range(4))
    until(lambda: whole(tmp_path) == [0, 2, 3])
    publish(origin, tmp_path, 1)
    until(lambda: whole(tmp_path) == [0, 2, 3])
    everything_is_there(tmp_path, last=3)
    origin.close()
