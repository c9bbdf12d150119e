"""A plan as text of at most 80 columns, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from coordinator.planning.amounts import show_bytes, show_seconds
from coordinator.planning.experts import ExpertPlan
from coordinator.planning.plan import Machines, RunPlan
from coordinator.planning.proposal import proposed_values
from coordinator.planning.roles import RoleMemory

WIDTH = 80
_LABEL = 56


def render_plan(plan: RunPlan, machines: Machines) -> str:
    """Render the whole plan for a person."""
    sections = [
        _model(plan),
        *(_memory(role, plan) for role in plan.memory),
        *([_experts(plan.experts)] if plan.experts else []),
        _disk(plan),
        _broadcast(plan, machines),
        _work(plan, machines),
        _proposal(plan),
        _assumptions(plan),
        _conclusion(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def render_json(plan: RunPlan) -> str:
    """Render the plan as one JSON object, with the totals of each role and what does not fit."""
    values: dict[str, Any] = msgspec.to_builtins(plan)
    for role, found in zip(values["memory"], plan.memory, strict=True):
        role |= {"total": found.total, "missing": found.missing}
    values["work"]["verified_share"] = plan.work.verified_share
    return json.dumps(values | {"fits": plan.fits})


def _line(label: str, value: str) -> str:
    return f"  {label:<{_LABEL}}{value:>{WIDTH - 2 - _LABEL}}"


def _model(plan: RunPlan) -> Iterator[str]:
    model = plan.model
    yield f"{model.name}: {model.family}, {model.parameters:,} parameters"
    if not model.runs_here:
        yield "THIS RELEASE CANNOT RUN THIS FAMILY: what follows is on paper only."
    if model.active != model.parameters:
        yield _line("parameters that one token meets", f"{model.active:,}")
    yield _line("largest layer", f"{model.largest_layer:,}")
    yield _line("embeddings, head and last norm", f"{model.outside_layers:,}")
    yield _line(f"one copy in {plan.spec.model.dtype}", show_bytes(plan.full_bytes))


def _memory(role: RoleMemory, plan: RunPlan) -> Iterator[str]:
    yield f"Memory of the {role.role}, on {role.where}"
    for item in role.items:
        yield _line(item.name, show_bytes(item.bytes))
    if role.allowed is None:
        yield _line("together", show_bytes(role.total))
    else:
        yield _line("together", f"{show_bytes(role.total)} of {show_bytes(role.allowed)}")
    if role.role == "trainer":
        settings = plan.settings
        yield f"  with --row-tokens {settings.row_tokens} --autocast bfloat16" + " --recompute" * settings.recompute
    if role.advice:
        short = f"is short of {show_bytes(role.missing)}: " if role.missing else ""
        yield from wrapped(f"DOES NOT FIT: {short}{role.advice}.")


def _experts(found: ExpertPlan) -> Iterator[str]:
    yield f"Expert parallelism over the trainer's {found.ranks} GPUs, ON PAPER ONLY"
    yield from wrapped("The trainer shares out each layer's experts by rows, and gathers the layer (FSDP2).")
    yield _line("experts of a layer on each GPU", f"{found.most_of_a_layer} of {found.experts}")
    for item in found.items:
        yield _line(item.name, show_bytes(item.bytes))
    yield _line("together", show_bytes(found.total))
    yield _line("a step: tokens' states that each GPU would receive", show_bytes(found.sent_bytes))
    yield _line("a step: experts that each receives, and gradients, now", show_bytes(found.gathered_bytes))


def _disk(plan: RunPlan) -> Iterator[str]:
    yield "Disk"
    for item in plan.disk:
        yield _line(item.name, show_bytes(item.bytes))


def _broadcast(plan: RunPlan, machines: Machines) -> Iterator[str]:
    yield f"Broadcast to {machines.workers:,} workers over {machines.relays:,} relays"
    yield _line("whole policy", show_bytes(plan.full_bytes))
    yield _line("delta of one step", show_bytes(plan.delta_bytes))
    for each in plan.broadcasts:
        yield _line(each.name, show_seconds(each.seconds))


def _work(plan: RunPlan, machines: Machines) -> Iterator[str]:
    work = plan.work
    yield f"A step of {plan.spec.batch.groups_per_step:,} groups, each completion as long as it may be"
    yield _line("tokens", f"{work.tokens:,}")
    yield _line("operations: workers", f"{work.worker_operations:.2e}")
    yield _line("operations: verifiers", f"{work.verifier_operations:.2e}")
    yield _line("operations: trainer", f"{work.trainer_operations:.2e}")
    yield _line("verifiers' operations over workers'", f"{work.verified_share:.2f}")
    yield _line("sequences that one worker decodes at once", f"{work.sequences:,}")
    yield _line("seconds of one worker's full group", show_seconds(work.slot_seconds))
    yield _line(f"step: {machines.workers:,} workers", show_seconds(work.worker_seconds))
    verifier = "on a CPU: measure" if work.verifier_seconds is None else show_seconds(work.verifier_seconds)
    yield _line("step: verifier", verifier)
    yield _line("step: trainer", show_seconds(work.trainer_seconds))


def _proposal(plan: RunPlan) -> Iterator[str]:
    yield "run.toml"
    for section, key, value, why in proposed_values(plan):
        name = f"{section}.{key}"
        yield from wrapped(why, first=f"  {name:<30}{value!s:<10} ", rest=" " * 43)


def _assumptions(plan: RunPlan) -> Iterator[str]:
    yield "Assumed"
    for each in plan.assumptions:
        yield from wrapped(each.text, first=f"  {each.kind:<10}", rest=" " * 12)


def _conclusion(plan: RunPlan) -> Iterator[str]:
    if plan.fits and plan.model.runs_here:
        yield "All of it fits. None of this was run on a GPU: benchmarks/gpu.sh measures one."
    elif plan.fits:
        yield "All of it would fit, but this release cannot run this family."
    else:
        roles_short = ", ".join(role.role for role in plan.memory if role.advice)
        yield f"Does not fit: {roles_short}. What would make it fit stands above."


def wrapped(text: str, *, first: str = "  ", rest: str = "  ") -> Iterator[str]:
    """Break `text` into lines of at most `WIDTH` columns."""
    line = first
    for word in text.split():
        if len(line) + len(word) + 1 > WIDTH and line.strip():
            yield line.rstrip()
            line = rest
        line += word + " "
    yield line.rstrip()
