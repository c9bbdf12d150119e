"""Reward gain on a run's own datasets, with chat on: `python -m benchmarks.curves [--json] [--plot FILE.svg]`.

From a file of rows to a policy that answers other rows, by the product's parts in one process: `tools.make_dataset`
writes rows and demonstrations, `dataset add`'s converter makes the dataset, `swarmproof sft`'s loop makes the first
policy of the demonstrations, its folder's chat template becomes the run's chat format, the torch engine draws groups as
a worker does, the dataset's grader gives the rewards as a verifier does (`code`: in the sandbox), and the trainer's own
step learns.

The policy has 0.4 million parameters and begins at random. Its warm start is that of `model.initial = "tiny"`: first
worked solutions in which steps are wrong with some probability, then a few of which half guess. None is of a question
that the dataset has. What is measured is what reinforcement learning adds to it.

`before` and `after`: mean reward on held-out rows, `--samples` completions of each, at temperature 1 (`swarmproof
evaluate`). `heldout_gain_...` is the least after - before of all seeds, `..._mean` their mean.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.loop import LearningTask, learn
from benchmarks.learning.picture import draw_curves
from benchmarks.report import make_parser, report, say
from coordinator.run.chat import resolve_chat
from coordinator.sft.recipe import PreparedSft, SftRecipe
from coordinator.sft.run import SftJob, fine_tune
from coordinator.training.evaluation import EvaluationSettings, evaluate_policy
from coordinator.training.grpo import Execution
from coordinator.training.initial import initial_policy
from coordinator.training.supervised import SupervisedStep
from coordinator.training.trackers import NullTracker
from node.datasets.convert import Converted, ConvertSettings, convert
from node.datasets.format import Columns
from node.datasets.sources import read_rows
from node.graders import check_answer
from node.policy.file import write_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.environment_spec import DATASET
from node.protocol.grading import GraderSpec, MathGrader, UnitTestsGrader
from node.protocol.run import (
    EnvironmentSpec,
    ModelSpec,
    ProblemsSpec,
    ProofSpec,
    RunSpec,
    SamplingSpec,
    TrainingSpec,
)
from node.sandbox.root import PYTHON_VERSION
from tools.make_dataset import demonstrations, drawn, write_lines

BATCH, GROUPS, GROUP_SIZE, STEPS = 64, 32, 8, 25
BEGIN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class WarmStage:
    """`steps` of supervised learning on demonstrations of which shares are wrong or guesses."""

    steps: int
    mistakes: float
    guesses: float
    learning_rate: float
    warmup_steps: int


@dataclass(frozen=True, slots=True)
class OwnDataset:
    """A dataset, what of it is held out, and the stages of its warm start."""

    name: str
    grader: GraderSpec
    held_out: float
    stages: tuple[WarmStage, ...]


DATASETS = (
    OwnDataset(
        "math",
        MathGrader(evaluated=True),
        0.1,
        (WarmStage(400, 0.15, 0.0, 3e-3, 20), WarmStage(60, 0.075, 0.5, 5e-4, 1)),
    ),
    OwnDataset(
        "code",
        UnitTestsGrader(python=PYTHON_VERSION),
        0.2,
        (WarmStage(300, 0.12, 0.0, 3e-3, 20), WarmStage(60, 0.06, 0.5, 5e-4, 1)),
    ),
)


class Unwatched:
    """Lets a fine-tuning tell what it does to nobody."""

    def begun(self, prepared: PreparedSft, *, steps: int, done: int) -> None: ...

    def step(self, step: SupervisedStep, *, tokens: int) -> None: ...

    def evaluated(self, step: int, loss: float) -> None: ...


def make_chat_folder(folder: Path, *, seed: int) -> Path:
    """Write the tiny policy with random weights as a chat model, whose tokenizer has the marks of ChatML."""
    model, tokenizer = make_model(seed), make_tokenizer()
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": [BEGIN]})
    tokenizer.chat_template = TEMPLATE
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def warm_up(dataset: OwnDataset, folder: Path, *, seed: int, share: float) -> Path:
    """Fine-tune a fresh model in `folder` on demonstrations, stage by stage; return the last one's folder."""
    others = drawn(dataset.name, seed=0)[1]
    model = make_chat_folder(folder / "model-0", seed=seed)
    for at, stage in enumerate(dataset.stages, 1):
        steps, data = max(1, int(stage.steps * share)), folder / f"demonstrations-{at}.jsonl"
        shares = {"mistakes": stage.mistakes, "guesses": stage.guesses}
        write_lines(data, demonstrations(others, count=BATCH * steps, **shares, seed=1000 * seed + at))
        recipe = SftRecipe(
            held_out=0.0,
            seed=seed,
            batch=BATCH,
            learning_rate=stage.learning_rate,
            warmup_steps=stage.warmup_steps,
            weight_decay=0.01,
        )
        job = SftJob(
            model=model,
            data=data,
            to=folder / f"model-{at}",
            state=folder / f"state-{at}",
            recipe=recipe,
            execution=Execution(),
            evaluate_every=steps,
            checkpoint_every=steps,
        )
        fine_tune(job, tracker=lambda _: NullTracker(), observer=Unwatched(), stop=lambda: False)
        model = job.to
    return model


def make_rows(dataset: OwnDataset, folder: Path) -> Converted:
    """Make the dataset as `swarmproof dataset add` does."""
    source = folder / f"{dataset.name}.jsonl"
    write_lines(source, (problem.row for problem in drawn(dataset.name, seed=0)[0]))
    settings = ConvertSettings(
        name=dataset.name,
        columns=Columns(prompt="question", messages=None, answer="answer"),
        grader=dataset.grader,
        held_out=dataset.held_out,
    )
    made = convert(read_rows(source), settings, to=folder / f"{dataset.name}.dataset", check_answer=check_answer)
    assert not made.skipped
    return made


def spec_of(rows: Converted, model: Path, *, steps: int) -> RunSpec:
    """Return a run as the demonstration's, on one dataset, with the chat format of its first model."""
    problems = ProblemsSpec(count=rows.header.leased)
    spec = RunSpec(
        name="curves",
        environments=(EnvironmentSpec(name=DATASET + rows.header.name, dataset=rows.spec, problems=problems),),
        model=ModelSpec(initial=str(model), dtype="float32"),
        sampling=SamplingSpec(group_size=GROUP_SIZE, max_prompt_tokens=64, max_new_tokens=48, chat="model"),
        proofs=ProofSpec(scheme="sketch/1"),
        training=TrainingSpec(steps=steps, learning_rate=1e-4),
    )
    return resolve_chat(spec)


def run_trial(dataset: OwnDataset, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Warm up, train, and return the row of what was gained on held-out rows."""
    started = time.monotonic()
    rows = make_rows(dataset, folder)
    model = warm_up(dataset, folder, seed=seed, share=options.warm_start)
    spec, files = spec_of(rows, model, steps=options.steps), {rows.spec.digest: rows.path}
    first, last = folder / "first.safetensors", folder / "last.safetensors"
    write_policy(initial_policy(spec), first, dtype=torch.float32)
    warmed = time.monotonic()

    settings = EvaluationSettings(problems=options.problems, samples=options.samples)

    def held_out(policy: Path) -> float:
        reward = evaluate_policy(policy, spec=spec, settings=settings, datasets=files).reward
        assert reward is not None, "no held-out row could be judged"
        return reward

    before = held_out(first)
    task = LearningTask(seed=seed, steps=options.steps, prompts=GROUPS, samples=GROUP_SIZE)
    curve = learn(first, task, spec, threads=options.threads, keep=last, datasets=files)
    after = held_out(last)
    return {
        "dataset": dataset.name,
        "seed": seed,
        "before": round(before, 4),
        "after": round(after, 4),
        "gain": round(after - before, 4),
        "warm_start_seconds": round(warmed - started, 1),
        "seconds": round(time.monotonic() - started, 1),
        "rewards": [round(reward, 4) for reward in curve.rewards],
    }


def figures_of(rows: Sequence[Mapping[str, Any]], *, seconds: float) -> dict[str, float]:
    """Return each dataset's least and mean gain, and its mean rewards."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == name]
        found[f"heldout_gain_{name}"] = min(row["gain"] for row in own)
        found[f"heldout_gain_{name}_mean"] = round(statistics.fmean(row["gain"] for row in own), 4)
        for when in ("before", "after"):
            found[f"heldout_{when}_{name}"] = round(statistics.fmean(row[when] for row in own), 4)
    return found | {"seconds": round(seconds, 1)}


def main() -> None:
    parser = make_parser(__doc__)
    names = [dataset.name for dataset in DATASETS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these datasets alone")
    parser.add_argument("--seeds", type=int, default=3, help="how many times each is learnt (3)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps ({STEPS})")
    parser.add_argument("--problems", type=int, default=200, help="held-out rows, or as many as there are (200)")
    parser.add_argument("--samples", type=int, default=4, help="completions of each (4)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (1)")
    parser.add_argument("--warm-start", type=float, default=1.0, help="share of the warm start's steps (1)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the rewards of all steps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started, rows = time.monotonic(), []
    for dataset in (each for each in DATASETS if each.name in options.only):
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory(prefix="curves-") as folder:
                rows.append(run_trial(dataset, seed, options, Path(folder)))
            row = rows[-1]
            say(f"{dataset.name} seed {seed}  {row['before']:.3f} -> {row['after']:.3f}  {row['seconds']:.0f} s")
    if options.plot is not None:
        draw_curves(rows, options.plot)
    report("curves", options, figures_of(rows, seconds=time.monotonic() - started), rows=rows)


if __name__ == "__main__":
    main()
