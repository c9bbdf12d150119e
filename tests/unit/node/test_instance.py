"""Which machine a worker says it is: the same after a restart, another one for a copy."""

from __future__ import annotations

import shutil
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from node.errors import StateError
from node.protocol.messages import Registration
from node.worker.instance import MAX_NAME, load_instance
from shardcast.wire import decode, encode


@pytest.fixture
def machine_id(tmp_path: Path) -> Path:
    path = tmp_path / "machine-id"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def test_a_restart_is_the_same_instance(folder: Path, machine_id: Path) -> None:
    first = load_instance(folder, machine_id=machine_id)
    assert load_instance(folder, machine_id=machine_id) == first
    assert len(first.id) == 32
    assert stat.S_IMODE((folder / "instance").stat().st_mode) == 0o600


def test_a_copied_folder_is_another_instance_on_another_machine(
    folder: Path, machine_id: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = load_instance(folder, machine_id=machine_id)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    machine_id.write_text("another\n")
    elsewhere = load_instance(copy, machine_id=machine_id)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    by_name = load_instance(copy, machine_id=machine_id)
    assert len({here.id, elsewhere.id, by_name.id}) == 3
    assert by_name.name == "elsewhere"


def test_another_folder_with_the_same_key_is_another_instance(folder: Path, machine_id: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert load_instance(folder, machine_id=machine_id).id != load_instance(other, machine_id=machine_id).id


def test_a_machine_without_an_id_is_told_by_its_name(folder: Path, tmp_path: Path) -> None:
    assert load_instance(folder, machine_id=tmp_path / "none").name == socket.gethostname()[:MAX_NAME]


@pytest.mark.parametrize("name", ["bad\x1b[2Jname\n", "x" * 1000, "\udcff"])
def test_a_strange_host_name_can_be_sent_and_shown(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    instance = load_instance(folder)
    registration = Registration(software="", engine="", instance=instance.id, name=instance.name)
    assert decode(Registration, encode(registration), max_bytes=2000) == registration
    assert instance.name.isprintable()
    assert len(instance.name) <= 64


def test_the_machine_id_itself_is_not_sent(folder: Path, machine_id: Path) -> None:
    """machine-id(5): it is confidential, and must not be used directly on a network."""
    secret = machine_id.read_text().strip()
    instance = load_instance(folder, machine_id=machine_id)
    assert secret not in msgspec.json.encode([instance.id, instance.name]).decode()


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_damaged_secret_says_what_to_do(folder: Path, content: bytes) -> None:
    (folder / "instance").write_bytes(content)
    with pytest.raises(StateError, match="remove it"):
        load_instance(folder)


def test_a_crash_while_the_secret_is_made_leaves_no_half_of_it(folder: Path) -> None:
    (folder / "instance.tmp").write_bytes(b"half")
    assert load_instance(folder) == load_instance(folder)
    assert not (folder / "instance.tmp").exists()
