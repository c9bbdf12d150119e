"""`swarmproof sft` as it is started: killed, on several processes, and before a run.

What would break for whom: an operator whose days of training end with another model because a machine was switched off,
or because another one was added; or whose policy cannot be trained further.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fine_tuning import chat_folder, conversations, job_in, run_job, write_rows
from locations import ROOT
from ports import free_port
from waiting import until

from benchmarks.learning.loop import LearningTask, learn, spec_of
from coordinator.training.checkpoint import checkpoints
from coordinator.training.export import export_file
from coordinator.training.grpo import Execution
from coordinator.training.warm_start import demonstrate_addition
from node.environments.arithmetic import Arithmetic
from node.policy.file import load_policy, save_policy
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.run import EnvironmentSpec

pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("forked_commands")]
SECONDS = 700.0
TORCHRUN = ("torch.distributed.run", "--master-addr", "127.0.0.1", "--rdzv-backend", "c10d")
TORCHRUN += ("--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", "2", "-m")
SETTINGS = ("--epochs", "4", "--batch", "3", "--held-out", "10%", "--learning-rate", "1e-3", "--row-tokens", "64")
SETTINGS += ("--evaluate-every", "10", "--no-tensorboard", "--json")


def command(folder: Path, name: str, *given: str, launcher: tuple[str, ...] = ()) -> list[str]:
    paths = {"model": "model", "data": "rows.jsonl", "to": name}
    named = [each for option, path in paths.items() for each in (f"--{option}", str(folder / path))]
    return [sys.executable, "-m", *launcher, "node.cli", "sft", *named, *given]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def trained(*told: Any, **given: Any) -> dict[str, Any]:
    """What the command says at its end."""
    ended = subprocess.run(
        command(*told, **given), env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def trained_by_torchrun(*told: Any) -> dict[str, Any]:
    return trained(*told, launcher=TORCHRUN)


def trained_by_two(*told: Any) -> dict[str, Any]:
    """What the first of two processes says that have from their environment what torchrun would give them."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    started = [
        subprocess.Popen(command(*told), env=environment() | world | rank, stdout=subprocess.PIPE, text=True)
        for rank in ranks
    ]
    said = [each.communicate(timeout=SECONDS)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0]
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat_folder(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", conversations(40))
    return tmp_path


@pytest.mark.parametrize("chosen", [(), ("--lora", "4")], ids=["all weights", "adapters"])
def test_a_killed_one_goes_on_with_the_same_command_to_the_same_bits(folder: Path, chosen: tuple[str, ...]) -> None:
    settings = (*SETTINGS, *chosen, "--checkpoint-every", "4")
    undisturbed = trained(folder, "undisturbed", *settings)
    given = (folder, "killed", *settings)
    kept = folder / "killed.sft" / "checkpoints"

    def saved() -> int:
        return max((int(path.name[-8:]) for path in checkpoints(kept)), default=0)

    for least in (4, 16):
        with subprocess.Popen(command(*given), env=environment(), stdout=subprocess.DEVNULL) as process:
            until(lambda: saved() >= least, seconds=SECONDS)  # noqa: B023  (called here)
            process.kill()
        assert not (folder / "killed").exists()
    assert trained(*given) == undisturbed | {"to": str(folder / "killed")}
    files = [sorted((folder / name).glob("*.safetensors")) for name in ("undisturbed", "killed")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


@pytest.mark.parametrize(
    ("chosen", "trained_by_both"),
    [((), trained_by_torchrun), (("--lora", "4"), trained_by_two)],
    ids=["all weights", "adapters"],
)
def test_two_processes_make_the_model_of_one(
    folder: Path, chosen: tuple[str, ...], trained_by_both: Callable[..., dict[str, Any]]
) -> None:
    """Whoever adds a GPU must get the same model sooner, and no other one."""
    alone = trained(folder, "alone", *SETTINGS, *chosen)
    shared = trained_by_both(folder, "shared", *SETTINGS, *chosen)
    for curve in ("losses", "held_out_losses"):
        assert shared[curve] == pytest.approx(alone[curve], rel=2e-4, abs=2e-5)
    left, right = (
        load_policy(folder / f"{name}.sft" / "policy.safetensors", dtype=torch.float32).model.parameters()
        for name in ("alone", "shared")
    )
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4)  # of bfloat16


def test_a_faulty_row_ends_all_processes(folder: Path) -> None:
    """Those that wait for the one that reads would hold their GPUs for ever."""
    write_rows(folder / "rows.jsonl", [{"prompt": "1+1"}])
    given = command(folder, "none", *SETTINGS, launcher=TORCHRUN)
    ended = subprocess.run(given, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 1
    assert "line 1: has neither" in ended.stderr
    assert "the first process cannot begin" in ended.stderr


def test_a_run_from_what_it_made_gains(tmp_path: Path) -> None:
    """Fine-tuning is for reinforcement learning to go on from: half of the rows work sums out, half guess."""
    save_policy(MAKERS["tiny"](0), make_tokenizer(), tmp_path / "random.safetensors")
    export_file(tmp_path / "random.safetensors", tmp_path / "model")
    environment_spec, rng, rows = EnvironmentSpec(name="arithmetic", arguments={"digits": 1}), Random(0), []
    for index in range(6000):
        problem = Arithmetic(digits=1).problem(index)
        worked = demonstrate_addition(problem, noise=0.05, rng=rng)
        guess = f"<think></think>{rng.randint(2, 18)}"
        rows.append({"prompt": problem.prompt, "completion": worked if index % 2 else guess})
    write_rows(tmp_path / "rows.jsonl", rows)
    job = job_in(
        tmp_path, execution=Execution(), epochs=1, batch=32, held_out=0.01, learning_rate=3e-3, warmup_steps=20
    )
    tuned = run_job(replace(job, evaluate_every=1000, checkpoint_every=1000))
    assert tuned is not None
    assert tuned.held_out_losses[-1] < 1.0 < tuned.held_out_losses[0]
    task = LearningTask(seed=0, steps=12, environments=(environment_spec,))
    first = job.state / "policy.safetensors"
    rewards = learn(first, task, spec_of(task, max_new_tokens=24, learning_rate=2e-4)).rewards
    assert 0.05 < sum(rewards[:2]) / 2 < 0.8
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1, rewards
