"""The formulas of a plan: counts in, bytes, seconds or operations out. Each says where it comes from.

Memory is that of one process or GPU at its highest, in bytes, beyond what an idle process takes. `ranks` are the
trainer's processes, one for each GPU (FSDP2). Shapes of a row: `tokens` that are computed, of which `drawn` are
predicted; `padded` tokens go through attention, where samples that share a prompt each bring it.
"""

from __future__ import annotations

import math
from typing import Final

from coordinator.planning.shape import ModelShape
from coordinator.training.head import CHUNK_BYTES
from node.policy.packed import KEPT_TOKENS
from node.policy.products import BLOCK_NUMBERS
from node.policy.streaming import PIECE_BYTES
from node.protocol.run import LoraSpec, RunSpec, TrainingSpec
from node.verification.batches import MAX_BATCH_TOKENS
from node.verification.spans import MAX_LOGITS

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
WIDE: Final = 4
"""Bytes of a float32, in which the trainer keeps weights, gradients and moments."""
CHUNK_COPIES: Final = 3
"""Of a chunk's logits in the trainer's head (coordinator/training/head.py; measured by benchmarks/head.py)."""
LOGIT_COPIES: Final = 3
"""Of a part of the logits while a verifier samples again; measured by benchmarks/plan.py."""
VERIFIER_RUNTIME_BYTES: Final = 140_000_000
"""Of a process that measures on a CPU, whatever the policy: numba with LLVM and its kernels 117 MB, and what loading a
model leaves beside its weights 24 MB; measured by benchmarks/plan.py."""
CHECKPOINTS: Final = 3
"""Kept by a trainer; one more is there while it is written."""
DELTA_RATIO_AT_1E6: Final = 125.0
"""A bfloat16 policy over its delta after an AdamW step at 1e-6 (benchmarks/baselines/broadcast.json)."""
DELTA_SLOPE: Final = 0.72
"""By which power of the learning rate that falls: 305 at 3e-7 and 24.4 at 1e-5 (the same)."""
FLOAT32_DELTA_RATIO: Final = 2.6
"""Of a float32 policy, where every number changes (the same)."""
WORTHWHILE_DELTA: Final = 0.8
"""Of the policy's bytes: the origin leaves out larger deltas (docs/broadcast.md)."""
DELTA_BYTES_PER_SECOND: Final = 0.6e9
"""Of full-size bytes, encoded or applied on one core (benchmarks/baselines/broadcast.json)."""
TREE_SHARE: Final = 0.87
"""Of what the links allow, reached at depth 3 behind capped uplinks (benchmarks/baselines/broadcast.json)."""


def adapter_parameters(shape: ModelShape, training: TrainingSpec) -> int:
    """Return how many numbers `[training.lora]` trains in place of the weights (coordinator/training/lora.py)."""
    return training.lora.parameters(shape.projections) if isinstance(training.lora, LoraSpec) else 0


def trained_parameters(shape: ModelShape, training: TrainingSpec) -> int:
    """Return how many numbers have a gradient, and moments."""
    return adapter_parameters(shape, training) or shape.parameters


def optimizer_bytes(shape: ModelShape, training: TrainingSpec) -> int:
    """Return two moments of each number that is trained, with Muon one of the layers' matrices, which are no adapters
    (coordinator/training/optimizers.py).
    """
    moments = 2 * trained_parameters(shape, training) - (shape.matrices if training.optimizer == "muon" else 0)
    return WIDE * moments


def share_of(total: int, ranks: int) -> int:
    """Return the part of one rank: FSDP2 splits each tensor by rows, so that some have a row of it more."""
    return math.ceil(total / ranks)


def gathered_layer_bytes(shape: ModelShape, training: TrainingSpec, ranks: int, *, autocast: bool) -> int:
    """Return one layer in use and the next on its way, with the gradients of one and those that are being reduced.

    FSDP2 prefetches one layer and overlaps one reduction (torch.distributed.fsdp.fully_shard, its documentation). In
    autocast all but the reduction, which is in float32, has 16 bits. With adapters only those
    have gradients.
    """
    if ranks == 1:
        return 0
    item, adapters = 2 if autocast else WIDE, adapter_parameters(shape, training) // shape.layers
    return 2 * item * (shape.largest_layer + adapters) + (item + WIDE) * (adapters or shape.largest_layer)


def gathered_expert_bytes(shape: ModelShape, ranks: int, *, rows: int, autocast: bool) -> float:
    """Return what a rank receives of routed experts in a step of so many rows of each rank (FSDP2).

    A layer is gathered for the forward and for the backward pass of each row, and its gradient reduced in float32.
    """
    return rows * (2 * (2 if autocast else WIDE) + WIDE) * shape.routed * (ranks - 1) / ranks


def sent_state_bytes(shape: ModelShape, ranks: int, *, tokens: int, autocast: bool, recompute: bool) -> float:
    """Return what a rank would receive in a step with expert parallelism, all of whose ranks have `tokens`.

    A token's state goes to each of its experts and comes back, in each layer that has some, and so do their gradients
    (arXiv 2006.16668); with recomputation the states do twice. Of `ranks` one is the token's own.
    """
    passes = 6 if recompute else 4
    each = shape.routed_layers * shape.chosen * shape.hidden * (2 if autocast else WIDE)
    return passes * each * tokens / ranks * (ranks - 1) / ranks


def embedding_gradient_bytes(shape: ModelShape, ranks: int) -> int:
    """Return the gradient of a lookup, dense, of a rank's own rows, before it is added (embedding_dense_backward).

    Several ranks look up in chunks, and add those of one to the ones before it (coordinator/training/vocabulary.py).
    """
    copies = 2 if ranks > 1 else 1
    return copies * share_of(WIDE * shape.embedding, ranks)


def layer_activation_bytes(shape: ModelShape, *, tokens: int, padded: int, autocast: bool) -> int:
    """Return what a decoder layer saves for its backward pass, as transformers computes llama and qwen3.

    Counted tensor by tensor; tests/unit/coordinator/test_plan.py compares it with what autograd keeps. In autocast
    norms stay in float32, and each product keeps its input again in 16 bits.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wide, narrow = (16, 2 * 5) if autocast else (24, 0)
    item = 2 if autocast else WIDE
    each = (wide + narrow) * shape.hidden + item * (queries + 4 * shape.feed_forward)
    if shape.has_head_norms:
        each += (WIDE + item) * (queries + keys)
    return tokens * each + padded * item * 2 * (queries + keys)


def adapter_activation_bytes(training: TrainingSpec, *, tokens: int, autocast: bool) -> int:
    """Return what a layer's adapters save beside it: A x of each, as their input is the layer's own."""
    lora = training.lora
    return (2 if autocast else WIDE) * tokens * lora.rank * len(lora.targets) if isinstance(lora, LoraSpec) else 0


def activation_bytes(
    shape: ModelShape, training: TrainingSpec, *, tokens: int, padded: int, autocast: bool, recompute: bool
) -> int:
    """Return those of a row: all layers', or with recomputation each layer's input and one's own (arXiv 1604.06174).

    Frozen weights save as much as trained ones, as adapters need the same inputs.
    """
    layer = layer_activation_bytes(shape, tokens=tokens, padded=padded, autocast=autocast)
    layer += adapter_activation_bytes(training, tokens=tokens, autocast=autocast)
    if recompute:
        return layer + shape.layers * tokens * WIDE * shape.hidden
    return shape.layers * layer


def cast_weight_bytes(shape: ModelShape, ranks: int, *, recompute: bool) -> int:
    """Return the 16-bit copies of the layers' weights that autograd keeps in autocast, unless it recomputes.

    Several ranks have none: they gather layers in 16 bits, and again for the backward pass.
    """
    return 0 if recompute or ranks > 1 else 2 * (shape.parameters - shape.outside_layers)


def head_bytes(shape: ModelShape, ranks: int, *, drawn: int) -> int:
    """Return final states, their gradients, and the copies of one chunk's logits (coordinator/training/head.py).

    A rank computes its own ids' logits for a chunk of all ranks' tokens, whose states and their gradients it has then.
    """
    chunk = min(drawn * WIDE * shape.vocabulary, max(CHUNK_BYTES, WIDE * shape.vocabulary))
    together = chunk // (WIDE * shape.vocabulary) * ranks if ranks > 1 else 0
    return CHUNK_COPIES * chunk + 4 * WIDE * drawn * shape.hidden + 2 * WIDE * together * shape.hidden


def frozen_forward_bytes(shape: ModelShape, ranks: int, *, tokens: int, padded: int, drawn: int, autocast: bool) -> int:
    """Return what a pass without gradients holds at most: a layer's activations with two layers' weights, or logits."""
    layer = layer_activation_bytes(shape, tokens=tokens, padded=padded, autocast=autocast)
    gathered = 2 * (2 if autocast else WIDE) * shape.largest_layer if ranks > 1 else 0
    return layer + max(gathered, head_bytes(shape, ranks, drawn=drawn))


def publish_bytes(shape: ModelShape, training: TrainingSpec, ranks: int, *, dtype: str) -> int:
    """Return a rank's rows of the largest tensor, cast for the policy file, and those of the rank that are written.

    One process alone casts pieces of 4 MiB (node/policy/streaming.py). Adapters are merged into one layer's weight at a
    time, in float32.
    """
    merged = share_of(WIDE * shape.largest_projection, ranks) if adapter_parameters(shape, training) else 0
    cast = share_of(ITEM_BYTES[dtype] * shape.largest_tensor, ranks) if ranks > 1 else PIECE_BYTES
    return merged + 2 * cast


def weight_bytes(shape: ModelShape, *, dtype: str) -> int:
    """Return the policy's weights in the run's dtype; its file has configuration and tokenizer besides (MB)."""
    return ITEM_BYTES[dtype] * shape.parameters


def cache_bytes_per_token(shape: ModelShape, *, dtype: str, parts: int = 1) -> int:
    """Return keys and values of one token over all layers, on each of `parts` GPUs: a head at least on each."""
    if shape.latent:
        return shape.attending * shape.latent * ITEM_BYTES[dtype]
    return 2 * shape.attending * math.ceil(shape.kv_heads / parts) * shape.head_dim * ITEM_BYTES[dtype]


def prefill_bytes(shape: ModelShape, *, dtype: str, tokens: int, drawn: int) -> int:
    """Return a forward pass without gradients, in batches of `MAX_BATCH_TOKENS`, and logits as a CPU has them.

    At a layer's widest: three feed-forward widths, and residual, norm and products of a few hidden widths. Of drawn
    tokens' logits there are at most `MAX_LOGITS`, a block of the vocabulary at a time (node/policy/products.py).
    """
    batch, item = min(tokens, MAX_BATCH_TOKENS), ITEM_BYTES[dtype]
    widest = item * (3 * shape.feed_forward + 2 * shape.hidden) + 2 * WIDE * shape.hidden
    block = min(shape.vocabulary, max(BLOCK_NUMBERS // shape.hidden, 1))
    logits = min(drawn * block, max(MAX_LOGITS, block))
    return batch * widest + LOGIT_COPIES * WIDE * logits


def can_share(shape: ModelShape) -> bool:
    """Return whether the reference prefill computes a prompt once for a group (node/policy/packed_attention.py)."""
    return shape.attending == shape.layers


def prefilled_tokens(shape: ModelShape, spec: RunSpec) -> int:
    """Return the tokens of a group that the reference prefill computes, all of the longest kind."""
    sampling = spec.sampling
    prompts = 1 if can_share(shape) else sampling.group_size
    return prompts * sampling.max_prompt_tokens + sampling.group_size * (
        sampling.most_tokens - sampling.max_prompt_tokens
    )


def kept_context_bytes(shape: ModelShape, spec: RunSpec) -> int:
    """Return keys and values of a prompt, which is computed with the first row of a group and kept for the others.

    Not where there are routers, whose choices belong to each row (node/verification/prefill.py), nor beyond
    `KEPT_TOKENS`. Compressed keys are kept as each head's own.
    """
    tokens = spec.sampling.max_prompt_tokens
    if not can_share(shape) or shape.experts or tokens > KEPT_TOKENS:
        return 0
    each = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return tokens * each * ITEM_BYTES[spec.model.dtype]


def second_look_bytes(shape: ModelShape) -> int:
    """Return a layer, or the embedding, of the policy and of a suspect in float32, as they are read layer by layer."""
    return 2 * WIDE * max(shape.largest_layer, shape.embedding)


def delta_bytes(full: float, *, learning_rate: float, dtype: str) -> float:
    """Return the bytes of one step's delta, `full` where that is not worth its time."""
    ratio = DELTA_RATIO_AT_1E6 * (learning_rate / 1e-6) ** -DELTA_SLOPE
    share = 1 / max(1.0, FLOAT32_DELTA_RATIO if dtype == "float32" else ratio)
    return full * (share if share <= WORTHWHILE_DELTA else 1.0)


def broadcast_seconds(size: float, *, uplink: float, downlink: float, relays: int, workers: int) -> float:
    """Return when the last worker has `size` bytes: by origin, receivers, or what the relays send together.

    Everybody's links in bytes a second; the lower bound of docs/scale.md, over the share of it that was reached.
    """
    bound = max(size / uplink, size / downlink, workers * size / (relays * uplink) if relays else 0.0)
    return bound / TREE_SHARE


def delta_core_seconds(full: float) -> float:
    """Return how long one core takes to find or to apply one step's delta."""
    return full / DELTA_BYTES_PER_SECOND


def forward_operations(shape: ModelShape, *, tokens: int, context: float) -> float:
    """Return operations, multiply-adds as two: each weight that a token meets, `context` keys and values in each layer.

    Lookups are none (the PaLM paper's count, arXiv 2204.02311, appendix B).
    """
    weights = shape.active - (0 if shape.is_tied else shape.embedding)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * context
    return 2.0 * tokens * (weights + attention)


def training_operations(forward: float, *, adapters: float, recompute: bool) -> float:
    """Return a step's: a backward pass is two forward passes, recomputation one more (arXiv 1604.06174).

    `adapters` is the share that adapters add to a forward pass, 0 without any: with them, the weights need no gradient.
    """
    passes = 4 if recompute else 3
    return forward * (passes - 1 + passes * adapters) if adapters else forward * passes


def prefilled_share(spec: RunSpec, *, tokens: int) -> float:
    """Return how many prefills of `tokens`, a group's, verifiers do for a proven node's, with second looks by chance.

    A prefill is of all rows or of one, and a second look one of the policy and one of each suspect
    (node/verification/second_look.py).
    """
    standing, limits = spec.standing, spec.limits
    one_row = spec.sampling.most_tokens / tokens
    measured = standing.full_rate_floor + (1 - standing.full_rate_floor) * one_row
    looks = limits.second_looks * 2 * len(limits.suspects) if spec.proofs.has_sketch else 0.0
    return measured * limits.readings + looks
