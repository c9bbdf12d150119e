"""TRL's GRPOTrainer on the same task; runs in an environment of its own, and imports nothing of the project.

    python trl_worker.py TASK.json

TASK.json: model (a Hugging Face folder), steps (each a list of prompts with their answers), samples, max_new_tokens,
learning_rate, minibatches, threads, seed. Prints one JSON object: seconds and mean reward of each step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

END_OF_THOUGHT = "</think>"


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(task["model"], local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(task["model"], local_files_only=True, dtype=torch.float32)
    rewards: list[list[float]] = []

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        given = [float(said(text) == right) for text, right in zip(completions, answer, strict=True)]
        rewards.append(given)
        return given

    def said(text: str) -> str | None:
        _, mark, answer = text.rpartition(END_OF_THOUGHT)
        return answer.strip() if mark else None

    rows = [{"prompt": prompt, "answer": answer} for step in task["steps"] for prompt, answer in step]
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config(task, folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    updates = task["minibatches"]
    stamps = clock.stamps[::updates]
    print(
        json.dumps(
            {
                "rewards": [sum(step) / len(step) for step in rewards],
                "seconds": [later - earlier for earlier, later in pairwise(stamps)],
            }
        )
    )


class Clock(TrainerCallback):
    """When training began, and when each update was done."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.stamps.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.stamps.append(time.perf_counter())


def config(task: dict[str, Any], folder: str) -> GRPOConfig:
    """Return the same recipe: two-sided clipping, a loss over all tokens, no KL, `minibatches` updates a generation."""
    completions = len(task["steps"][0]) * task["samples"]
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=task["seed"],
        max_steps=len(task["steps"]) * task["minibatches"],
        per_device_train_batch_size=completions // task["minibatches"],
        steps_per_generation=task["minibatches"],
        num_generations=task["samples"],
        max_completion_length=task["max_new_tokens"],
        temperature=1.0,
        learning_rate=task["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4 * task["minibatches"],
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        delta=4.0,
        loss_type="dapo",
        scale_rewards="group",
        shuffle_dataset=False,
        dataloader_num_workers=0,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
