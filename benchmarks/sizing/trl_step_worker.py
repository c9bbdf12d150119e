"""TRL's GRPOTrainer over one given batch; runs in an environment of its own, and imports nothing of the project.

    python trl_step_worker.py TASK.json

Takes a step for each line on standard input, and prints the seconds that it took. Rollouts are given, so that nothing
is generated: TASK.json has model (a Hugging Face folder), groups (rewards, and rollouts with prompt_ids, completion_ids
and logprobs), max_new_tokens, learning_rate, clip (epsilon, delta, gradient norm), betas, steps, threads, device.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    # Whatever a library prints goes to the log: only seconds leave by standard output.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(task["model"], local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(task["model"], local_files_only=True, dtype=torch.float32)
    groups = task["groups"]
    samples = [
        (rollout, reward)
        for group in groups
        for rollout, reward in zip(group["rollouts"], group["rewards"], strict=True)
    ]

    def given(_prompts: list[str], _trainer: GRPOTrainer) -> dict[str, list[Any]]:
        fields = ("prompt_ids", "completion_ids", "logprobs")
        rollouts = {field: [list(rollout[field]) for rollout, _ in samples] for field in fields}
        return {**rollouts, "earned": [reward for _, reward in samples]}

    def reward(completions: list[str], earned: list[float], **_: Any) -> list[float]:
        return earned[: len(completions)]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config(task, folder, completions=len(samples)),
            train_dataset=Dataset.from_list([{"prompt": str(at)} for at in range(len(groups))]),
            processing_class=tokenizer,
            callbacks=[Turns(replies)],
            rollout_func=given,
        )
        trainer.train()


class Turns(TrainerCallback):
    """Waits for a line before each step, and replies with the seconds of the step."""

    def __init__(self, replies: Any) -> None:
        self._replies = replies
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not sys.stdin.readline():
            sys.exit("nobody waits for another step")
        synchronize()
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        print(time.perf_counter() - self._started, file=self._replies, flush=True)


def synchronize() -> None:
    """Wait until a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def config(task: dict[str, Any], folder: str, *, completions: int) -> GRPOConfig:
    """Return the same recipe: two-sided clipping, a loss over all tokens, no KL, one update over the whole batch."""
    epsilon, delta, norm = task["clip"]
    return GRPOConfig(
        output_dir=folder,
        use_cpu=task["device"] == "cpu",
        bf16=task["device"] == "cuda",
        gradient_checkpointing=False,
        max_steps=task["steps"],
        per_device_train_batch_size=completions,
        steps_per_generation=1,
        num_generations=len(task["groups"][0]["rollouts"]),
        max_completion_length=task["max_new_tokens"],
        temperature=1.0,
        learning_rate=task["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        weight_decay=0.0,
        max_grad_norm=norm,
        beta=0.0,
        epsilon=epsilon,
        delta=delta,
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
