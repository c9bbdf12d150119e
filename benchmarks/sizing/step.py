"""A GRPO step of a real policy: against the machine's matrix products, and against TRL's on the same batch.

Both sides hold the policy in float32 at the same time and take their steps in turn. The batch is the same: groups
whose completions have random tokens of SHORTEST to `completion` tokens each; half of a group earns 1.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from benchmarks.peers import PeerUnavailable
from benchmarks.report import say
from benchmarks.sizing.machine import matmul_rate, synchronize
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import Execution, score, train_step
from coordinator.training.optimizers import make_optimizer
from coordinator.training.packing import ROW_TOKENS, pack
from coordinator.training.world import World
from node.engines.device import find_device
from node.policy.file import load_policy
from node.policy.skeleton import unique_tensors
from node.protocol.run import RunSpec, parse_run_toml

WORKER: Final = Path(__file__).with_name("trl_step_worker.py")
SHORTEST: Final = 16


@dataclass(frozen=True, slots=True)
class StepTask:
    """A policy file, its run's run.toml, and how often both sides step, where and with how many threads.

    On a GPU both take products in bfloat16 (autocast), and ours packs `row_tokens` into a row.
    """

    policy: Path
    run_toml: str
    prompt: int
    rounds: int
    threads: int
    groups: int = 4
    row_tokens: int = ROW_TOKENS
    device: str = "cpu"

    @property
    def spec(self) -> RunSpec:
        """The rules of the run."""
        return parse_run_toml(self.run_toml)


def batch(task: StepTask, vocabulary: int) -> list[Group]:
    """Draw a step's groups from a fixed seed, with the log-probability of a uniform choice."""
    rng, sampling = random.Random(0), task.spec.sampling

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(vocabulary), k=count))

    groups = []
    for _ in range(task.groups):
        prompt = tokens(task.prompt)
        lengths = [rng.randint(SHORTEST, sampling.max_new_tokens) for _ in range(sampling.group_size)]
        samples = tuple(Sample(prompt, tokens(length), (-10.0,) * length) for length in lengths)
        groups.append(Group(0, tuple(float(at % 2) for at in range(len(samples))), samples))
    return groups


def operations(groups: list[Group], model: Any, task: StepTask) -> tuple[float, float]:
    """Count a step's useful floating point operations of layers and head: forward once, backward twice, none again.

    Layers: 2 for each weight and token of the packed rows, a prompt once. Attention: 4 for each head's channel and pair
    of tokens. Head: 2 for each weight and drawn token.
    """
    scored = [each for group in groups for each in score(group, spec=task.spec, step=0)]
    rows = pack(scored, row_tokens=task.row_tokens)
    config = model.config
    pairs = sum(int((row.positions + 1).sum()) for row in rows)
    attention = 4 * config.num_attention_heads * config.head_dim * pairs * config.num_hidden_layers
    layers = 2 * sum(tensor.numel() for name, tensor in unique_tensors(model).items() if ".layers." in name)
    head = 2 * config.vocab_size * config.hidden_size
    in_layers = layers * sum(row.ids.numel() for row in rows) + attention
    return 3.0 * in_layers, 3.0 * head * sum(len(row.targets) for row in rows)


def measure(task: StepTask, python: Path | None) -> dict[str, Any]:
    """Step in turn with TRL's trainer in the environment of `python`, or alone without; return the figures.

    Raises PeerUnavailable where TRL fails.
    """
    torch.set_num_threads(task.threads)
    spec = task.spec
    policy = load_policy(task.policy, dtype=torch.float32, device=find_device(task.device))
    optimizer = make_optimizer(policy.model, spec.training)
    groups = batch(task, policy.vocabulary)

    autocast = torch.bfloat16 if task.device == "cuda" else None
    execution = Execution(World(device=find_device(task.device)), task.row_tokens, autocast)

    def ours() -> float:
        synchronize(task.device)
        started = time.perf_counter()
        train_step(policy.model, optimizer, groups, spec=spec, step=0, execution=execution)
        synchronize(task.device)
        return time.perf_counter() - started

    dtype = autocast or torch.float32
    rates = {each: matmul_rate(each, device=task.device) for each in {dtype, torch.float32}}
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    with trl_side(task, policy, groups, python) as theirs:
        for turn in range(task.rounds + 1):
            seconds["ours"].append(ours())
            if theirs is not None:
                seconds["trl"].append(theirs.step())
            say(f"step {turn}: {json.dumps({side: taken[-1] for side, taken in seconds.items() if taken})}")
    mine, peer = (taken[1:] for taken in seconds.values())  # the first makes the optimizers' state
    in_layers, in_head = operations(groups, policy.model, task)
    floor = in_layers / rates[dtype] + in_head / rates[torch.float32]  # the head is summed in float32, whatever else is
    return {
        "step_parameters": policy.parameters,
        "step_seconds": statistics.median(mine),
        "step_seconds_trl": statistics.median(peer) if peer else None,
        "step_vs_trl": statistics.median(b / a for a, b in zip(mine, peer, strict=True)) if peer else None,
        "step_tflop": (in_layers + in_head) / 1e12,
        "step_tflop_head": in_head / 1e12,
        **{f"matmul_gflop_per_s_{str(each).removeprefix('torch.')}": rate / 1e9 for each, rate in rates.items()},
        "step_share_of_matmul_peak": floor / statistics.median(mine),
    }


class TrlSide:
    """TRL's GRPOTrainer in a process of its own, which steps when it is told to."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def step(self) -> float:
        """Take one step; return its seconds. Raises PeerUnavailable."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print("step", file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return float(line)

    def _failure(self) -> PeerUnavailable:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return PeerUnavailable(f"TRL failed: {lines[-1] if lines else 'it said nothing'}")


@contextmanager
def trl_side(task: StepTask, policy: Any, groups: list[Group], python: Path | None) -> Iterator[TrlSide | None]:
    """Start TRL on the same policy and batch within the block; None without an interpreter that has it."""
    if python is None:
        yield None
        return
    folder = task.policy.with_name("trl")
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    training = task.spec.training
    described = {
        "model": str(folder),
        "groups": msgspec.to_builtins(groups),
        "max_new_tokens": task.spec.sampling.max_new_tokens,
        "learning_rate": training.learning_rate,
        "clip": [training.clip_epsilon, training.clip_delta, training.gradient_clip],
        "betas": [training.beta1, training.beta2],
        "steps": task.rounds + 1,
        "threads": task.threads,
        "device": task.device,
    }
    (folder / "task.json").write_text(json.dumps(described))
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(task.threads)}
    variables.pop("PYTHONPATH", None)
    log = folder / "trl.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(python), str(WORKER), str(folder / "task.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=variables,
            text=True,
        )
    try:
        yield TrlSide(process, log)
    finally:
        process.kill()
        process.communicate()
