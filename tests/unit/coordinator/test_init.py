"""`swarmproof init`: whoever begins a run has to be led to one that can go on, and must lose nothing on the way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from locations import ROOT

from node.cli import main
from node.keys.identity import load_key
from node.protocol.run import parse_run_toml, run_id_of

ENVIRONMENTS = ("--environment", "arithmetic", "--environment", "reverse")
CONFIG = ROOT / "benchmarks" / "data" / "models" / "Qwen3-4B" / "config.json"


def init(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["init", *arguments])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_written_is_a_run_and_the_next_commands_take_its_files(tmp_path: Path) -> None:
    done = init("--name", 'a "run"', *ENVIRONMENTS, "--model", "random-tiny")
    assert done.exit_code == 0, done.output
    spec = parse_run_toml((tmp_path / "run.toml").read_text())
    assert (spec.name, spec.model.initial) == ('a "run"', "random-tiny")
    assert [one.name for one in spec.environments] == ["arithmetic", "reverse"]
    key = load_key(tmp_path / "run.key").public_key().public_bytes_raw()
    assert f"run id  {run_id_of(key)}" in done.output
    start = "--run run.calibrated.toml --key run.key --data run/"
    assert done.output.splitlines()[-3:] == [
        "  swarmproof calibrate --run run.toml",
        f"  swarmproof coordinator --check {start}",
        f"  swarmproof coordinator {start}",
    ]


def test_nothing_is_overwritten_and_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    for given, said in (
        (("--environment", "none"), "no environment 'none'"),
        (("--name", "x" * 101), "no run can be called"),
        (("--model", "missing/"), "no folder here"),
        (("--model", str(tmp_path)), "--gpus"),
        (("--gpus", "1x80GB"), "needs none"),
    ):
        done = init(*given)
        assert (done.exit_code > 0, said in done.output) == (True, True), done.output
        assert list(tmp_path.iterdir()) == []
    assert init().exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "never replaced" in init("--run", "other.toml").output
    assert "nothing is overwritten" in init("--key", "other.key").output
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_models_folder_gets_the_planned_values(tmp_path: Path) -> None:
    """Its own name and environments, and lengths and leases that its size asks for."""
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(CONFIG, model)
    asked = ("--model", "model", *ENVIRONMENTS)
    done = init(*asked, "--gpus", "4x80GB", "--name", "planned")
    assert done.exit_code == 0, done.output
    spec = parse_run_toml((tmp_path / "run.toml").read_text())
    assert (spec.name, spec.model.initial, spec.sampling.most_tokens) == ("planned", str(model), 4096)
    assert [one.name for one in spec.environments] == ["arithmetic", "reverse"]
    small = init(*asked, "--gpus", "1x8GB", "--run", "small.toml", "--key", "small.key")
    assert (small.exit_code, "does not fit 1 x 8 GB" in small.output) == (1, True), small.output
