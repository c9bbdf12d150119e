"""The trainer's memory beside its model: `python -m benchmarks.memory [--json]`.

A policy of random weights, in bfloat16, goes from a model's folder to the run's first policy file, and from there into
a trainer of one process and of `--ranks` processes (FSDP2 over gloo), which publish it, train two short steps and
publish again. Memory is what is resident beyond what the same process held after the same way with a tiny policy
(VmHWM, which counts mapped files, too).

- `start_bytes_per_parameter`: from the folder to the loaded model in float32; the model alone is 4;
- `step_bytes_per_parameter`: one process after its steps; weights, gradients and AdamW's state are 16;
  `step_peak_bytes_per_parameter`: at its peak, which has the head's gradient and the activations of one row besides;
- `publish_extra_tensors`: memory beyond the trainer's own while it publishes, in largest tensors (float32), the most of
  any process and dtype;
- `fsdp_rank_peak_over_share`: of the process that takes most, while it loads, over an equal share of the weights and
  the largest layer; `fsdp_step_peak_over_share`: while it trains, over an equal share of weights, gradients and
  AdamW's state, and the largest layer with its gradient;
- `published_differently`: files that are not, byte for byte, what one process publishes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.memory_rank import SPEC, resident, settle
from benchmarks.report import make_parser, report, say
from benchmarks.workload import Size
from coordinator.training.initial import initial_policy
from node.policy.file import load_policy, write_policy
from node.policy.folder import validate_folder
from node.policy.inspection import FirstPolicy
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.skeleton import build_skeleton

RANK = ("-m", "benchmarks.memory_rank")
ROOT = Path(__file__).parents[1]
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1")
RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
TINY = Size("qwen3", 128, 1, 128)
FIRST = "policy-0.safetensors"
SECONDS = 900


@dataclass(frozen=True)
class Ranks:
    """What each process of a trainer held, and what it published."""

    found: list[dict[str, Any]]
    published: dict[str, bytes]

    def most(self, command: str, *, over: str | None = None) -> int:
        """Return the most bytes of any process at the peak of a command, over those `before` it or at the start."""
        return max(
            each["peak"] - (each[over] if over else rank["start"])
            for rank in self.found
            for each in rank["commands"]
            if each["command"].startswith(command)
        )

    def held_after(self, command: str) -> int:
        """Return the most bytes of any process after the last of the commands of this name."""
        return max(
            [each["after"] - rank["start"] for each in rank["commands"] if each["command"].startswith(command)][-1]
            for rank in self.found
        )


def make_folders(folder: Path, size: Size, *, tied: bool) -> FirstPolicy:
    """Write the models' folders `tiny` and `model`, and return what is known of the latter's policy."""
    make_folder(folder / "tiny", TINY, tied=tied)
    make_folder(folder / "model", size, tied=tied)
    return validate_folder(folder / "model")


def make_folder(folder: Path, size: Size, *, tied: bool) -> None:
    """Write a model's folder of random weights in several shards."""
    torch.manual_seed(0)
    config = size.config()
    config.tie_word_embeddings = tied
    model = build_skeleton(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size="50MB")
    make_tokenizer().save_pretrained(folder)


def start(folder: Path, path: Path) -> int:
    """Write the first policy of a run that begins with `folder`, load it, and return the bytes at the peak."""
    spec = msgspec.structs.replace(SPEC, model=msgspec.structs.replace(SPEC.model, initial=str(folder)))
    before = settle()
    write_policy(initial_policy(spec), path, dtype=torch.bfloat16)
    policy = load_policy(path, dtype=torch.float32)
    peak = resident("VmHWM")
    del policy
    return peak - before


def measured_start(folder: Path) -> int:
    """Return the bytes at the peak of a start with `model`, after one with `tiny` has imported everything."""
    torch.set_num_threads(1)
    start(folder / "tiny", folder / "tiny.safetensors")
    return start(folder / "model", folder / "model.safetensors")


def run_ranks(folder: Path, processes: int) -> Ranks:
    """Have a trainer of so many processes work in `folder`, which has the first policies."""
    command = [*LAUNCH, *RENDEZVOUS, "--nproc-per-node", str(processes), *RANK, str(folder)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{processes} processes failed: {done.stderr[-3000:]}")
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(processes)]
    return Ranks(found, {path.name: path.read_bytes() for path in folder.glob("published-*")})


def measure(folder: Path, size: Size, *, ranks: int, tied: bool) -> dict[str, Any]:
    """Measure a policy of `size` in the empty `folder`, and compute the figures."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        policy = pool.submit(make_folders, folder, size, tied=tied).result()
        begun = pool.submit(measured_start, folder).result()
    for state in (folder / "alone", folder / "shared"):
        (state / "warm").mkdir(parents=True)
        (state / "warm" / FIRST).hardlink_to(folder / "tiny.safetensors")
        (state / FIRST).hardlink_to(folder / "model.safetensors")
    alone, shared = run_ranks(folder / "alone", 1), run_ranks(folder / "shared", ranks)
    for name, found in (("alone", alone), ("shared", shared)):
        say(f"{name}: {json.dumps(found.found)}")
    return figures_of(policy, begun, alone, shared, ranks=ranks)


def figures_of(policy: FirstPolicy, begun: int, alone: Ranks, shared: Ranks, *, ranks: int) -> dict[str, Any]:
    """Compute the figures of a policy from what was measured."""
    parameters, layer = policy.parameters, policy.largest_layer
    differ = sum(shared.published[name] != data for name, data in alone.published.items())
    return {
        "parameters": parameters,
        "largest_layer": layer,
        "start_bytes_per_parameter": round(begun / parameters, 3),
        "step_bytes_per_parameter": round(alone.held_after("train") / parameters, 3),
        "step_peak_bytes_per_parameter": round(alone.most("train") / parameters, 3),
        "publish_extra_tensors": round(
            max(each.most("write", over="before") for each in (alone, shared)) / (4 * layer), 3
        ),
        "fsdp_rank_peak_over_share": round(shared.most("restore") / (4 * parameters / ranks + 4 * layer), 3),
        "fsdp_step_peak_over_share": round(shared.most("train") / (16 * parameters / ranks + 8 * layer), 3),
        "published_differently": differ,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--family", default="qwen3")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--untied", action="store_true", help="a head with weights of its own")
    parser.add_argument("--ranks", type=int, default=4, help="processes that share the policy")
    options: argparse.Namespace = parser.parse_args()
    size = Size(options.family, options.hidden, options.layers, options.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), size, ranks=options.ranks, tied=not options.untied)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    report("memory", options, figures, {"options": settings})


if __name__ == "__main__":
    main()
