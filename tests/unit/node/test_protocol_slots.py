"""Nobody chooses their work: problems and seeds follow from public values alone."""

from __future__ import annotations

import inspect
import json

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from locations import VECTORS_FOLDER

from node.protocol import slots
from node.protocol.run import EnvironmentSpec, RunSpec, SamplingSpec
from node.protocol.slots import group_seeds, sample_seed, slot_problem

VECTORS = json.loads((VECTORS_FOLDER / "protocol" / "slots.json").read_text())
RUN, MANIFEST = "11" * 32, "22" * 32


def make_spec(*weights: int, group_size: int = 4) -> RunSpec:
    return RunSpec(
        name="t",
        environments=tuple(EnvironmentSpec(name=f"e{at}", weight=weight) for at, weight in enumerate(weights)),
        sampling=SamplingSpec(group_size=group_size),
    )


def by_document(context: str, *parts: bytes) -> bytes:
    """Section 1.4's derivation, written apart from the code under test."""
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return blake3(framed, derive_key_context=context).digest()


@pytest.mark.parametrize("vector", VECTORS["slots"], ids=lambda v: f"{v['manifest_digest'][:4]}-{v['slot']}")
def test_slots_are_the_published(vector: dict) -> None:
    run_id, manifest, slot = bytes.fromhex(VECTORS["run_id"]), bytes.fromhex(vector["manifest_digest"]), vector["slot"]
    drawn = by_document("swarmproof/1 slot problem", run_id, manifest, slot.to_bytes(8, "big"))
    assert int.from_bytes(drawn[:8], "big") % 4 // 3 == vector["environment"]
    assert int.from_bytes(drawn[8:16], "big") // 2 == int(vector["problem"])
    seeds = [
        by_document("swarmproof/1 sample seed", run_id, manifest, slot.to_bytes(8, "big"), sample.to_bytes(4, "big"))
        for sample in range(VECTORS["group_size"])
    ]
    assert [seed[:16].hex() for seed in seeds] == vector["seeds"]

    spec = make_spec(*VECTORS["weights"])
    where = {"run_id": VECTORS["run_id"], "manifest_digest": vector["manifest_digest"], "slot": slot}
    problem = slot_problem(spec, **where)
    assert (problem.environment, str(problem.problem)) == (vector["environment"], vector["problem"])
    assert [seed.hex() for seed in group_seeds(spec, **where)] == vector["seeds"]


def test_more_identities_buy_no_choice_of_work() -> None:
    """No function of section 5 takes anything that a worker could vary: no key, no lease, no time.

    Which of its candidates a slot is for follows from the log (`test_protocol_pools`).
    """
    for function in (slot_problem, sample_seed, group_seeds):
        parameters = set(inspect.signature(function).parameters)
        assert parameters <= {"spec", "run_id", "manifest_digest", "slot", "sample", "candidate"}
    public = {
        name for name, value in vars(slots).items() if inspect.isfunction(value) and value.__module__ == slots.__name__
    }
    assert public == {"slot_problem", "sample_seed", "group_seeds"}


def test_no_two_samples_share_a_seed() -> None:
    """Two equal seeds in a group would be one draw counted twice; across slots, work done once and sold twice."""
    spec = make_spec(1, group_size=16)
    seeds = [
        seed
        for run_id in (RUN, "33" * 32)
        for manifest in (MANIFEST, "44" * 32)
        for slot in (0, 1, 255, 256, 2**32, 2**53 - 1)
        for seed in group_seeds(spec, run_id=run_id, manifest_digest=manifest, slot=slot)
    ]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 6 * 16
    assert {len(seed) for seed in seeds} == {16}


def test_a_policy_changes_the_problems() -> None:
    """Problems of version v + 1 cannot be solved before its manifest exists."""
    spec = make_spec(1)
    drawn = {
        slot_problem(spec, run_id=RUN, manifest_digest=f"{version:064x}", slot=0).problem for version in range(100)
    }
    assert len(drawn) == 100


def test_weights_are_honoured() -> None:
    spec, draws = make_spec(1, 4, 5), 5000
    counts = [0, 0, 0]
    for slot in range(draws):
        counts[slot_problem(spec, run_id=RUN, manifest_digest=MANIFEST, slot=slot).environment] += 1
    chi = sum(
        (count - draws * share) ** 2 / (draws * share) for count, share in zip(counts, (0.1, 0.4, 0.5), strict=True)
    )
    assert chi < 25  # two degrees of freedom: probability 4e-6


@given(weights=st.lists(st.integers(1, 1_000_000), min_size=1, max_size=100), slot=st.integers(0, 2**53 - 1))
@settings(max_examples=100, deadline=None)
def test_every_draw_names_a_problem_of_the_run(weights: list[int], slot: int) -> None:
    drawn = slot_problem(make_spec(*weights), run_id=RUN, manifest_digest=MANIFEST, slot=slot)
    assert 0 <= drawn.environment < len(weights)
    assert 0 <= drawn.problem < 2**63
