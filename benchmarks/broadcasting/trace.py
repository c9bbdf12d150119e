"""Deltas between the policies that the trainer really publishes, at several learning rates.

A random llama of some 9 million weights is trained by the trainer's own GRPO step (four AdamW updates each) on random
completions, rewarded at random: how many words of its bfloat16 copy change, and by how much, hangs on the optimiser and
the rate, hardly on the task. Some steps come before the first that counts, so that Adam's moments have settled.

With adapters (`measure_adapters`) the same model and steps, merged into weights that lie anywhere between two numbers
of bfloat16, as all weights do after many steps.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from msgspec import UNSET, UnsetType
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.broadcast_delta import trace
from coordinator.training.distributed_learner import write_gathered
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import train_step
from coordinator.training.lora import add_adapters, begin_adapters
from coordinator.training.optimizers import make_optimizer
from coordinator.training.world import SINGLE_PROCESS
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.products import use_blocks
from node.protocol.run import EnvironmentSpec, LoraSpec, ModelSpec, RunSpec, TrainingSpec

RATES = (1e-6, 1e-5, 5e-5, 2e-4)
SETTLING, STEPS = 3, 2
FULL_RATE = 1e-6
"""Of all weights, as INTELLECT-2 had for models of billions of parameters, and adapters ten times that and more."""
ADAPTER_RATES, RANKS = (1e-6, 1e-5, 1e-4), (8, 32)

_GROUPS, _GROUP_SIZE, _PROMPT, _TOKENS = 4, 4, 8, 24


def measure(folder: Path) -> dict[str, float]:
    """Measure for each rate the changed share and the delta's ratio: means over `STEPS` steps."""
    figures = dict[str, float]()
    for rate in RATES:
        paths = policies(rate, folder)
        rows = trace(paths)
        name = f"trace_lr_{rate:.0e}".replace("e-0", "e")
        figures[f"{name}_changed"] = sum(row["changed_share"] for row in rows) / len(rows)
        figures[f"{name}_ratio"] = sum(row["ratio"] for row in rows) / len(rows)
        figures[f"{name}_over_entropy"] = max(row["over_entropy"] for row in rows)
        for path in paths:
            path.unlink()
    return figures


def measure_adapters(folder: Path) -> dict[str, float]:
    """Measure the deltas of merged adapters beside those of all weights: means over `STEPS` steps."""
    cases: list[tuple[str, float, LoraSpec | UnsetType]] = [("lora_full_lr_1e6", FULL_RATE, UNSET)]
    for rank in RANKS:
        lora = LoraSpec(rank=rank, alpha=2.0 * rank)
        cases += [(f"lora_{rank}_lr_{rate:.0e}".replace("e-0", "e"), rate, lora) for rate in ADAPTER_RATES]
    figures = dict[str, float]()
    for name, rate, lora in cases:
        paths = policies(rate, folder, lora=lora)
        rows = trace(paths)
        figures[f"{name}_changed"] = sum(row["changed_share"] for row in rows) / len(rows)
        figures[f"{name}_delta_share"] = sum(1 / row["ratio"] for row in rows) / len(rows)
    return figures


def policies(rate: float, folder: Path, *, lora: LoraSpec | UnsetType = UNSET) -> list[Path]:
    """Train consecutive versions, published in bfloat16 from float32 master weights as a trainer does."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = _model(len(tokenizer))
    if lora:
        use_blocks(model)
        add_adapters(model, lora)
        begin_adapters(model, seed=0, world=SINGLE_PROCESS)
    spec = RunSpec(
        name="trace",
        environments=(EnvironmentSpec(name="arithmetic", weight=1, arguments={}),),
        model=ModelSpec(dtype="bfloat16"),
        training=TrainingSpec(learning_rate=rate, warmup_steps=1),
    )
    optimizer, rng, paths = make_optimizer(model, spec.training), random.Random(0), list[Path]()
    for step in range(SETTLING + STEPS + 1):
        if step >= SETTLING:
            paths.append(folder / f"policy-{step}.safetensors")
            write_gathered(model, tokenizer, paths[-1], dtype=torch.bfloat16, world=SINGLE_PROCESS)
        train_step(model, optimizer, [_group(model, rng, step) for _ in range(_GROUPS)], spec=spec, step=step)
    return paths


def _model(vocabulary: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=128,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


@torch.no_grad()
def _group(model: PreTrainedModel, rng: random.Random, step: int) -> Group:
    tokens = [[rng.randrange(3, model.config.vocab_size) for _ in range(_TOKENS)] for _ in range(_GROUP_SIZE)]
    ids = torch.tensor(tokens)
    model.eval()
    logprobs = model(ids, use_cache=False).logits.float().log_softmax(-1)[:, _PROMPT - 1 : -1]
    chosen = logprobs.gather(2, ids[:, _PROMPT:, None])[..., 0].tolist()
    rollouts = tuple(
        Sample(tuple(row[:_PROMPT]), tuple(row[_PROMPT:]), tuple(each))
        for row, each in zip(tokens, chosen, strict=True)
    )
    return Group(version=step, rewards=tuple(float(rng.random() < 0.5) for _ in rollouts), rollouts=rollouts)
