"""What a run's statistics look like to TensorBoard and to W&B.

What would break for whom: an operator who sees a step twice after a restart, whose training ends because a curve could
not be written, or whose database's password goes to somebody else's server.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from coordinator.commands.options import tracker_options
from coordinator.errors import BadConfiguration
from coordinator.training import trackers
from coordinator.training.trackers import NullTracker, Tracker, TrackerSettings, make_tracker, tracker_settings
from node.protocol.run import EnvironmentSpec, RunSpec

SPEC = RunSpec(name="watched", environments=(EnvironmentSpec(name="arithmetic"),))
RUN_ID = "ab" * 32


def watch(state: Path, **settings: object) -> Tracker:
    return make_tracker(TrackerSettings(**settings), run_id=RUN_ID, name=SPEC.name, config=SPEC, state=state)


def records(path: Path) -> list[bytes]:
    """The records of a TFRecord file: length (8 bytes), its checksum (4), the bytes, their checksum (4)."""
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        found.append(data[at + 12 : at + 12 + size])
        at += size + 16
    return found


def shown(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The points of a curve as TensorBoard shows them: a start at a step hides what earlier files have from there."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    points: list[tuple[int, float]] = []
    for path in sorted(folder.iterdir()):
        for record in records(path):
            event = event_pb2.Event.FromString(record)
            if event.HasField("session_log") and event.session_log.status == event_pb2.SessionLog.START:
                points = [point for point in points if point[0] < event.step]
            points += [(event.step, value.simple_value) for value in event.summary.value if value.tag == tag]
    return points


@pytest.fixture
def tensorboard(tmp_path: Path) -> Path:
    pytest.importorskip("tensorboardX")
    return tmp_path / "tensorboard"


def test_every_statistic_of_every_step_is_a_point(tensorboard: Path, tmp_path: Path) -> None:
    watcher = watch(tmp_path, tensorboard=tensorboard)
    for step in range(1, 4):
        watcher.step(step, {"reward": 0.25 * step, "train_seconds": 2.0, "ratio_max": math.inf})
    assert shown(tensorboard, "train/reward") == [(1, 0.25), (2, 0.5), (3, 0.75)], "before it is closed"
    watcher.close()
    assert shown(tensorboard, "time/train_seconds") == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert shown(tensorboard, "train/ratio_max") == [(1, math.inf), (2, math.inf), (3, math.inf)]


def test_a_killed_trainer_leaves_no_step_twice(tensorboard: Path, tmp_path: Path) -> None:
    """It was killed after step 5 was told, and before its checkpoint: it goes on with step 5."""
    killed = watch(tmp_path, tensorboard=tensorboard)
    for step in range(1, 6):
        killed.step(step, {"reward": float(step)})
    resumed = watch(tmp_path, tensorboard=tensorboard)
    for step in (5, 6):
        resumed.step(step, {"reward": 10.0 * step})
    assert shown(tensorboard, "train/reward") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0), (6, 60.0)]
    killed.close()
    resumed.close()


def test_a_trainer_that_goes_back_to_a_checkpoint_leaves_no_step_twice(tensorboard: Path, tmp_path: Path) -> None:
    """As it does, in one process, when the database was away."""
    watcher = watch(tmp_path, tensorboard=tensorboard)
    for step, reward in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0)):
        watcher.step(step, {"reward": reward})
    watcher.close()
    assert shown(tensorboard, "train/reward") == [(1, 1.0), (2, 20.0), (3, 30.0)]


def test_a_curve_that_cannot_be_written_costs_no_step(
    tensorboard: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensorboard.write_text("no folder")
    watcher = watch(tmp_path, tensorboard=tensorboard)
    watcher.step(1, {"reward": 1.0})
    watcher.step(2, {"reward": 2.0})
    assert caplog.text.count("TensorBoard tracker failed at step 1") == 1
    tensorboard.unlink()
    watcher.step(3, {"reward": 3.0})
    watcher.close()
    assert shown(tensorboard, "train/reward") == [(3, 3.0)]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from coordinator.training.trackers import TensorBoard, GuardedTracker

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
watcher = GuardedTracker({"TensorBoard": TensorBoard(Path(sys.argv[1]))})
watcher.step(1, {"reward": 1.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
for step in range(2, 60):
    watcher.step(step, {"reward": 2.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
watcher.step(60, {"reward": 3.0})
watcher.close()
"""


@pytest.mark.system
def test_a_full_disk_stops_the_curves_and_not_the_training(tensorboard: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tensorboard)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.count("File too large") == 1, done.stderr
    assert shown(tensorboard, "train/reward") == [(1, 1.0), (60, 3.0)]
    assert len(list(tensorboard.iterdir())) == 2


# What is chosen.


@click.command()
@tracker_options
def trainer(**options: object) -> None:
    settings = tracker_settings(state=Path("state"), **options)  # type: ignore[arg-type]
    click.echo(json.dumps([settings.tensorboard and str(settings.tensorboard), settings.wandb]))


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ([], ["state/tensorboard", None]),
        (["--tensorboard", "curves"], ["curves", None]),
        (["--no-tensorboard"], [None, None]),
        (["--no-tensorboard", "--wandb", "p"], [None, "p"]),
    ],
)
def test_what_the_options_choose(
    arguments: list[str], chosen: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _name: True)
    result = CliRunner().invoke(trainer, arguments, catch_exceptions=False)
    assert json.loads(result.output) == chosen


def test_both_at_once_are_refused() -> None:
    result = CliRunner().invoke(trainer, ["--no-tensorboard", "--tensorboard", "curves"])
    assert isinstance(result.exception, BadConfiguration)


def test_without_the_writer_one_line_says_so_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _name: None)
    with caplog.at_level(logging.WARNING):
        settings = tracker_settings(state=tmp_path, tensorboard=None, no_tensorboard=False, wandb=None)
    (record,) = caplog.records
    assert "operator" in record.getMessage()
    assert isinstance(make_tracker(settings, run_id=RUN_ID, name=SPEC.name, config=SPEC, state=tmp_path), NullTracker)


@pytest.mark.parametrize("settings", [{"tensorboard": Path("x")}, {"wandb": "p"}], ids=["tensorboard", "wandb"])
def test_who_asks_for_what_is_not_installed_is_told_what_to_install(
    settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _name: None)
    with pytest.raises(BadConfiguration, match="pip install"):
        watch(tmp_path, **settings)


# W&B, without a network.

SECRET, KEY = "postgresql://me:hunter2@host/run", "0123456789" * 4
WANDB = """
import sys
from pathlib import Path
from coordinator.training.trackers import TrackerSettings, make_tracker
from node.protocol.run import EnvironmentSpec, RunSpec

spec = RunSpec(name="watched", environments=(EnvironmentSpec(name="arithmetic"),))
settings = TrackerSettings(wandb="curves")
watcher = make_tracker(settings, run_id="ab" * 32, name=spec.name, config=spec, state=Path(sys.argv[1]))
for step in (1, 2, 3, 2):
    watcher.step(step, {"reward": 0.5 * step, "loss": float("nan")})
watcher.close()
"""


@pytest.mark.system
def test_wandb_works_offline_and_is_told_no_secret(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", WANDB, str(tmp_path / "trainer"), "--database-url", SECRET]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "trainer" / "wandb").glob(f"offline-run-*-{RUN_ID[:32]}/run-*.wandb")
    assert b"train/reward" in kept.read_bytes()
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for secret in (SECRET, "hunter2", KEY):
        assert secret not in done.stdout + done.stderr
        assert not [path for path, data in written.items() if secret.encode() in data]
