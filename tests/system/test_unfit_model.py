"""A folder that is no policy, met by the real programs: what they refuse before anything is signed or published."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from model_folders import edit_json, make_folder, shard_of

from coordinator.run.definition import read_run_file
from coordinator.run.home import create_home
from node.keys.identity import create_key
from node.policy.errors import MalformedPolicy, UnreadablePolicy
from node.policy.inspection import inspect_folder

pytestmark = pytest.mark.usefixtures("forked_commands")


def run_toml(folder: Path) -> Path:
    path = folder.parent / "run.toml"
    path.write_text(f'name = "unfit"\n[model]\ninitial = "{folder}"\n[[environments]]\nname = "arithmetic"\n')
    return path


def swarmproof(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node.cli", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_a_coordinator_begins_no_run_with_a_family_that_would_train_wrongly(tmp_path: Path) -> None:
    """Cohere scales its logits: trained as another model, it learns from ratios that are off from the first step."""
    folder = make_folder(tmp_path / "model")
    edit_json(folder / "config.json", {"model_type": "cohere", "logit_scale": 0.0625})
    create_key(tmp_path / "run.key")
    options = ("--run", run_toml(folder), "--key", tmp_path / "run.key", "--data", tmp_path / "run", "--port", 0)
    done = swarmproof("coordinator", *options, "--no-peer", "--uncalibrated")
    assert done.returncode == 1
    assert "the model_type 'cohere', and these are supported: " in done.stderr
    assert "hint: `swarmproof coordinator --check --run run.toml " in done.stderr
    assert "run id" not in done.stdout
    with closing(sqlite3.connect(tmp_path / "run" / "swarmproof.sqlite3")) as database:
        assert database.execute("select name from sqlite_master").fetchall() == []


def test_a_trainer_publishes_nothing_of_a_folder_that_lost_a_shard(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    _, spec = read_run_file(run_toml(folder))
    key = create_key(tmp_path / "run.key")
    public_key = key.public_key().public_bytes_raw()
    create_home(tmp_path / "run", public_key=public_key, spec=spec).database.close()
    lost = shard_of(folder, "model.norm.weight")
    lost.unlink()
    (tmp_path / "trainer").mkdir()
    options = ("--data", tmp_path / "run", "--key", tmp_path / "run.key", "--state", tmp_path / "trainer", "--port", 0)
    done = swarmproof("trainer", *options, "--no-tensorboard")
    assert done.returncode == 1
    assert f"{lost} is missing, though model.safetensors.index.json names it" in done.stderr
    assert not (tmp_path / "trainer" / "policy-0.safetensors").exists()


def test_a_chat_template_that_asks_for_all_memory_is_refused_and_takes_none(tmp_path: Path) -> None:
    """It is a stranger's program: in this process it would be the coordinator that ends for lack of memory."""
    folder = make_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ 'x' * 10**11 }}")
    with pytest.raises(MalformedPolicy, match="MemoryError") as caught:
        inspect_folder(folder)
    assert caught.value.code == "bad_chat_template"


def test_a_chat_template_that_never_ends_is_given_up_on(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    loops = "".join("{% for i in range(99999) %}" for _ in range(4)) + "x" + "{% endfor %}" * 4
    (folder / "chat_template.jinja").write_text(loops)
    with pytest.raises(UnreadablePolicy, match="within 20 s"):
        inspect_folder(folder, seconds=20)
