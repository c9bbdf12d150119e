"""A run's datasets are in its backup: a run that is restored without them can never start again.

The file is often the only copy of an operator's own data, and its digest is in rules that never change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from actors import PUBLIC_KEY, spec_of
from backups import no_wait
from click.testing import CliRunner
from dataset_files import SALT, environment_of, made

from coordinator.backup.create import back_up
from coordinator.backup.manifest import BackupError
from coordinator.backup.restore import restore
from coordinator.commands.backup import backup
from coordinator.commands.backup import restore as restore_command
from coordinator.run.home import Home, create_home, open_home
from node.datasets.convert import Converted
from node.datasets.format import Dataset


def begin(data: Path, **settings: object) -> tuple[Home, Converted]:
    """A run over a dataset that is in its data folder."""
    dataset = made(data / "datasets", **settings)
    spec = msgspec.structs.replace(spec_of(), environments=(environment_of(dataset),))
    return create_home(data, public_key=PUBLIC_KEY, spec=spec), dataset


def in_backup(folder: Path, dataset: Converted) -> Path:
    return folder / "datasets" / dataset.path.name


def run(command: object, *arguments: object) -> str:
    result = CliRunner().invoke(command, [str(one) for one in arguments], catch_exceptions=False)  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result.output


def test_a_dataset_comes_back_and_the_run_finds_it(tmp_path: Path) -> None:
    home, dataset = begin(tmp_path / "run")
    home.database.close()
    assert json.loads(run(backup, "--data", tmp_path / "run", tmp_path / "backup", "--json"))["datasets_missing"] == 0
    said = run(restore_command, tmp_path / "backup", "--data", tmp_path / "again", "--at-once")
    assert "lacks a dataset" not in said
    again = open_home(tmp_path / "again")
    found = again.datasets[dataset.spec.digest]
    assert found.is_relative_to(tmp_path / "again")
    assert Dataset.open(found, dataset.spec).header == dataset.header
    again.database.close()


def test_answers_that_the_operator_keeps_come_back_for_its_eyes_alone(tmp_path: Path) -> None:
    """They can be made by no command again: a run restored without them could judge nothing."""
    home, dataset = begin(tmp_path / "run", salt=SALT)
    home.database.close()
    assert json.loads(run(backup, "--data", tmp_path / "run", tmp_path / "backup", "--json"))["datasets_missing"] == 0
    run(restore_command, tmp_path / "backup", "--data", tmp_path / "again", "--at-once")
    again = open_home(tmp_path / "again")
    assert (set(again.datasets), len(again.dataset_files)) == ({dataset.spec.digest}, 2)
    found = again.dataset_files[dataset.spec.answers.digest]
    assert found.read_bytes() == dataset.answers.read_bytes()
    assert found.stat().st_mode & 0o777 == 0o600
    again.database.close()


def test_answers_are_for_the_operators_eyes_alone_whatever_mode_their_copies_have(tmp_path: Path) -> None:
    """A copy by hand, or from a medium without modes, is readable for all, and a backup lies where others come by."""
    home, dataset = begin(tmp_path / "run", salt=SALT)
    dataset.answers.chmod(0o644)
    back_up(home, tmp_path / "backup")
    home.database.close()
    kept = tmp_path / "backup" / "datasets" / dataset.answers.name
    assert kept.stat().st_mode & 0o777 == 0o600
    assert in_backup(tmp_path / "backup", dataset).stat().st_mode & 0o777 == 0o644
    kept.chmod(0o644)
    restore(tmp_path / "backup", tmp_path / "again", wait=no_wait)
    assert (tmp_path / "again" / "datasets" / kept.name).stat().st_mode & 0o777 == 0o600


def test_a_later_backup_does_not_copy_it_again(tmp_path: Path) -> None:
    home, dataset = begin(tmp_path / "run")
    back_up(home, tmp_path / "backup")
    before = in_backup(tmp_path / "backup", dataset).stat().st_ino
    back_up(home, tmp_path / "backup", verify=True)
    assert in_backup(tmp_path / "backup", dataset).stat().st_ino == before
    home.database.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(bytes(reversed(path.read_bytes()))),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b" "),
        lambda path: path.unlink(),
    ],
)
def test_a_damaged_one_is_not_restored_and_verify_replaces_it(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    home, dataset = begin(tmp_path / "run")
    back_up(home, tmp_path / "backup")
    damage(in_backup(tmp_path / "backup", dataset))
    with pytest.raises(BackupError):
        restore(tmp_path / "backup", tmp_path / "again", wait=no_wait)
    assert not (tmp_path / "again").exists()
    back_up(home, tmp_path / "backup", verify=True)
    assert restore(tmp_path / "backup", tmp_path / "again", wait=no_wait).lacking == ()
    home.database.close()


def test_one_that_the_data_folder_lacks_is_said_and_taken_by_the_next_backup(tmp_path: Path) -> None:
    """The same for one that has rotted there: what is not the run's dataset is in no backup."""
    home, dataset = begin(tmp_path / "run")
    text = dataset.path.read_bytes()
    dataset.path.chmod(0o600)
    dataset.path.write_bytes(bytes(reversed(text)))
    assert "lacks 1 of the run's datasets" in run(backup, "--data", tmp_path / "run", tmp_path / "backup")
    assert list((tmp_path / "backup" / "datasets").iterdir()) == []
    dataset.path.unlink()
    assert "lacks 1 of the run's datasets" in run(backup, "--data", tmp_path / "run", tmp_path / "backup")
    said = run(restore_command, tmp_path / "backup", "--data", tmp_path / "bare", "--at-once")
    assert f"copy {dataset.path.name} to {tmp_path / 'bare' / 'datasets'}" in said
    dataset.path.write_bytes(text)
    back_up(home, tmp_path / "backup")
    assert restore(tmp_path / "backup", tmp_path / "again", wait=no_wait).lacking == ()
    home.database.close()
