"""Memory as `swarmproof plan` computes it, against the peaks of processes that do the work, on a CPU.

For each size child processes take two training steps of GRPO over several packed rows, with all weights and with
adapters of two ranks, another one loads the policy in bfloat16 and measures one group, and for small sizes two
processes share a step (FSDP2 over gloo, with recomputation). A peak is the highest resident memory (VmHWM, reset
beforehand) beyond what the same process takes with all of its imports and no model. Weights are random: memory does
not depend on them.

Figures: memory_error_share is the largest |planned - measured| / measured of all rows. `--measured FILE` adds rows of
other runs, such as of a policy of 0.6 billion parameters: a JSON list of {"size", "role", "planned", "measured"}.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.report import make_parser, report, say
from coordinator.planning import roles
from coordinator.planning.shape import ModelShape, read_shape
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import Execution, train_step
from coordinator.training.lora import add_adapters, begin_adapters, recompute_activations
from coordinator.training.optimizers import make_optimizer
from coordinator.training.world import SINGLE_PROCESS, World, open_world
from node.policy.file import save_policy
from node.policy.models.tiny_llama import EOS, PAD, make_tokenizer
from node.policy.products import use_blocks
from node.protocol.run import EnvironmentSpec, LoraSpec, ModelSpec, RunSpec, SamplingSpec, TrainingSpec
from node.verification.prefill import TransformersPrefill
from node.verification.proofs import build_proofs
from node.verification.readings import read_by_transformers
from node.verification.spans import Span

SIZES: dict[str, dict[str, Any]] = {
    "2M": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 8192,
           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "50M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": 32_000,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    "190M": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2, "vocab_size": 151_936,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "600M": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
"""The last two are Qwen3-0.6B with 2 and with all layers."""
SHARDED = ("2M", "50M")
"""Sizes that two processes share here; each begins with the whole model."""
RANKS = 2
LORA_RANKS = (8, 256)
PROMPT, COMPLETION, SAMPLES, GROUPS = 32, 96, 4, 4
_PIECE_BYTES = 1024


def make_config(folder: Path, size: str) -> Path:
    """Write the config.json of a size and return the folder."""
    config = CONFIG_MAPPING["qwen3"](
        **SIZES[size],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    return folder


def make_spec(*, rank: int = 0) -> RunSpec:
    """Return the run whose steps and groups are measured; with a `rank`, of adapters."""
    return RunSpec(
        name="plan",
        environments=(EnvironmentSpec(name="arithmetic"),),
        model=ModelSpec(dtype="bfloat16"),
        sampling=SamplingSpec(group_size=SAMPLES, max_prompt_tokens=PROMPT, max_new_tokens=COMPLETION),
        training=TrainingSpec(
            minibatches=1, learning_rate=1e-6, lora=LoraSpec(rank=rank, alpha=2.0 * rank) if rank else UNSET
        ),
    )


def build_model(folder: Path, *, dtype: torch.dtype) -> Any:
    """Build the model of `folder` with random weights."""
    config = CONFIG_MAPPING["qwen3"].from_pretrained(folder)
    build: Any = AutoModelForCausalLM.from_config
    return build(config, dtype=dtype)


def train(folder: Path, *, rank: int = 0) -> int:
    """Take two steps and return the peak of the second one, in bytes."""
    return _train(folder, SINGLE_PROCESS, make_spec(rank=rank))


def train_sharded(folder: Path) -> int:
    """Take two steps as one of the processes that torchrun started, and return this one's peak."""
    with open_world(device="cpu") as world:
        return _train(folder, world, make_spec())


def _train(folder: Path, world: World, spec: RunSpec) -> int:
    draw = torch.Generator().manual_seed(0)
    vocabulary = read_shape(folder).vocabulary

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=draw).tolist())

    groups = [
        Group(0, tuple(float(row % 2) for row in range(SAMPLES)), _samples(ids(PROMPT), ids))
        for _ in range(GROUPS * world.size)
    ]
    before = _resident("VmRSS")
    model = build_model(folder, dtype=torch.float32)
    settings = options_of(world.size)
    if settings.recompute:
        recompute_activations(model)
    if isinstance(spec.training.lora, LoraSpec):
        use_blocks(model)
        add_adapters(model, spec.training.lora)
        begin_adapters(model, seed=0, world=world)
    world.shard(model)
    optimizer = make_optimizer(model, spec.training)
    execution = Execution(world=world, row_tokens=settings.row_tokens, recompute=settings.recompute)
    train_step(model, optimizer, groups, spec=spec, step=0, execution=execution)
    return _peak(lambda: train_step(model, optimizer, groups, spec=spec, step=1, execution=execution)) - before


def options_of(ranks: int) -> roles.TrainerOptions:
    """Return how steps are taken, by one process or by several."""
    row_tokens = make_spec().sampling.most_tokens * 2
    return roles.TrainerOptions(ranks=ranks, row_tokens=row_tokens, recompute=ranks > 1, autocast=False)


def _samples(prompt: tuple[int, ...], ids: Callable[[int], tuple[int, ...]]) -> tuple[Sample, ...]:
    return tuple(Sample(prompt, ids(COMPLETION), (-2.0,) * COMPLETION) for _ in range(SAMPLES))


def verify(folder: Path) -> int:
    """Load a policy file, measure one group of true proofs, and return the peak, in bytes."""
    spec = make_spec()
    path = folder / "policy.safetensors"
    before = _resident("VmRSS")
    prefill = read_by_transformers(path, spec=spec)
    assert isinstance(prefill, TransformersPrefill)
    spans = _proved(prefill, spec)

    def measure() -> None:
        for found in prefill.measure(spans, spec=spec):
            assert not isinstance(found, Exception), found

    return _peak(measure) - before


def _proved(prefill: TransformersPrefill, spec: RunSpec) -> list[Span]:
    draw = torch.Generator().manual_seed(0)
    prompt, *drawn = torch.randint(
        prefill.blueprint.vocabulary, (PROMPT + SAMPLES * COMPLETION,), generator=draw
    ).split([PROMPT, *[COMPLETION] * SAMPLES])
    spans = [Span(row, bytes([row]) * 16, prompt.tolist(), 0, own.tolist(), [], 0) for row, own in enumerate(drawn)]
    for span, states in zip(spans, prefill.states(spans), strict=True):
        chunks = list(torch.split(states.bfloat16(), span.chunk_sizes(spec.proofs.chunk_tokens)))
        span.proofs[:] = build_proofs(chunks, [span.seed] * len(chunks), spec=spec.proofs)
    return spans


def write_policy(folder: Path) -> int:
    """Write the policy file that `verify` reads."""
    save_policy(build_model(folder, dtype=torch.bfloat16), make_tokenizer(), folder / "policy.safetensors")
    return 0


def _peak(work: Callable[[], object]) -> int:
    """Run `work`; return the highest resident bytes of this process meanwhile."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return _resident("VmHWM")


def _resident(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * _PIECE_BYTES


def planned_training(shape: ModelShape, *, ranks: int = 1, rank: int = 0) -> int:
    """Return what the plan says of a step of one process, or of each of several; with a `rank`, of adapters."""
    return sum(item.bytes for item in roles.step_items(shape, make_spec(rank=rank), options_of(ranks)))


def planned_verifying(shape: ModelShape) -> int:
    """Return what the plan says of one group, without a second look."""
    return sum(item.bytes for item in roles.measuring_items(shape, make_spec()))


CHILDREN: dict[str, Callable[[Path], int]] = {
    "train": train,
    **{f"train, LoRA {rank}": functools.partial(train, rank=rank) for rank in LORA_RANKS},
    "train, 2 ranks": train_sharded,
    "verify": verify,
    "write": write_policy,
}
PLANNED: dict[str, Callable[[ModelShape], int]] = {
    "train": planned_training,
    **{f"train, LoRA {rank}": functools.partial(planned_training, rank=rank) for rank in LORA_RANKS},
    "train, 2 ranks": functools.partial(planned_training, ranks=RANKS),
    "verify": planned_verifying,
}


def in_child(part: str, folder: Path) -> int:
    """Run a part in a process of its own, or in several, and return the most bytes of any."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m"] if "ranks" in part else []
    command = [sys.executable, "-m", *launch, "benchmarks.plan", "--child", part, str(folder)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_mapped()
    )
    return max(int(line) for line in done.stdout.split())


def _mapped() -> dict[str, str]:
    """Have the allocator give memory back: what it keeps for itself is no tensor's."""
    return os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "OMP_NUM_THREADS": "1"}


def rows_of(sizes: Sequence[str]) -> list[dict[str, Any]]:
    """Measure each size in both roles, beside what is planned."""
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as kept:
            folder = make_config(Path(kept), size)
            shape = read_shape(folder)
            in_child("write", folder)
            for role, planned in PLANNED.items():
                if "ranks" in role and size not in SHARDED:
                    continue
                row = {"size": size, "role": role, "planned": planned(shape), "measured": in_child(role, folder)}
                say(f"{size} {role}: {row['planned'] / 1e6:.0f} MB planned, {row['measured'] / 1e6:.0f} MB measured")
                rows.append(row)
    return rows


def error_share(row: dict[str, Any]) -> float:
    """Return by how much a row's plan is off, over what was measured."""
    return abs(row["planned"] - row["measured"]) / row["measured"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["50M", "190M"])
    parser.add_argument("--measured", type=Path, help="rows of other runs, JSON")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        part, folder = options.child
        print(CHILDREN[part](Path(folder)))
        return
    rows = rows_of(options.sizes)
    if options.measured:
        rows += json.loads(options.measured.read_text())
    rows = [row | {"error_share": error_share(row)} for row in rows]
    figures = {"memory_error_share": max(row["error_share"] for row in rows)}
    report("plan", options, figures, {"memory": "VmHWM beyond an idle process, bytes; one thread"}, rows=rows)


if __name__ == "__main__":
    main()
