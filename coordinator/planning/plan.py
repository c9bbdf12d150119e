"""A plan of a run: memory and disk of each role, work and time of a step, broadcasts, and what run.toml should say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from coordinator.errors import BadConfiguration
from coordinator.planning import formulas, roles
from coordinator.planning.amounts import Cards
from coordinator.planning.assumptions import Assumption, assumptions
from coordinator.planning.cards import BANDWIDTH_SHARE, COMPUTE_SHARE, speed_of
from coordinator.planning.experts import ExpertPlan, plan_experts
from coordinator.planning.roles import Item, RoleMemory, TrainerOptions
from coordinator.planning.shape import ModelShape
from node.protocol.run import RunSpec
from node.submission.writer import full_group_bytes

LEASE_FACTOR: Final = 3
"""Leases over the time that a full group takes: machines are slower than planned, or busy."""
LEASE_STEP_SECONDS: Final = 30
MOST_SUBMISSION_BYTES: Final = 2**31 - 1
"""That run.toml takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What there is; links are bytes a second. The trainer has the GPUs that no verifier takes."""

    cards: Cards
    verifier_cards: int | None
    workers: int
    worker_cards: Cards
    relays: int
    uplink: float
    downlink: float


class Duration(msgspec.Struct, frozen=True):
    """Seconds of something, and what they are of."""

    name: str
    seconds: float


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose completions are all as long as the run allows; operations in 16 bits, multiply-adds as two.

    `sequences` are those that one worker decodes at once, and `slot_seconds` what a group of them takes.
    """

    tokens: int
    worker_operations: float
    verifier_operations: float
    trainer_operations: float
    sequences: int
    slot_seconds: float
    worker_seconds: float
    verifier_seconds: float | None
    trainer_seconds: float

    @property
    def verified_share(self) -> float:
        """Operations of verifiers over those of workers."""
        return self.verifier_operations / self.worker_operations


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole plan. `spec` is what the run should say, `settings` what its trainer should be told.

    `experts` is what a trainer of a mixture would hold that had expert parallelism, which this one has not.
    """

    model: ModelShape
    spec: RunSpec
    settings: TrainerOptions
    memory: tuple[RoleMemory, ...]
    disk: tuple[Item, ...]
    work: StepWork
    full_bytes: int
    delta_bytes: float
    broadcasts: tuple[Duration, ...]
    experts: ExpertPlan | None
    assumptions: tuple[Assumption, ...]

    @property
    def fits(self) -> bool:
        """Whether every role's memory suffices."""
        return not any(role.advice for role in self.memory)


def make_plan(
    shape: ModelShape, spec: RunSpec, machines: Machines, *, is_given: bool, teacher: ModelShape | None = None
) -> RunPlan:
    """Plan a run of `spec` with its `teacher`, if it has one.

    Unless `spec` is given, its leases and its submissions' size are fitted to the plan.
    """
    trainer_cards, verifier_cards = _share_cards(shape, spec, machines)
    settings, trainer = roles.plan_trainer(shape, spec, trainer_cards, teacher=teacher)
    if verifier_cards is None:
        verifier = roles.cpu_verifier(shape, spec)
    else:
        verifier = roles.plan_engine("verifier", shape, spec, verifier_cards)
    worker = roles.plan_engine("worker", shape, spec, machines.worker_cards)
    relay = RoleMemory(role="relay", where="a CPU", items=(Item("all of it", roles.RELAY_BYTES),), allowed=None)
    work = _step_work(
        shape,
        spec,
        machines,
        settings=settings,
        trainer=trainer_cards,
        verifier=verifier_cards,
        teacher=teacher,
    )
    full = formulas.weight_bytes(shape, dtype=spec.model.dtype)
    delta = formulas.delta_bytes(full, learning_rate=spec.training.learning_rate, dtype=spec.model.dtype)
    return RunPlan(
        model=shape,
        spec=spec if is_given else fitted_spec(spec, work),
        settings=settings,
        memory=(trainer, verifier, worker, relay),
        disk=roles.disk_items(shape, spec, teacher=teacher),
        work=work,
        full_bytes=full,
        delta_bytes=delta,
        broadcasts=_broadcasts(full, delta, machines),
        experts=plan_experts(shape, spec, settings, tokens=work.tokens),
        assumptions=assumptions(delta_ratio=full / delta, cards=machines.cards, worker_cards=machines.worker_cards),
    )


def fitted_spec(spec: RunSpec, work: StepWork) -> RunSpec:
    """Return `spec` with leases and submissions large enough for a full group; raises BadConfiguration."""
    lease = max(60.0, math.ceil(LEASE_FACTOR * work.slot_seconds / LEASE_STEP_SECONDS) * LEASE_STEP_SECONDS)
    slots = max(1, work.sequences // spec.sampling.group_size)
    batch = msgspec.structs.replace(
        spec.batch, lease_seconds=float(lease), max_leases_per_node=max(spec.batch.max_leases_per_node, 2 * slots)
    )
    need = full_group_bytes(spec)
    if need > MOST_SUBMISSION_BYTES:
        raise BadConfiguration(
            f"a full group takes {need} bytes, more than a submission may have: make --group-size or --context smaller"
        )
    most = min(MOST_SUBMISSION_BYTES, 2 ** math.ceil(math.log2(need)))
    limits = msgspec.structs.replace(spec.limits, max_submission_bytes=max(spec.limits.max_submission_bytes, most))
    return msgspec.structs.replace(spec, batch=batch, limits=limits)


def _share_cards(shape: ModelShape, spec: RunSpec, machines: Machines) -> tuple[Cards, Cards | None]:
    """Give a verifier the fewest GPUs that hold it, or what was asked for, and the trainer the others."""
    cards = machines.cards
    count = machines.verifier_cards
    if count is None:
        fewest = roles.engine_parts(shape, spec, Cards(max(1, cards.count // 2), cards.memory))
        count = 0 if cards.count == 1 else fewest or 1
    trainer = Cards(cards.count - count, cards.memory)
    return trainer, Cards(count, cards.memory) if count else None


def _step_work(
    shape: ModelShape,
    spec: RunSpec,
    machines: Machines,
    *,
    settings: TrainerOptions,
    trainer: Cards,
    verifier: Cards | None,
    teacher: ModelShape | None,
) -> StepWork:
    sampling, groups = spec.sampling, spec.batch.groups_per_step
    drawn, longest = sampling.max_new_tokens, sampling.most_tokens
    each = drawn + sampling.reply_tokens
    group_tokens = sampling.max_prompt_tokens + sampling.group_size * each
    forward = groups * formulas.forward_operations(shape, tokens=group_tokens, context=longest / 2)
    # vLLM reads each completion whole, as its cache of prefixes is off in verifiers.
    measured = sampling.group_size * longest if verifier else formulas.prefilled_tokens(shape, spec)
    prefill = groups * formulas.forward_operations(shape, tokens=measured, context=longest / 2)
    adapters = formulas.adapter_parameters(shape, spec.training) / shape.active
    training = formulas.training_operations(forward, adapters=adapters, recompute=settings.recompute)
    if teacher is not None:
        training += groups * formulas.forward_operations(teacher, tokens=group_tokens, context=longest / 2)
    verifying = prefill * formulas.prefilled_share(spec, tokens=measured)
    cards = machines.worker_cards
    sequences = roles.fitting_sequences(shape, spec, parts=cards.count, memory=cards.memory)
    token_seconds = decode_seconds(shape, spec, cards, sequences=max(1, sequences))
    rounds = math.ceil(sampling.group_size / max(1, sequences))
    return StepWork(
        tokens=groups * group_tokens,
        worker_operations=forward,
        verifier_operations=verifying,
        trainer_operations=training,
        sequences=sequences,
        slot_seconds=rounds * drawn * token_seconds,
        worker_seconds=groups * sampling.group_size * drawn * token_seconds / max(1, sequences) / machines.workers,
        verifier_seconds=None if verifier is None else verifying / _operations(verifier),
        trainer_seconds=training / _operations(trainer),
    )


def decode_seconds(shape: ModelShape, spec: RunSpec, cards: Cards, *, sequences: int) -> float:
    """Return the seconds of one token of each sequence: weights and half-full caches are read, or computed with."""
    dtype, length = spec.model.dtype, spec.sampling.most_tokens / 2
    weights = formulas.ITEM_BYTES[dtype] * min(shape.parameters, shape.active * sequences) / cards.count
    caches = sequences * length * formulas.cache_bytes_per_token(shape, dtype=dtype, parts=cards.count)
    reading = (weights + caches) / (BANDWIDTH_SHARE * speed_of(cards.memory).bandwidth)
    return max(reading, formulas.forward_operations(shape, tokens=sequences, context=length) / _operations(cards))


def _operations(cards: Cards) -> float:
    return cards.count * COMPUTE_SHARE * speed_of(cards.memory).operations


def _broadcasts(full: float, delta: float, machines: Machines) -> tuple[Duration, ...]:
    def links(size: float) -> float:
        return formulas.broadcast_seconds(
            size,
            uplink=machines.uplink,
            downlink=machines.downlink,
            relays=machines.relays,
            workers=machines.workers,
        )

    core = formulas.delta_core_seconds(full)
    return (
        Duration("whole policy, over the links", links(full)),
        Duration("delta, over the links", links(delta)),
        Duration("delta, found on one core of the trainer", core),
        Duration("delta, applied on one core of each node", core),
    )
