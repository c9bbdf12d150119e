"""Finite sets and pools of problems: what each slot is for follows from the seed and the log, and from nothing else."""

from __future__ import annotations

import base64
import json
from collections import Counter

import pytest
from blake3 import blake3
from locations import VECTORS_FOLDER

from node.protocol.messages import Lease
from node.protocol.pools import (
    Pool,
    PoolHistory,
    candidates,
    first_candidate,
    group_mean,
    has_candidate,
    pool_of,
    slot_pool,
)
from node.protocol.run import BatchSpec, EnvironmentSpec, PoolsSpec, ProblemsSpec, RunSpec
from node.protocol.slots import MOST_CANDIDATES, SlotProblem, slot_problem
from shardcast.wire import decode

VECTORS = json.loads((VECTORS_FOLDER / "protocol" / "slots.json").read_text())["pools"]
SPEC = decode(RunSpec, VECTORS["spec"].encode(), max_bytes=100_000)
RUN, MANIFEST = VECTORS["run_id"], VECTORS["manifest_digest"]
KEPT = [0, 3, 5, 9]
ENDLESS = EnvironmentSpec(name="reverse")


def by_document(context: str, *numbers: bytes) -> int:
    """The u64 at 0 of section 1.4's derivation, written apart from the code under test."""
    parts = (bytes.fromhex(RUN), bytes.fromhex(MANIFEST), *numbers)
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return int.from_bytes(blake3(framed, derive_key_context=context).digest()[:8], "big")


def finite_spec(*environments: EnvironmentSpec, pools: PoolsSpec | None = None) -> RunSpec:
    batch = BatchSpec() if pools is None else BatchSpec(pools=pools)
    return RunSpec(name="t", environments=environments, batch=batch)


def drawn(spec: RunSpec, slot: int, **means: float) -> int:
    """The candidate of `slot` where the problems `p0`, `p1`, … have these means."""
    return first_candidate(
        spec, run_id=RUN, manifest_digest=MANIFEST, slot=slot, mean_of=lambda one: means.get(f"p{one.problem}")
    )


# -- finite sets


def test_a_slot_is_for_a_kept_problem_and_the_one_of_the_document() -> None:
    """Bits 0, 3, 5 of the first byte and 1 of the second: 0b00101001 = 0x29 and 0x02."""
    problems = ProblemsSpec(count=10, kept=b"\x29\x02")
    spec = finite_spec(EnvironmentSpec(name="arithmetic", problems=problems))
    plain = finite_spec(EnvironmentSpec(name="arithmetic"))
    where = {"run_id": RUN, "manifest_digest": MANIFEST}
    for slot in range(100):
        index = slot_problem(plain, **where, slot=slot).problem
        assert slot_problem(spec, **where, slot=slot).problem == KEPT[index % 4]


def test_without_a_bitmap_every_problem_is_drawn_and_none_beyond() -> None:
    spec = finite_spec(EnvironmentSpec(name="arithmetic", problems=ProblemsSpec(count=3)))
    where = {"run_id": RUN, "manifest_digest": MANIFEST}
    assert {slot_problem(spec, **where, slot=slot).problem for slot in range(60)} == {0, 1, 2}


# -- pools


@pytest.mark.parametrize(
    ("mean", "pool"),
    [
        (None, "normal"),
        (0.0, "hard"),
        (0.25, "hard"),
        (0.26, "normal"),
        (0.74, "normal"),
        (0.75, "easy"),
        (1.0, "easy"),
    ],
)
def test_a_problem_is_as_hard_as_its_last_group_found_it(mean: float | None, pool: str) -> None:
    assert pool_of(mean, PoolsSpec(easy_from=0.75, hard_to=0.25)) == pool


def test_a_mean_is_the_same_on_every_machine() -> None:
    """Summed one by one ten times 0.1 are 0.9999999999999999, and a limit of 1/10 would be missed."""
    assert group_mean([0.1] * 10) == 0.1
    assert group_mean([1.0, 0.0, 0.0, 1.0]) == 0.5


def test_pools_and_candidates_are_those_of_the_document() -> None:
    pools = SPEC.batch.pools
    assert isinstance(pools, PoolsSpec)
    assert (pools.easy, pools.normal, pools.hard) == (1, 2, 1)
    for vector in VECTORS["slots"]:
        slot = vector["slot"].to_bytes(8, "big")
        ticket = by_document("swarmproof/1 slot pool", slot) % 4
        assert vector["pool"] == ("easy", "normal", "normal", "hard")[ticket]
        assert slot_pool(pools, run_id=RUN, manifest_digest=MANIFEST, slot=vector["slot"]) == vector["pool"]
        tried = list(candidates(SPEC, run_id=RUN, manifest_digest=MANIFEST, slot=vector["slot"]))
        assert [one.problem for one in tried[: len(vector["problems"])]] == vector["problems"]
        numbers = [by_document("swarmproof/1 slot candidate", slot, k.to_bytes(4, "big")) for k in range(1, 4)]
        assert vector["problems"][1:4] == [KEPT[number // 2 % 4] for number in numbers]
        means = VECTORS["means"]
        assert drawn(SPEC, vector["slot"], **{f"p{key}": value for key, value in means.items()}) == vector["candidate"]


def test_the_kept_problems_of_the_vectors_are_those_that_are_checked() -> None:
    problems = SPEC.environments[0].problems
    assert isinstance(problems, ProblemsSpec)
    assert problems.kept == base64.b64decode("KQI=")


def test_a_slot_takes_the_first_candidate_of_its_pool_or_the_last_of_all() -> None:
    spec = finite_spec(
        EnvironmentSpec(name="arithmetic", problems=ProblemsSpec(count=64)), pools=PoolsSpec(easy=0, normal=0, hard=1)
    )
    where = {"run_id": RUN, "manifest_digest": MANIFEST, "slot": 5}
    tried = [one.problem for one in candidates(spec, **where)]
    assert len(tried) == MOST_CANDIDATES
    assert drawn(spec, 5) == MOST_CANDIDATES - 1
    seventh = tried[7]
    assert drawn(spec, 5, **{f"p{seventh}": 0.0}) == tried.index(seventh)
    assert drawn(spec, 5, **dict.fromkeys((f"p{one}" for one in tried), 0.0)) == 0
    assert drawn(spec, 5, **dict.fromkeys((f"p{one}" for one in tried), 1.0)) == MOST_CANDIDATES - 1


def test_the_pools_have_their_shares() -> None:
    """Of 64 problems a quarter each is easy and hard: all candidates miss such a pool in one of ten thousand slots."""
    pools = PoolsSpec(easy=1, normal=8, hard=1)
    spec = finite_spec(EnvironmentSpec(name="arithmetic", problems=ProblemsSpec(count=64)), pools=pools)
    means = {f"p{at}": (1.0, 0.0, 0.5, 0.5)[at % 4] for at in range(64)}
    seen: Counter[Pool] = Counter()
    for slot in range(2000):
        problem = slot_problem(
            spec, run_id=RUN, manifest_digest=MANIFEST, slot=slot, candidate=drawn(spec, slot, **means)
        )
        seen[pool_of(means[f"p{problem.problem}"], pools)] += 1
    assert sum(seen.values()) == 2000
    for pool, share in (("easy", 0.1), ("normal", 0.8), ("hard", 0.1)):
        assert abs(seen[Pool(pool)] / 2000 - share) < 0.04


def test_an_environment_without_end_has_no_pools_in_a_run_that_has() -> None:
    finite = EnvironmentSpec(name="arithmetic", problems=ProblemsSpec(count=4))
    spec = finite_spec(finite, ENDLESS, pools=PoolsSpec(easy=0, normal=0, hard=1))
    plain = finite_spec(EnvironmentSpec(name="arithmetic"), ENDLESS)
    where = {"run_id": RUN, "manifest_digest": MANIFEST}
    seen = set()
    for slot in range(40):
        problem = slot_problem(spec, **where, slot=slot)
        seen.add(problem.environment)
        if problem.environment == 1:
            assert drawn(spec, slot) == 0
            assert problem == slot_problem(plain, **where, slot=slot)
        else:
            assert drawn(spec, slot) == MOST_CANDIDATES - 1
    assert seen == {0, 1}


def test_a_worker_takes_no_candidate_that_no_log_could_lead_to() -> None:
    """An operator would pick one of 32 problems of an endless environment, and workers would go along."""
    finite = EnvironmentSpec(name="arithmetic", problems=ProblemsSpec(count=4))
    spec, plain = finite_spec(finite, ENDLESS, pools=PoolsSpec()), finite_spec(finite, ENDLESS)

    def lease(slot: int, **candidate: int) -> Lease:
        return Lease(lease_id="00" * 32, version=0, manifest_digest=MANIFEST, slot=slot, expires_at=0, **candidate)

    seen = set()
    for slot in range(20):
        endless = slot_problem(spec, run_id=RUN, manifest_digest=MANIFEST, slot=slot).environment == 1
        seen.add(endless)
        assert has_candidate(spec, lease(slot, candidate=0), run_id=RUN)
        assert has_candidate(spec, lease(slot, candidate=7), run_id=RUN) is not endless
        assert not has_candidate(spec, lease(slot), run_id=RUN)
        assert has_candidate(plain, lease(slot), run_id=RUN)
        assert not has_candidate(plain, lease(slot, candidate=0), run_id=RUN)
    assert seen == {True, False}


def test_a_policys_pools_are_what_was_admitted_before_it() -> None:
    history, problem = PoolHistory(), SlotProblem(environment=0, problem=3)
    assert history.mean_before(problem, 5) is None
    history.note(problem, 0.2, head=1)
    history.note(problem, 0.4, head=1)
    history.note(problem, 0.6, head=4)
    seen = [history.mean_before(problem, version) for version in range(7)]
    assert seen == [None, None, 0.4, 0.4, 0.4, 0.6, 0.6]
    assert history.mean_before(SlotProblem(environment=1, problem=3), 6) is None
