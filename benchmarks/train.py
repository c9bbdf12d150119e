"""Training against TRL, and trainer utilisation in a swarm: `python -m benchmarks.train [--json] [--only PART]`.

**trl**: the same warm-started tiny policy, problems, rewards, batch and number of updates through TRL's GRPOTrainer and
through ours (the product's engine with its proofs, its rewards and its training step), generation included, alternating
over seeds in one run, with as many threads. `seconds_per_step_vs_trl` is TRL's median step over ours, the worst of the
seeds; `reward_minus_trl` the mean reward of the last ten steps, ours minus theirs, mean over the seeds.

**utilisation**: coordinator, verifier and trainer, whose workers' slots are played back
(`benchmarks.learning.playback`), with `max_async` 0, 1 and 2: the share of the time after the first step in which the
trainer did not wait for groups.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.loop import ENVIRONMENTS, LearningCurve, LearningTask, learn, spec_of
from benchmarks.learning.playback import PlaybackSettings, measure_busy
from benchmarks.peers import FOLDER, PeerUnavailable, environment
from benchmarks.report import make_parser, report, say, usable_cores
from benchmarks.warm_start import add_warm_start, save_warmed_up
from node.environments import load_environment
from node.policy.file import load_policy

TRL = "1.16.0"
WORKER = Path(__file__).parent / "learning" / "trl_worker.py"
LAST = 10
PEER_KEYS = ("seconds_per_step_vs_trl", "reward_minus_trl")
PARTS = ("trl", "utilisation")
PLAYBACK_STEPS, LAYERS, WIDTH = 8, 16, 4096


def trl_python(folder: Path) -> Path:
    """Return the interpreter of an environment that has TRL. Raise PeerUnavailable."""
    version = torch.__version__.partition("+")[0]
    installs = [[f"torch=={version}"], [f"trl=={TRL}"]]
    return environment(f"trl-{TRL}-torch-{version}", installs, folder=folder) / "bin" / "python"


def by_trl(python: Path, first: Path, task: LearningTask, *, threads: int) -> LearningCurve:
    """Train the same task with TRL's trainer."""
    sources = [load_environment(each) for each in ENVIRONMENTS]
    spec = spec_of(task)
    with tempfile.TemporaryDirectory() as folder:
        policy = load_policy(first, dtype=torch.float32)
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        problems = [[sources[which].problem(index) for which, index in task.problems(at)] for at in range(task.steps)]
        described = {
            "model": folder,
            "steps": [[(problem.prompt, problem.data["answer"]) for problem in step] for step in problems],
            "samples": task.samples,
            "max_new_tokens": spec.sampling.max_new_tokens,
            "learning_rate": spec.training.learning_rate,
            "minibatches": spec.training.minibatches,
            "threads": threads,
            "seed": task.seed,
        }
        path = Path(folder) / "task.json"
        path.write_text(json.dumps(described))
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        variables.pop("PYTHONPATH", None)
        ended = subprocess.run(
            [str(python), str(WORKER), str(path)],
            capture_output=True,
            text=True,
            env=variables,
            timeout=3600,
            check=False,
        )
        if ended.returncode:
            raise PeerUnavailable(f"TRL {TRL} failed: {ended.stderr.strip().splitlines()[-1]}")
    found = json.loads(ended.stdout.splitlines()[-1])
    return LearningCurve(rewards=found["rewards"], seconds=found["seconds"])


def beside_trl(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train on both sides from each seed; return the figures, and a row for each seed."""
    if options.no_peer:
        raise PeerUnavailable("not asked for (--no-peer)")
    python = options.trl_python or trl_python(options.peer_folder)
    rows = []
    for seed in range(options.seeds):
        task = LearningTask(seed=seed, steps=options.steps)
        with tempfile.TemporaryDirectory() as folder:
            first = save_warmed_up(Path(folder) / "first.safetensors", options.warm_start, seed=seed)
            sides = {
                "ours": lambda: learn(first, task, spec_of(task), threads=options.threads),  # noqa: B023  (called here)
                "trl": lambda: by_trl(python, first, task, threads=options.threads),  # noqa: B023
            }
            order = ("ours", "trl") if seed % 2 == 0 else ("trl", "ours")
            curves = {side: sides[side]() for side in order}
        rows.append({"seed": seed} | {side: summary(curve) for side, curve in sorted(curves.items())})
        say(f"seed {seed}: {json.dumps(rows[-1])}")
    ratios = [row["trl"]["seconds_per_step"] / row["ours"]["seconds_per_step"] for row in rows]
    differences = [row["ours"]["reward"] - row["trl"]["reward"] for row in rows]
    return {
        "seconds_per_step_vs_trl": round(min(ratios), 2),
        "reward_minus_trl": round(statistics.fmean(differences), 4),
        "seconds_per_step": round(statistics.median(row["ours"]["seconds_per_step"] for row in rows), 4),
        "seconds_per_step_trl": round(statistics.median(row["trl"]["seconds_per_step"] for row in rows), 4),
        "steps": options.steps,
        "seeds": options.seeds,
    }, rows


def summary(curve: LearningCurve) -> dict[str, float]:
    """Return the median step, and the mean rewards of the first and last ten."""
    return {
        "seconds_per_step": round(statistics.median(curve.seconds), 4),
        "reward_before": round(statistics.fmean(curve.rewards[:LAST]), 4),
        "reward": round(statistics.fmean(curve.rewards[-LAST:]), 4),
    }


def utilisation(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure the trainer's share of busy time, by `max_async`."""
    settings = PlaybackSettings(
        options.playback_steps, options.layers, options.width, options.warm_start, threads=usable_cores()
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for lag in (0, 1, 2):
            rows.append(measure_busy(Path(folder) / f"run-{lag}", max_async=lag, settings=settings))
            say(json.dumps(rows[-1]))
    return {f"utilisation_async{row['max_async']}": row["utilisation"] for row in rows}, rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--playback-steps", type=int, default=PLAYBACK_STEPS, help="of each run that is played back")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of its policy: how long a step takes")
    parser.add_argument("--width", type=int, default=WIDTH, help="of its policy's multilayer perceptrons")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on both sides")
    parser.add_argument("--no-peer", action="store_true", help=f"measure without TRL {TRL}")
    parser.add_argument("--trl-python", type=Path, help=f"an interpreter that has TRL {TRL}")
    parser.add_argument("--peer-folder", type=Path, default=FOLDER, help="where to build and keep it (build/peers)")
    add_warm_start(parser)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    notes: dict[str, str] = {}
    if options.only in (None, "trl"):
        try:
            found, rows["trl"] = beside_trl(options)
            figures |= found
        except PeerUnavailable as error:
            figures |= dict.fromkeys(PEER_KEYS)
            notes |= dict.fromkeys(PEER_KEYS, str(error))
    if options.only in (None, "utilisation"):
        found, rows["utilisation"] = utilisation(options)
        figures |= found
    report("train", options, figures, notes, rows=rows)


if __name__ == "__main__":
    main()
