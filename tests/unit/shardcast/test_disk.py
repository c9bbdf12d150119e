"""The disk of a store is counted, and an operator hears at the start that it will not do, not when it is full."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcast.store.disk import RoomCheck, disk_use


def test_every_kind_is_counted(tmp_path: Path) -> None:
    for folder, size in (("versions", 1), ("deltas", 20), ("rewinds", 300), ("downloads", 4000), ("incoming", 50000)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_bytes(bytes(size))
    assert disk_use(tmp_path) == {"whole": 1, "deltas": 320, "incoming": 54000}
    assert disk_use(tmp_path / "elsewhere") == {"whole": 0, "deltas": 0, "incoming": 0}


def test_a_quota_that_is_too_small_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check = RoomCheck(tmp_path, versions=3, quota_bytes=5_000_000)
    check.note(1_000_000)
    assert caplog.messages == []
    check.note(2_000_000)
    check.note(2_000_000)
    assert caplog.messages == ["3 whole versions of 0.002 GB take 0.006 GB, but the quota is 0.005 GB: raise it"]


def test_a_disk_that_is_too_small_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RoomCheck(tmp_path, versions=2).note(10**17)
    (message,) = caplog.messages
    assert message.startswith(f"2 whole versions of 1e+08 GB take 2e+08 GB, but the disk of {tmp_path} has room for ")
    assert message.endswith(", or move the folder to a larger one")


def test_a_disk_that_others_fill_is_said_before_it_is_full_and_again_after_it_was_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay keeps two whole policies beside the one that arrives: the third one found a disk full without a word."""
    for folder in ("versions", "deltas"):
        (tmp_path / folder).mkdir()
    with (tmp_path / "deltas" / "kept").open("wb") as sparse:  # no version fits into these
        sparse.truncate(10**9)
    check = RoomCheck(tmp_path, versions=3, quota_bytes=2 * 10**9)
    for held, free in enumerate((3000, 1900, 500, 3000, 500)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free * 10**6))
        with (tmp_path / "versions" / f"{held}").open("wb") as sparse:
            sparse.truncate(min(held, 1) * 10**9)
        check.note(10**9)
        (tmp_path / "versions" / f"{held}").unlink()
    assert "the quota is 2 GB" in caplog.messages[0]
    assert [message.partition("has room for ")[2].partition(",")[0] for message in caplog.messages[1:]] == [
        "2.9 GB: free 0.1 GB",
        "1.5 GB: free 1.5 GB",
    ]


def test_what_is_held_already_counts_as_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "versions").mkdir()
    with (tmp_path / "versions" / "file").open("wb") as sparse:
        sparse.truncate(2**40)
    caplog.set_level(logging.WARNING)
    RoomCheck(tmp_path, versions=2).note(2**39)
    assert caplog.messages == []
