"""What a plan takes for granted, and how well it is known."""

from __future__ import annotations

from typing import Literal

import msgspec

from coordinator.planning import formulas, roles
from coordinator.planning.amounts import Cards, show_bytes
from coordinator.planning.cards import BANDWIDTH_SHARE, COMPUTE_SHARE, speed_of
from node.engines.vllm_settings import WORKING_BYTES


class Assumption(msgspec.Struct, frozen=True):
    """A sentence, and where it comes from: the model itself, a benchmark, a data sheet, or nobody's measurement."""

    kind: Literal["counted", "measured", "vendor", "guessed"]
    text: str


def assumptions(*, delta_ratio: float, cards: Cards, worker_cards: Cards) -> tuple[Assumption, ...]:
    """Return what the figures of a plan rest on; `delta_ratio` is the policy's bytes over its delta's."""
    ours, theirs = speed_of(cards.memory), speed_of(worker_cards.memory)
    core = f"{formulas.DELTA_BYTES_PER_SECOND / 1e9:.1f} GB/s of the policy"
    return (
        Assumption(
            "counted", "parameters, layers and tensors: on the meta device, of the model that config.json makes"
        ),
        Assumption("counted", "activations: tensor by tensor, as autograd keeps them for llama and qwen3"),
        Assumption("measured", f"a delta is 1/{delta_ratio:.0f} of the policy at this learning rate"),
        Assumption("measured", f"one core finds or applies deltas at {core} (python -m benchmarks.broadcast)"),
        Assumption("measured", f"trees reach {formulas.TREE_SHARE:.0%} of what their links allow (the same)"),
        Assumption("measured", f"a chunk of logits is there {formulas.CHUNK_COPIES} times (python -m benchmarks.head)"),
        Assumption("measured", f"a relay takes less than {show_bytes(roles.RELAY_BYTES)}, whatever the policy"),
        Assumption("vendor", f"{cards} as {ours.name}: {ours.operations / 1e12:.0f} TFLOP/s in 16 bits"),
        Assumption(
            "vendor",
            f"a worker's {worker_cards} as {theirs.name}: {theirs.operations / 1e12:.0f} TFLOP/s, memory at "
            f"{theirs.bandwidth / 1e12:.2f} TB/s",
        ),
        Assumption(
            "guessed", f"{COMPUTE_SHARE:.0%} of those operations are reached, {BANDWIDTH_SHARE:.0%} of the rate"
        ),
        Assumption("guessed", f"CUDA, NCCL and the allocator take {show_bytes(roles.CUDA_BYTES)} of a trainer's GPU"),
        Assumption("guessed", f"vLLM takes {show_bytes(WORKING_BYTES)} beside weights and cache"),
    )
