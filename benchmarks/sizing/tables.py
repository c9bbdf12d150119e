"""What a real policy's swarm showed, as figures, a row for each role, and a row for each stage beside its floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Final

import torch

from benchmarks.sizing.machine import Bandwidth
from benchmarks.sizing.swarm import OPERATOR, RELAY, TORCH, VLLM, Observations
from node.policy.skeleton import build_skeleton, unique_tensors
from node.protocol.admission import Outcome
from node.protocol.run import RunSpec

MIB = 2**20
_Row = tuple[str, float, float, str]
"""A stage, its seconds, the least that it could take, and what that is made of."""

KEYS: Final = (
    "parameters",
    "worker_peak_over_policy",
    "verifier_peak_over_policy",
    "relay_peak_mib",
    "disk_copies_worker",
    "delta_end_to_end_s",
    "honest_groups_rejected",
    "audit_exit_code",
)


@dataclass(frozen=True, slots=True)
class Size:
    """A policy in numbers: its parameters, those of its layers and its head, its bytes, and those of a cached token."""

    parameters: int
    layers: int
    head: int
    policy_bytes: int
    cache_bytes: int

    @staticmethod
    def of(config: Any) -> Size:
        """Count them in bfloat16."""
        tensors = unique_tensors(build_skeleton(config, dtype=torch.bfloat16))
        parameters = sum(tensor.numel() for tensor in tensors.values())
        return Size(
            parameters=parameters,
            layers=sum(tensor.numel() for name, tensor in tensors.items() if ".layers." in name),
            head=config.vocab_size * config.hidden_size,
            policy_bytes=2 * parameters,
            cache_bytes=2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim,
        )


def figures(found: Observations, size: Size, spec: RunSpec) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures, and notes on those that need one."""
    notes = {}
    outcomes = [outcome for _, _, outcome in found.outcomes]
    (step,) = (each for each in found.steps if each["step"] == 0)
    (fetched,) = found.events(TORCH, "policy_fetched", policy=1)[:1]
    peaks = {row["role"]: row["peak_over_policy"] for row in roles(found, size, spec)}
    values = {
        "parameters": size.parameters,
        "policy_mib": size.policy_bytes / MIB,
        "worker_peak_over_policy": peaks[TORCH],
        "worker_vllm_peak_over_policy": peaks.get(VLLM),
        "verifier_peak_over_policy": peaks["verifier"],
        "trainer_peak_bytes_per_parameter": found.meter.peak_bytes("trainer") / size.parameters,
        "auditor_peak_over_policy": peaks["auditor"],
        "relay_peak_mib": found.meter.peak_bytes(RELAY) / MIB,
        "coordinator_peak_mib": found.meter.peak_bytes("coordinator") / MIB,
        "disk_copies_worker": found.disk[TORCH] / size.policy_bytes,
        "disk_copies_relay": found.disk[RELAY] / size.policy_bytes,
        "disk_copies_verifier": found.disk["verifier"] / size.policy_bytes,
        "disk_copies_trainer": found.disk["trainer"] / size.policy_bytes,
        "entropy_nats": step["stats"]["entropy"],
        "delta_mib": fetched["transferred_bytes"] / MIB,
        "delta_end_to_end_s": began_to_draw(found, policy=1) - _trained_at(step),
        "groups_admitted": outcomes.count(Outcome.ADMITTED),
        "honest_groups_rejected": outcomes.count(Outcome.REJECTED),
        "audit_exit_code": found.audit_exit_code,
    }
    if values["worker_vllm_peak_over_policy"] is None:
        notes["worker_vllm_peak_over_policy"] = "no worker with vLLM"
    if found.audit_message:
        notes["audit_exit_code"] = found.audit_message
    return values, notes


def _trained_at(step: dict[str, Any]) -> float:
    """Return when a step's last update ended, in Unix seconds: what the trainer did from then on, it measures."""
    stats = step["stats"]
    return float(step["finished_at"] - stats["publish_seconds"] - stats["publish_stall_seconds"])


def began_to_draw(found: Observations, *, policy: int) -> float:
    """Return when the worker with torch began to draw the first slot of `policy`, in Unix seconds."""
    (first,) = found.events(TORCH, "slot_generated", policy=policy)[:1]
    return found.moment(first) - first["seconds"]


def roles(found: Observations, size: Size, spec: RunSpec) -> list[dict[str, Any]]:
    """Return what each role took: memory at its peak, processor time, and disk when all was done."""
    # A decoder has a column for each token of its rows from the start.
    cache = size.cache_bytes * spec.sampling.group_size * spec.sampling.most_tokens
    rows = []
    for role in (*OPERATOR, RELAY, TORCH, VLLM, "auditor"):
        peak = found.meter.peak_bytes(role)
        if not peak:
            continue
        counted = peak - cache if role == TORCH and found.meter.device == "cpu" else peak
        rows.append(
            {
                "role": role,
                "peak_mib": round(peak / MIB, 1),
                "peak_over_policy": round(counted / size.policy_bytes, 3),
                "device_peak_mib": round(found.meter.device_peak_bytes(role) / MIB, 1),
                "cpu_seconds": round(found.meter.cpu_seconds(role), 1),
                "disk_mib": round(found.disk[role] / MIB, 1),
                "disk_copies": round(found.disk[role] / size.policy_bytes, 3),
            }
        )
    return rows


def stages(
    found: Observations, size: Size, spec: RunSpec, disk: Bandwidth, rates: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return the seconds of each stage beside the least that this machine could take, and what that is made of."""
    whole = size.policy_bytes
    generated = [each for each in found.events(TORCH, "slot_generated") if each["policy"] == 0]
    reads, group = whole / disk.memory, spec.sampling.group_size
    per_token = _product_seconds(size, rates, dtype=spec.model.dtype)
    drawn_rows = partial(_drawn_rows, found, least=max(reads / group, per_token), products=per_token)
    per_trained = 3 * _product_seconds(size, rates, dtype="bfloat16" if found.meter.device == "cuda" else "float32")
    (step,) = (each["stats"] for each in found.steps if each["step"] == 0)
    published = found.logged_at("trainer", "policy 0 published")

    def seconds_of(kind: str, policy: int) -> float:
        return sum(each["seconds"] for each in found.events(TORCH, kind, policy=policy))

    rows: list[_Row] = [
        (
            "first publish",
            published - found.started["trainer"],
            whole / disk.disk_read + whole / disk.disk_write,
            "read, written once",
        ),
        ("relay, whole", found.arrivals[0] - published, whole / disk.disk_write, "written once"),
        ("worker, fetch whole", seconds_of("policy_fetched", 0), whole / disk.disk_write, "written once"),
        ("worker, load", seconds_of("policy_loaded", 0), 2 * reads, "copied in memory"),
        *drawn_rows(TORCH, generated, names=("worker, draw", "verify a group")),
        (
            "step",
            step["train_seconds"],
            per_trained * step["tokens"] + 28 * size.parameters / disk.memory,
            "products of drawn tokens, AdamW's passes over its state",
        ),
        (
            "publish delta",
            step["publish_seconds"],
            3 * reads + whole / disk.disk_write,
            "written once, two versions read",
        ),
        ("worker, fetch delta", seconds_of("policy_fetched", 1), whole / disk.disk_write + 2 * reads, "written once"),
        ("worker, load again", seconds_of("policy_loaded", 1), 2 * reads, "copied in memory"),
        ("audit of 2 verdicts", found.audit_seconds, whole / disk.disk_write, "written once"),
    ]
    if drawn := found.events(VLLM, "slot_generated"):  # the first load of the newcomer with vLLM starts the engine
        loaded = found.events(VLLM, "policy_loaded")[0]["seconds"]
        rows.append(("vLLM, start and load", loaded, 2 * reads, "copied in memory"))
        rows += drawn_rows(VLLM, drawn, names=("vLLM, draw", "verify a group of vLLM's"))
    return [
        {"stage": stage, "seconds": round(taken, 2), "floor_seconds": round(floor, 2), "floor": floor_of}
        for stage, taken, floor, floor_of in rows
    ]


def _drawn_rows(
    found: Observations,
    worker: str,
    drawn: Sequence[Mapping[str, Any]],
    *,
    names: tuple[str, str],
    least: float,
    products: float,
) -> list[_Row]:
    """Return a row of what a worker drew and one of judging a group of it; `least` and `products` take a token."""
    tokens = sum(each["tokens"] for each in drawn)
    return [
        (
            names[0],
            sum(each["seconds"] for each in drawn),
            least * tokens,
            "weights read for each token of a group, or products",
        ),
        (names[1], _verified_seconds(found, worker), products * tokens / len(drawn), "products of drawn tokens"),
    ]


def _product_seconds(size: Size, rates: Mapping[str, float], *, dtype: str) -> float:
    """Return the least seconds of a token's products, the layers' in `dtype` and the head's in float32."""
    return 2 * (size.layers / rates[dtype] + size.head / rates["float32"])


def _verified_seconds(found: Observations, worker: str) -> float:
    """Return the mean time from a group's submission to its verdict; not of the first, for which the policy is read."""
    submitted = {each["submission"]: found.moment(each) for each in found.events(worker, "slot_submitted")}
    verdicts = [each for kind in ("slot_admitted", "slot_rejected") for each in found.events(worker, kind)]
    taken = [found.moment(each) - submitted[each["submission"]] for each in sorted(verdicts, key=found.moment)]
    return fmean(taken[1:] or taken)
