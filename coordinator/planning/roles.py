"""What each role holds: memory by kind, against what its GPUs have, and disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from coordinator.planning import formulas
from coordinator.planning.amounts import Cards
from coordinator.planning.shape import ModelShape
from coordinator.training.packing import MAX_WIDTH
from node.engines.vllm_settings import WORKING_BYTES
from node.protocol.run import RunSpec
from shardcast.store.versions import KEPT_DELTAS

CUDA_BYTES: Final = 1_500_000_000
"""Of a GPU for the CUDA context, NCCL, library workspaces and what the allocator cannot reuse. Guessed."""
VLLM_SHARE: Final = 0.9
"""Of a GPU that vLLM takes: `--gpu-memory-utilization`'s default."""
MOST_SEQUENCES: Final = 256
"""That vLLM decodes together: `--max-num-seqs`'s default."""
MOST_ROW_TOKENS: Final = 32_768
MOST_RANKS: Final = 4096
RELAY_BYTES: Final = 100_000_000
"""A relay's memory, whatever the policy: whoever fetched 2 GiB took 82 MiB at most (docs/broadcast.md)."""


class Item(msgspec.Struct, frozen=True):
    """One kind of bytes."""

    name: str
    bytes: int


class RoleMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one process or GPU of a role holds at its highest, and what it may; `advice` is "" where that fits."""

    role: str
    where: str
    items: tuple[Item, ...]
    allowed: int | None
    advice: str = ""

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def missing(self) -> int:
        """Bytes over what is allowed; 0 if it fits."""
        return 0 if self.allowed is None else max(0, self.total - self.allowed)


class RowLayout(msgspec.Struct, frozen=True):
    """A packed row of the trainer: tokens computed, tokens in attention, and tokens predicted."""

    tokens: int
    padded: int
    drawn: int


class TrainerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the trainer computes: its options of these names."""

    ranks: int
    row_tokens: int
    recompute: bool
    autocast: bool


def row_layout(spec: RunSpec, row_tokens: int) -> RowLayout:
    """Fill a row with completions of the longest kind, which share their group's prompt."""
    sampling = spec.sampling
    prompt, drawn, rows = sampling.max_prompt_tokens, sampling.max_new_tokens, sampling.group_size
    own = drawn + sampling.reply_tokens
    fitting = max(1, min(rows, (row_tokens - prompt) // own))
    groups = max(1, row_tokens // (prompt + fitting * own)) if fitting == rows else 1
    tokens = groups * (prompt + fitting * own)
    padded = min(groups * fitting * (prompt + own), max(MAX_WIDTH * row_tokens, prompt + own))
    return RowLayout(tokens, padded, groups * fitting * drawn)


def trainer_items(
    shape: ModelShape, spec: RunSpec, settings: TrainerOptions, *, teacher: ModelShape | None = None
) -> Iterator[Item]:
    """Yield what each rank holds at its highest: in a step, or while it publishes."""
    *held, passing = step_items(shape, spec, settings, teacher=teacher)
    yield from held
    publishing = formulas.publish_bytes(shape, spec.training, settings.ranks, dtype=spec.model.dtype)
    yield max(passing, Item("at most at a time: publishing", publishing), key=lambda item: item.bytes)


def step_items(
    shape: ModelShape, spec: RunSpec, settings: TrainerOptions, *, teacher: ModelShape | None = None
) -> Iterator[Item]:
    """Yield what each rank holds while several rows of a minibatch go through it; what comes and goes is last."""
    ranks, row = settings.ranks, row_layout(spec, settings.row_tokens)
    training = spec.training
    weights, trained = (
        formulas.share_of(formulas.WIDE * count, ranks)
        for count in (shape.parameters, formulas.trained_parameters(shape, training))
    )
    yield Item("weights, float32", weights)
    if training.lora:
        yield Item("adapters, float32", trained)
    yield Item("gradients, float32", trained)
    name = "AdamW state" if training.optimizer == "adamw" else "Muon and AdamW state"
    yield Item(name, formulas.share_of(formulas.optimizer_bytes(shape, training), ranks))
    if training.kl_coefficient and not training.lora:  # the frozen weights are the first policy's
        yield Item("first policy, for the KL penalty", weights)
    if teacher is not None:
        yield Item("teacher, float32", formulas.share_of(formulas.WIDE * teacher.parameters, ranks))
    if settings.autocast and (cast := formulas.cast_weight_bytes(shape, ranks, recompute=settings.recompute)):
        yield Item("layers' weights in 16 bits", cast)
    activations = formulas.activation_bytes(
        shape, training, tokens=row.tokens, padded=row.padded, autocast=settings.autocast, recompute=settings.recompute
    )
    head = formulas.head_bytes(shape, ranks, drawn=row.drawn)
    gathered = formulas.gathered_layer_bytes(shape, training, ranks, autocast=settings.autocast)
    embedding = 0 if training.lora else formulas.embedding_gradient_bytes(shape, ranks)
    passing = [
        Item("at most at a time: activations, a chunk of logits", activations + head),
        Item("at most at a time: activations, gathered layers", activations + gathered),
        Item("at most at a time: gradient of the embedding", embedding),
    ]
    if teacher is not None:
        scoring = formulas.frozen_forward_bytes(
            teacher, ranks, tokens=row.tokens, padded=row.padded, drawn=row.drawn, autocast=settings.autocast
        )
        passing.append(Item("at most at a time: activations, teacher's pass", activations + scoring))
    yield max(passing, key=lambda item: item.bytes)


def plan_trainer(
    shape: ModelShape, spec: RunSpec, cards: Cards, *, teacher: ModelShape | None = None
) -> tuple[TrainerOptions, RoleMemory]:
    """Choose the longest rows that fit, without recomputation where that fits, and say what is missing otherwise."""

    def rank_bytes(settings: TrainerOptions) -> int:
        return CUDA_BYTES + sum(item.bytes for item in trainer_items(shape, spec, settings, teacher=teacher))

    settings = next(
        (each for each in _choices(spec, cards.count) if rank_bytes(each) <= cards.memory),
        _leanest(spec, cards.count),
    )
    items = (*trainer_items(shape, spec, settings, teacher=teacher), Item("CUDA, NCCL and the allocator", CUDA_BYTES))
    memory = RoleMemory(role="trainer", where=f"each of {cards}", items=items, allowed=cards.memory)
    if memory.missing:
        ranks = range(cards.count + 1, MOST_RANKS)
        enough = next((n for n in ranks if rank_bytes(_leanest(spec, n)) <= cards.memory), None)
        memory = msgspec.structs.replace(memory, advice=_trainer_advice(cards, enough, need=memory.total))
    return settings, memory


def _choices(spec: RunSpec, ranks: int) -> Iterator[TrainerOptions]:
    longest = spec.sampling.most_tokens
    rows = [longest * times for times in (4, 2) if longest * times <= MOST_ROW_TOKENS]
    for recompute in (False, True):
        for tokens in (*rows, longest):
            yield TrainerOptions(ranks=ranks, row_tokens=tokens, recompute=recompute, autocast=True)


def _leanest(spec: RunSpec, ranks: int) -> TrainerOptions:
    return TrainerOptions(ranks=ranks, row_tokens=spec.sampling.most_tokens, recompute=True, autocast=True)


def _trainer_advice(cards: Cards, enough: int | None, *, need: int) -> str:
    larger = f"{cards.count} of {gigabytes(need)} GB each"
    if enough is None:
        return f"no number of these GPUs holds what each rank holds whole; it takes {larger}, or a shorter --context"
    return f"give the trainer {enough} of these GPUs, or {larger}, or a shorter --context"


def vllm_items(shape: ModelShape, spec: RunSpec, *, parts: int, sequences: int) -> tuple[Item, ...]:
    """Return what each of the `parts` GPUs that share one engine holds for so many sequences of the longest kind."""
    dtype = spec.model.dtype
    cache = formulas.cache_bytes_per_token(shape, dtype=dtype, parts=parts) * spec.sampling.most_tokens * sequences
    return (
        Item(f"policy, {dtype}", formulas.share_of(formulas.weight_bytes(shape, dtype=dtype), parts)),
        Item(f"keys and values of {sequences} sequence{'s' if sequences > 1 else ''}", cache),
        Item("table of positions", 10 * shape.positions * shape.head_dim),
        Item("vLLM's activations and runtime", WORKING_BYTES),
    )


def fitting_sequences(shape: ModelShape, spec: RunSpec, *, parts: int, memory: int) -> int:
    """Return how many sequences of the longest kind vLLM decodes at once, at most `MOST_SEQUENCES`; 0 if none fits."""
    without = sum(item.bytes for item in vllm_items(shape, spec, parts=parts, sequences=0))
    one = formulas.cache_bytes_per_token(shape, dtype=spec.model.dtype, parts=parts) * spec.sampling.most_tokens
    return max(0, min(MOST_SEQUENCES, int((VLLM_SHARE * memory - without) // one)))


def plan_engine(role: str, shape: ModelShape, spec: RunSpec, cards: Cards) -> RoleMemory:
    """Plan one vLLM engine over all of `cards`, for as many sequences as fit, at least one."""
    sequences = max(1, fitting_sequences(shape, spec, parts=cards.count, memory=cards.memory))
    items = vllm_items(shape, spec, parts=cards.count, sequences=sequences)
    allowed = int(VLLM_SHARE * cards.memory)
    memory = RoleMemory(role=role, where=f"each of {cards}", items=items, allowed=allowed)
    if shape.heads % cards.count:
        said = f"{shape.heads} attention heads do not divide among {cards.count} GPUs: take {_part(shape, cards.count)}"
        return msgspec.structs.replace(memory, advice=said)
    if not memory.missing:
        return memory
    larger = f"{cards.count} of {gigabytes(memory.total / VLLM_SHARE)} GB each"
    enough = engine_parts(shape, spec, Cards(MOST_RANKS, cards.memory))
    said = f"take {enough} of these GPUs, or {larger}" if enough else f"take {larger}, or a shorter --context"
    return msgspec.structs.replace(memory, advice=said)


def engine_parts(shape: ModelShape, spec: RunSpec, cards: Cards) -> int | None:
    """Return the fewest of `cards` over which the policy and one sequence fit; None if all are too few."""
    parts = (n for n in range(1, cards.count + 1) if shape.heads % n == 0 and shape.hidden % n == 0)
    return next((n for n in parts if fitting_sequences(shape, spec, parts=n, memory=cards.memory)), None)


def cpu_verifier(shape: ModelShape, spec: RunSpec) -> RoleMemory:
    """Plan a verifier with --engine torch on a CPU: one policy, one group's prefill, and a second look."""
    items = list(measuring_items(shape, spec))
    if kept := formulas.kept_context_bytes(shape, spec):
        items.append(Item("keys and values of the prompt, from a row to the others", kept))
    if spec.limits.readings > 1 and spec.model.dtype != "float32":
        items.append(Item("policy, float32, for the second reading", formulas.WIDE * shape.parameters))
    if spec.limits.suspects:
        items.append(Item("second look, layer by layer", formulas.second_look_bytes(shape)))
    return RoleMemory(role="verifier", where="a CPU", items=tuple(items), allowed=None)


def measuring_items(shape: ModelShape, spec: RunSpec) -> tuple[Item, ...]:
    """Return what measuring one group of the longest completions takes in a process with the policy."""
    dtype, drawn = spec.model.dtype, spec.sampling.group_size * spec.sampling.max_new_tokens
    tokens = formulas.prefilled_tokens(shape, spec)
    return (
        Item(f"policy, {dtype}", formulas.weight_bytes(shape, dtype=dtype)),
        Item("prefill of one group", formulas.prefill_bytes(shape, dtype=dtype, tokens=tokens, drawn=drawn)),
        Item("compiled kernels and the runtime", formulas.VERIFIER_RUNTIME_BYTES),
    )


def disk_items(shape: ModelShape, spec: RunSpec, *, teacher: ModelShape | None = None) -> tuple[Item, ...]:
    """Return the disk of each role while a policy arrives; in steady state it is one policy less for all but trainers.

    Whole are as many as benchmarks/store.py finds (docs/broadcast.md, "Disk"); what is older is a delta
    (docs/adr/0030-old-versions-are-deltas.md).
    """
    dtype, kept = spec.model.dtype, spec.broadcast.keep_versions
    relayed = max(KEPT_DELTAS, kept)
    policy = formulas.weight_bytes(shape, dtype=dtype)
    delta = round(formulas.delta_bytes(policy, learning_rate=spec.training.learning_rate, dtype=dtype))
    state = formulas.WIDE * formulas.trained_parameters(shape, spec.training)
    state += formulas.optimizer_bytes(shape, spec.training)
    taught = () if teacher is None else (formulas.weight_bytes(teacher, dtype=teacher.dtype),)
    return (
        *(Item("trainer: teacher", size) for size in taught),
        Item(f"trainer: {formulas.CHECKPOINTS} checkpoints and the one being written", 4 * state),
        Item("trainer: first and newest policy", 2 * policy),
        Item("trainer: origin, for each policy that it keeps whole", policy),
        Item("trainer: origin, for each older one", delta),
        Item(f"verifier: 2 policies, {kept - 2} as deltas, and the next one", 3 * policy + (kept - 2) * delta),
        Item(f"relay: 2 policies, {relayed} deltas, and the next policy", 3 * policy + relayed * delta),
        Item("worker: one policy, and the next one", 2 * policy),
    )


def gigabytes(count: float) -> int:
    """Round bytes up to whole gigabytes."""
    return -int(-count // 10**9)


def _part(shape: ModelShape, most: int) -> int:
    return next(n for n in range(most, 0, -1) if shape.heads % n == 0)
