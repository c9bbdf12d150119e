"""`swarmproof coordinator --check` and `doctor` on a model's folder, which is inspected in a process of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from model_folders import edit_json, make_folder, shard_of

from coordinator.run.definition import read_run_file
from coordinator.run.home import create_home
from node.cli import main
from node.doctor.model import check_folder
from node.doctor.policy import read_footprint
from node.doctor.report import Level
from node.errors import ConfigError
from node.keys.identity import create_key


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def check(folder: Path, *arguments: str, new_tokens: int = 48) -> Result:
    """Check the run that begins with `folder`, in the folder around it."""
    around = folder.parent
    (around / "run.toml").write_text(
        f'name = "checked"\n[model]\ninitial = "{folder}"\n[[environments]]\nname = "arithmetic"\n'
        f"[sampling]\nmax_new_tokens = {new_tokens}\n"
    )
    if not (around / "run.key").exists():
        create_key(around / "run.key")
    run = ["--run", around / "run.toml", "--key", around / "run.key", "--uncalibrated"]
    command = ["coordinator", "--check", *run, *arguments]
    return CliRunner(env={"COLUMNS": "500"}).invoke(main, [*map(str, command), "--data", str(around / "run")])


@pytest.mark.system
def test_a_folder_with_which_a_run_can_begin_is_described(folder: Path) -> None:
    """Its chat template was rendered, its end marks counted, and nothing was written."""
    before = sorted(folder.parent.rglob("*"))
    done = check(folder)
    assert done.exit_code == 0, done.output
    assert "is a qwen3 policy of" in done.output
    assert "end marks 1, 7, with a chat template" in done.output
    assert "A trainer in one process takes" in done.output
    assert sorted({*folder.parent.rglob("*")} - {*before}) == [folder.parent / "run.key", folder.parent / "run.toml"]


def test_a_run_that_exists_is_not_asked_for_its_first_policy_again(folder: Path) -> None:
    """Its trainer has long loaded it, and may be on another machine; its rules must be the same."""
    done = check(folder, "--model-elsewhere")
    assert (done.exit_code, "was not looked at" in done.output) == (0, True)
    _, spec = read_run_file(folder.parent / "run.toml")
    key = create_key(folder.parent / "other.key").public_key().public_bytes_raw()
    create_home(folder.parent / "run", public_key=key, spec=spec).database.close()
    shutil.rmtree(folder)
    done = check(folder, "--key", str(folder.parent / "other.key"))
    assert (done.exit_code, "holds this run" in done.output) == (0, True), done.output
    done = check(folder)
    assert (done.exit_code, "holds the run of another key" in done.output) == (2, True), done.output
    done = check(folder, "--key", str(folder.parent / "other.key"), new_tokens=47)
    assert done.exit_code == 2, done.output
    assert "another run.toml: sampling.max_new_tokens is 47 here and 48 in the run." in done.output


@pytest.mark.system
def test_the_doctor_says_the_same_of_a_folder(folder: Path) -> None:
    size = read_footprint(folder)
    assert (size.item_bytes, size.file_bytes, size.max_tokens) == (2, 2 * size.parameters, 512)
    edit_json(folder / "config.json", {"model_type": "cohere"})
    (only,) = check_folder(folder, None)
    assert (only.level, "these are supported: " in only.sentence) == (Level.PROBLEM, True)
    shard_of(folder, "model.norm.weight").unlink()
    with pytest.raises(ConfigError, match="is missing, though"):
        read_footprint(folder)
