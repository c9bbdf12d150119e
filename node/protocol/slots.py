"""Derivation of a slot's problem and seeds (docs/protocol.md, section 5).

They depend on the run, the policy's manifest and the slot's number alone. A node has no say in them, so
neither more identities nor abandoned leases buy a choice of work. Where a run has pools (`node.protocol.pools`), a slot
has a few candidates, and the log says which of them it is for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from node.protocol.run import ProblemsSpec, RunSpec
from shardcast.wire import derive

SEED_BYTES = 16
MOST_CANDIDATES = 32


@dataclass(frozen=True, slots=True)
class SlotProblem:
    """Which environment of the run's list, and which of its problems: an index below 2**63, or of a finite set."""

    environment: int
    problem: int


def slot_problem(spec: RunSpec, *, run_id: str, manifest_digest: str, slot: int, candidate: int = 0) -> SlotProblem:
    """Return the problem of `slot` at the policy with `manifest_digest`: its only one, or this candidate."""
    where = bytes.fromhex(run_id), bytes.fromhex(manifest_digest), slot.to_bytes(8, "big")
    drawn = derive("swarmproof/1 slot problem", *where)
    bounds = list(accumulate(environment.weight for environment in spec.environments))
    environment = bisect_right(bounds, int.from_bytes(drawn[:8], "big") % bounds[-1])
    number = drawn[8:16]
    if candidate:
        number = derive("swarmproof/1 slot candidate", *where, candidate.to_bytes(4, "big"))[:8]
    index, problems = int.from_bytes(number, "big") >> 1, spec.environments[environment].problems
    if isinstance(problems, ProblemsSpec):
        kept = kept_problems(problems)
        index = kept[index % len(kept)]
    return SlotProblem(environment=environment, problem=index)


@lru_cache(maxsize=128)
def kept_problems(problems: ProblemsSpec) -> Sequence[int]:
    """Return the indexes of a finite set's problems that are kept, ascending."""
    kept = problems.kept
    if kept is None:
        return range(problems.count)
    return array("I", (at for at in range(problems.count) if kept[at // 8] >> (at % 8) & 1))


def sample_seed(*, run_id: str, manifest_digest: str, slot: int, sample: int) -> bytes:
    """Return the 16-byte sampling seed of one completion of a slot's group."""
    return derive(
        "swarmproof/1 sample seed",
        bytes.fromhex(run_id),
        bytes.fromhex(manifest_digest),
        slot.to_bytes(8, "big"),
        sample.to_bytes(4, "big"),
    )[:SEED_BYTES]


def group_seeds(spec: RunSpec, *, run_id: str, manifest_digest: str, slot: int) -> list[bytes]:
    """Return the seeds of all completions of a slot, in row order."""
    return [
        sample_seed(run_id=run_id, manifest_digest=manifest_digest, slot=slot, sample=sample)
        for sample in range(spec.sampling.group_size)
    ]
