"""Policy files that are read when they are needed, and looked through once."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from node.policy import reading
from node.policy.errors import MalformedPolicy, UnreadablePolicy
from node.policy.file import Blueprint, load_policy
from node.policy.reading import OpenPolicy, blueprint_of, held_file, inspect_once, load_once


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are looked through from now on."""
    paths: list[Path] = []
    inspect = reading.inspect_policy

    def counted(path: Path, **options: Any) -> Blueprint:
        paths.append(path)
        return inspect(path, **options)

    monkeypatch.setattr(reading, "inspect_policy", counted)
    return paths


def test_a_file_is_looked_through_once_whatever_it_is_called(
    tiny_policy_path: Path, tmp_path: Path, inspected: list[Path]
) -> None:
    """The broadcast's file, and the link of it that vLLM reads."""
    path = shutil.copyfile(tiny_policy_path, tmp_path / "7.bin")
    os.link(path, tmp_path / "link")
    assert inspect_once(path) is inspect_once(path) is inspect_once(tmp_path / "link")
    assert inspected == [path]


def test_another_file_under_the_same_name_is_looked_through(
    tiny_policy_path: Path, tmp_path: Path, inspected: list[Path]
) -> None:
    path = shutil.copyfile(tiny_policy_path, tmp_path / "policy")
    inspect_once(path)
    data = bytearray(path.read_bytes())
    data[-4:] = b"\xff\xff\xff\xff"  # not a number
    (tmp_path / "broken").write_bytes(data)
    (tmp_path / "broken").replace(path)
    for _ in range(2):
        with pytest.raises(MalformedPolicy) as caught:
            inspect_once(path)
        assert caught.value.code == "broken_model"
    assert len(inspected) == 3


def test_weights_stay_readable_while_they_are_in_use(tiny_policy_path: Path, tmp_path: Path) -> None:
    """The broadcast client deletes old versions, while work of theirs is being measured."""
    path = shutil.copyfile(tiny_policy_path, tmp_path / "policy")
    file, stored = OpenPolicy(path), load_file(path)
    path.unlink()
    for name, weight in stored.items():
        assert torch.equal(file.read({name: slice(None)}, shape=weight.shape, dtype=torch.float32), weight)
        assert torch.equal(file.read({name: slice(None)}, shape=weight.shape, dtype=torch.bfloat16), weight.bfloat16())


def test_weights_larger_than_a_piece_are_read_whole(tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 1000)
    file = OpenPolicy(tiny_policy_path)
    for name, weight in load_file(tiny_policy_path).items():
        assert torch.equal(file.read({name: slice(None)}, shape=weight.shape, dtype=torch.float32), weight)


def test_a_file_that_has_become_shorter_fails_the_machine_and_not_the_policy(
    tiny_policy_path: Path, tmp_path: Path
) -> None:
    """A worker must not be blamed for a verifier's disk, nor numbers be made up."""
    path = shutil.copyfile(tiny_policy_path, tmp_path / "policy")
    file = OpenPolicy(path)
    os.truncate(path, 200_000)
    with pytest.raises(UnreadablePolicy, match="shorter"):
        for name, weight in load_file(tiny_policy_path).items():
            file.read({name: slice(None)}, shape=weight.shape, dtype=torch.float32)


def test_a_file_that_is_missing_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadablePolicy):
        OpenPolicy(tmp_path / "none")


def test_a_file_is_readable_while_it_is_held_whoever_deletes_it(tiny_policy_path: Path, tmp_path: Path) -> None:
    """Loading tens of gigabytes takes minutes, in which the broadcast client may delete them."""
    path = shutil.copyfile(tiny_policy_path, tmp_path / "7.bin")
    with held_file(path, tmp_path / "reading") as held:
        path.unlink()
        assert load_once(held, dtype=torch.float32).parameters > 0
        with pytest.raises(UnreadablePolicy), held_file(path, tmp_path / "reading"):
            pass
    assert list((tmp_path / "reading").iterdir()) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_file_on_a_disk_without_hard_links_is_read_where_it_is(
    code: int, tiny_policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAT, a network's disk, FUSE: a verifier there would read no policy at all."""

    def link(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    with held_file(tiny_policy_path, tmp_path / "reading") as held:
        assert held == tiny_policy_path
    assert tiny_policy_path.exists()


def test_a_loaded_file_is_looked_through_by_nobody_else(
    tiny_policy_path: Path, tmp_path: Path, inspected: list[Path]
) -> None:
    """Planning, loading and a second look once read every number of a policy for themselves."""
    path = shutil.copyfile(tiny_policy_path, tmp_path / "policy")
    assert blueprint_of(path).parameters > 0
    load_once(path, dtype=torch.float32)
    assert OpenPolicy(path).blueprint is blueprint_of(path) is inspect_once(path)
    assert inspected == []


def test_a_header_that_loads_is_read_piece_by_piece_as_well(tiny_policy_path: Path, tmp_path: Path) -> None:
    """Workers would draw from a policy whose work no verifier could take a second look at."""
    data, stored = tiny_policy_path.read_bytes(), load_file(tiny_policy_path)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name in stored:
        header[name]["quantised"] = False
    text = json.dumps(header).encode()
    path = tmp_path / "policy"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    policy, file = load_policy(path, dtype=torch.float32), OpenPolicy(path)
    assert policy.parameters == file.blueprint.parameters
    for name, weight in stored.items():
        assert torch.equal(file.read({name: slice(None)}, shape=weight.shape, dtype=torch.float32), weight)


def test_rows_of_a_weight_are_read_in_the_order_asked_for(tiny_policy_path: Path) -> None:
    """A second look holds the rows of its own tokens, not an embedding of gigabytes."""
    name = "model.embed_tokens.weight"
    whole = load_file(tiny_policy_path)[name]
    rows = [len(whole) - 1, 0, 7, 7]
    found = OpenPolicy(tiny_policy_path).read_rows(name, rows, dtype=torch.bfloat16)
    assert torch.equal(found, whole[rows].bfloat16())


@pytest.mark.parametrize("row", [-1, 10**9])
def test_a_row_that_a_weight_has_not_is_refused(tiny_policy_path: Path, row: int) -> None:
    """What lies there in the file is another weight."""
    with pytest.raises(IndexError):
        OpenPolicy(tiny_policy_path).read_rows("model.embed_tokens.weight", [0, row], dtype=torch.float32)
