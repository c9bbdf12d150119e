"""Slots: which problem and which seeds (docs/protocol.md, section 5).

They depend on the run, the policy's manifest and the slot's number alone. A node has no say in them, so
neither more identities nor abandoned leases buy a choice of work.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from node.protocol.run import RunSpec
from shardcast.wire import derive

SEED_BYTES = 16


@dataclass(frozen=True, slots=True)
class SlotProblem:
    """Which environment of the run's list, and which of its problems (an index below 2**63)."""

    environment: int
    problem: int


def slot_problem(spec: RunSpec, *, run_id: str, manifest_digest: str, slot: int) -> SlotProblem:
    """The problem of `slot` at the policy whose manifest has `manifest_digest`."""
    drawn = derive(
        "veriswarm/1 slot problem", bytes.fromhex(run_id), bytes.fromhex(manifest_digest), slot.to_bytes(8, "big")
    )
    bounds = list(accumulate(environment.weight for environment in spec.environments))
    ticket = int.from_bytes(drawn[:8], "big") % bounds[-1]
    return SlotProblem(environment=bisect_right(bounds, ticket), problem=int.from_bytes(drawn[8:16], "big") >> 1)


def sample_seed(*, run_id: str, manifest_digest: str, slot: int, sample: int) -> bytes:
    """The 16-byte sampling seed of one completion of a slot's group."""
    return derive(
        "veriswarm/1 sample seed",
        bytes.fromhex(run_id),
        bytes.fromhex(manifest_digest),
        slot.to_bytes(8, "big"),
        sample.to_bytes(4, "big"),
    )[:SEED_BYTES]


def group_seeds(spec: RunSpec, *, run_id: str, manifest_digest: str, slot: int) -> list[bytes]:
    """The seeds of all completions of a slot, in row order."""
    return [
        sample_seed(run_id=run_id, manifest_digest=manifest_digest, slot=slot, sample=sample)
        for sample in range(spec.sampling.group_size)
    ]
