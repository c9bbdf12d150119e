"""A fine-tuning that is small enough for tests: rows, a model's folder, and a watched job."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from model_folders import make_folder
from transformers import AutoTokenizer

from coordinator.sft.recipe import PreparedSft, SftRecipe
from coordinator.sft.run import SftJob, SftResult, fine_tune
from coordinator.training.grpo import Execution
from coordinator.training.supervised import SupervisedStep
from coordinator.training.trackers import NullTracker

CHAT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Watcher:
    """Notes what it is told; `after` is called with each finished step."""

    def __init__(self, after: Callable[[int], None] = lambda _step: None) -> None:
        self.losses: dict[int, float] = {}
        self.held_out: dict[int, float] = {}
        self._after = after

    def begun(self, prepared: PreparedSft, *, steps: int, done: int) -> None:
        self.prepared, self.steps, self.done = prepared, steps, done

    def step(self, step: SupervisedStep, *, tokens: int) -> None:
        self.losses[step.step] = step.loss
        self._after(step.step)

    def evaluated(self, step: int, loss: float) -> None:
        self.held_out[step] = loss


def chat_folder(folder: Path, **fields: Any) -> Path:
    """A model's folder whose chat template ends each turn with an end mark."""
    make_folder(folder, **fields)
    (folder / "chat_template.jinja").write_text(CHAT)
    assert AutoTokenizer.from_pretrained(folder).chat_template == CHAT
    return folder


def conversations(count: int = 24) -> list[dict[str, Any]]:
    """Additions, of which every third goes on for another turn."""
    rng, rows = Random(0), list[dict[str, Any]]()
    for number in range(count):
        messages = []
        for _ in range(2 if number % 3 == 0 else 1):
            left, right = rng.randint(1, 99), rng.randint(1, 99)
            messages += [{"role": "user", "content": f"{left}+{right}"}]
            messages += [{"role": "assistant", "content": f"<think>{'.' * rng.randint(0, 9)}</think>{left + right}"}]
        rows.append({"messages": messages})
    return rows


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job_in(folder: Path, *, execution: Execution | None = None, **recipe: Any) -> SftJob:
    """A fine-tuning of `folder/model` with `folder/rows.jsonl`."""
    chosen = {"held_out": 0.1, "epochs": 3, "batch": 5, "learning_rate": 1e-3} | recipe
    return SftJob(
        model=folder / "model",
        data=folder / "rows.jsonl",
        to=folder / "tuned",
        state=folder / "state",
        recipe=SftRecipe(**chosen),
        execution=execution or Execution(row_tokens=64),
        evaluate_every=4,
        checkpoint_every=2,
    )


def run_job(
    job: SftJob, *, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False
) -> SftResult | None:
    return fine_tune(job, tracker=lambda _prepared: NullTracker(), observer=watcher or Watcher(), stop=stop)
