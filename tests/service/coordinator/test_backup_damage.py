"""A backup whose files are not as they were written, by a bad disk or by somebody: none of it is restored.

An operator restores on a bad day: a backup that is damaged must say so before anything is built on it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from backups import begin, no_wait
from sqlalchemy import inspect

from coordinator.backup.create import back_up
from coordinator.backup.manifest import BackupError, TableFile, read_manifest, table_path, write_manifest
from coordinator.backup.restore import restore
from coordinator.backup.tables import read_rows
from coordinator.storage.database import Database
from shardcast.wire import digest

REPLACE = msgspec.structs.replace
ATTEMPTS = 4


@pytest.fixture
def copy(backed_up: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(backed_up, tmp_path / "backup"))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def flipped(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def longer(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(1 + chance.randrange(40)))


def gone(path: Path, _chance: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flipped, cut, longer, gone])
def test_no_damaged_file_is_restored(copy: Path, tmp_path: Path, damage: Callable[..., None]) -> None:
    """A bit that rotted, or a copy that broke off, in any file of it."""
    chance = random.Random(20)
    for path in files_of(copy):
        whole = path.read_bytes()
        for _ in range(ATTEMPTS if damage is not gone else 1):
            damage(path, chance)
            with pytest.raises(BackupError):
                restore(copy, tmp_path / "run", wait=no_wait)
            path.write_bytes(whole)
    assert not (tmp_path / "run").exists()


def test_verify_replaces_blobs_that_rotted(tmp_path: Path) -> None:
    """Else one bad sector would keep every later backup into that folder from ever being restored."""
    actors, folder = begin(tmp_path / "run"), tmp_path / "backup"
    back_up(actors.home, folder)
    blob = next(path for path in files_of(folder / "blobs"))
    flipped(blob, random.Random(1))
    assert back_up(actors.home, folder).copied.blobs == 0
    with pytest.raises(BackupError, match="damaged"):
        restore(folder, tmp_path / "again", wait=no_wait)
    assert back_up(actors.home, folder, verify=True).copied.blobs == 1
    restore(folder, tmp_path / "again", wait=no_wait)
    actors.home.database.close()


def rewritten(folder: Path, name: str, text: bytes, **changes: object) -> None:
    """What somebody can do who can write to the backup: another table, and a manifest that fits it."""
    manifest = read_manifest(folder)
    path = table_path(folder, manifest.generation, name)
    path.write_bytes(zstandard.compress(text))
    data = path.read_bytes()
    fitting = {"size_bytes": len(data), "digest": digest(data), **changes}
    described = [REPLACE(one, **fitting) if one.name == name else one for one in manifest.tables]
    write_manifest(folder, REPLACE(manifest, tables=tuple(described)))


def rows_of(folder: Path, name: str) -> list[list[Any]]:
    manifest = read_manifest(folder)
    table = next(one for one in manifest.tables if one.name == name)
    return list(read_rows(folder, manifest.generation, table))


def lines(rows: list[list[Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_another_log_than_the_manifests_is_not_restored(copy: Path, tmp_path: Path, postgresql_url: str) -> None:
    """The Merkle root in the manifest can be compared with a signed checkpoint; so it has to be that of the entries."""
    rows = rows_of(copy, "log_entries")
    rows[3][1] = rows[2][1]
    rewritten(copy, "log_entries", lines(rows))
    for url in (None, postgresql_url):
        with pytest.raises(BackupError, match="Merkle root"):
            restore(copy, tmp_path / "run", database_url=url, wait=no_wait)
        assert not (tmp_path / "run").exists()
    database = Database(postgresql_url)
    with database.read() as connection:
        assert inspect(connection).get_table_names() == []
    database.close()


def test_a_log_with_a_gap_is_not_restored(copy: Path, tmp_path: Path) -> None:
    rows = rows_of(copy, "log_entries")
    rows[-1][0] += 1
    rewritten(copy, "log_entries", lines(rows))
    with pytest.raises(BackupError, match="Merkle root"):
        restore(copy, tmp_path / "run", wait=no_wait)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 5000 + b"]" * 5000 + b"\n",
        b'[0,"' + b"A" * 2**25 + b'"]\n',
        b"[0]\n",
        b"[0,0]\n",
        b'["0","AAAA"]\n',
        b'[0,"not base64!"]\n',
        b'[0,{"leaf":1}]\n',
        b'[99999999999999999999999999,"AAAA"]\n',
        b'[0,"AAAA"]',
        b'[0,"\xff"]\n',
        b'[0,"AAAA"]\n' * 10**6,
    ],
    ids=["nested", "huge", "short", "kinds", "text", "base64", "object", "integer", "endless", "utf8", "bomb"],
)
def test_rows_of_somebody_else_are_refused_within_bounds(copy: Path, tmp_path: Path, text: bytes) -> None:
    rewritten(copy, "log_entries", text, rows=1)
    with pytest.raises(BackupError):
        restore(copy, tmp_path / "run", wait=no_wait)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"generation": "../../../../etc"},
        {"format": "swarmproof backup/2"},
        {"run_id": "0" * 64},
        {"revision": "9999"},
        {"tables": ()},
        {"tables": (TableFile(name="../facts", columns=("name",), rows=0, size_bytes=0, digest="0" * 64),)},
        {"tables": (TableFile(name="facts", columns=("na/me",), rows=0, size_bytes=0, digest="0" * 64),)},
    ],
    ids=["folder", "format", "run", "revision", "nothing", "table", "column"],
)
def test_a_manifest_leads_nowhere_else(copy: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    write_manifest(copy, REPLACE(read_manifest(copy), **change))
    with pytest.raises(BackupError):
        restore(copy, tmp_path / "run", wait=no_wait)
    assert not (tmp_path / "run").exists()
