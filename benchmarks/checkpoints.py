"""What training waits for checkpoints and publications: `python -m benchmarks.checkpoints [--json]`.

A policy of random weights, some 40 million parameters, is trained with the trainer's own parts: packed steps, a
checkpoint of each, and its file published by an origin, deltas included. Steps alternate between these, both in
threads beside the next step (as the trainer does it), and neither.

- `checkpoint_stall_share`: what the optimizer's step waited for the checkpoint before it, over the median step;
- `publish_stall_share`: what was waited for the publication before, and for writing the policy's file, over that;
- `step_seconds`, `step_seconds_beside`: the median step without either, and with both beside it, stalls apart;
- `checkpoint_seconds`, `publish_seconds`: each alone, while nothing trains;
- `checkpoint_extra_bytes_per_parameter`: resident memory at its peak while a checkpoint is written, beyond that before.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.report import make_parser, report, say
from benchmarks.step import make_groups
from benchmarks.workload import Size, save_random_policy
from coordinator.training.background import Background
from coordinator.training.distributed_learner import Team
from coordinator.training.grpo import Execution
from node.protocol.run import EnvironmentSpec, RunSpec, SamplingSpec, TrainingSpec, run_id_of
from shardcast import Origin


class Bench:
    """A learner with its checkpoints and its origin."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        key = Ed25519PrivateKey.generate()
        self.origin = Origin(folder / "origin", key, run_id_of(key.public_key().public_bytes_raw()))
        self.publisher = Background("publishing")
        self.team = Team(folder, Execution(row_tokens=options.row_tokens))
        self.groups, self.file = make_groups(options), folder / "policy.safetensors"
        size = Size("llama", options.hidden, options.layers, options.vocabulary)
        save_random_policy(self.team.first_policy, size, dtype=torch.float32)
        sampling = SamplingSpec(max_prompt_tokens=options.prompt, max_new_tokens=options.completion)
        self.team.restore(
            RunSpec(
                name="checkpoints",
                environments=(EnvironmentSpec(name="arithmetic"),),
                sampling=sampling,
                training=TrainingSpec(minibatches=options.minibatches, learning_rate=1e-6),
            )
        )

    def train(self) -> tuple[float, float]:
        """Train a step; return its seconds without what it waited for a checkpoint, and that."""
        started, waited = time.perf_counter(), self.team.waited_seconds
        self.team.train(self.groups)
        stalled = self.team.waited_seconds - waited
        return time.perf_counter() - started - stalled, stalled

    def begin(self) -> float:
        """Begin checkpoint and publication of the step, after the publication before; return what was waited for."""
        started = time.perf_counter()
        self.publisher.wait()
        self.team.write_policy(self.file, torch.float32)
        stalled = time.perf_counter() - started
        self.team.save({})
        self.publisher.begin(lambda: self.origin.publish(self.file, version=self.team.learner.step))
        return stalled

    def settle(self) -> None:
        """Wait for both."""
        assert self.team.saving is not None
        self.team.saving.result()
        self.publisher.wait()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train `options.rounds` pairs of steps, and compute the figures."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(Path(folder), options)
        parameters = sum(each.numel() for each in bench.team.learner.model.parameters())
        say(f"{parameters / 1e6:.1f} M parameters")
        bench.train()  # makes the optimizer's state
        bench.begin()
        bench.settle()
        alone, beside, saved, published = list[float](), list[float](), list[float](), list[float]()
        for _ in range(options.rounds):
            alone.append(bench.train()[0])
            published.append(bench.begin())
            seconds, stalled = bench.train()
            beside.append(seconds)
            saved.append(stalled)
            started = time.perf_counter()
            bench.publisher.wait()
            published[-1] += time.perf_counter() - started
            say(f"step {alone[-1]:.2f} s, beside {seconds:.2f} s, stalls {stalled:.3f} s and {published[-1]:.3f} s")
        step = statistics.median(alone)
        extra, checkpoint_seconds = write_alone(bench)
        started = time.perf_counter()
        bench.begin()
        bench.publisher.wait()
        return {
            "parameters": parameters,
            "step_seconds": round(step, 3),
            "step_seconds_beside": round(statistics.median(beside), 3),
            "checkpoint_stall_share": round(statistics.median(saved) / step, 4),
            "publish_stall_share": round(statistics.median(published) / step, 4),
            "checkpoint_seconds": round(checkpoint_seconds, 3),
            "publish_seconds": round(time.perf_counter() - started, 3),
            "checkpoint_extra_bytes_per_parameter": round(extra / parameters, 3),
        }


def write_alone(bench: Bench) -> tuple[int, float]:
    """Write a checkpoint while nothing trains; return the peak of resident bytes beyond those before, and seconds."""
    process, over = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss
    started = time.perf_counter()
    bench.team.save({})
    assert bench.team.saving is not None
    bench.team.saving.add_done_callback(lambda _: over.set())
    while not over.wait(0.005):
        peak = max(peak, process.memory_info().rss)
    bench.team.saving.result()
    return peak - before, time.perf_counter() - started


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64 (default 512)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--groups", type=int, default=4, help="of 8 completions (default 4)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--completion", type=int, default=128, help="tokens of the longest (default 128)")
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
    report("checkpoints", options, measure(options), {"options": settings})


if __name__ == "__main__":
    main()
