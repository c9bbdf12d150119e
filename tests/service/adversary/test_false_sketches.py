"""Sketches that are not of the states that the policy computes for this sample, through the coordinator's door.

Tokens and log-probabilities are honest throughout, and the bytes are well formed: any are the sketch of something.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import msgspec
import pytest
import torch
from swarm import TIGHT, Swarm, running, small_spec

from coordinator.storage import log
from node.audit.leaves import read_entry
from node.protocol.admission import Finding, Outcome
from node.protocol.messages import VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import BatchSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout, toploc_bytes
from node.verification.proofs import build_proofs

SKETCH, BOTH = ProofSpec(scheme="sketch/1"), ProofSpec(scheme="toploc/1+sketch/1")

Forge = Callable[[Swarm, list[Rollout]], list[Rollout]]
"""From an honest group to one with other proofs."""


def spec_of(proofs: ProofSpec) -> RunSpec:
    return small_spec(
        sampling=SamplingSpec(group_size=4, max_new_tokens=40),
        batch=BatchSpec(groups_per_step=20, rejection_backoff_seconds=0.0),
        limits=msgspec.structs.replace(TIGHT, sketch_distance=1.5),
        proofs=proofs,
    )


@pytest.fixture(scope="module", params=[SKETCH, BOTH], ids=lambda proofs: proofs.scheme)
def swarm(request: pytest.FixtureRequest, tmp_path_factory, tiny_policy_path: Path) -> Iterator[Swarm]:
    with running(tmp_path_factory.mktemp("run"), tiny_policy_path, spec=spec_of(request.param)) as swarm:
        yield swarm


def finding(swarm: Swarm, forge: Forge) -> Finding:
    """What is found in a slot of an honest worker whose proofs were replaced."""
    peer = swarm.peer()
    lease = peer.lease()
    receipt = swarm.judge(peer, forge(swarm, swarm.honest(lease)), lease)
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.PROOF_MISMATCH), receipt
    with swarm.home.database.read() as connection:
        (leaf,) = log.leaves(connection, receipt.log_index, receipt.log_index + 1)
    entry = read_entry(leaf)
    assert isinstance(entry, VerdictEntry)
    assert entry.finding is not None
    return entry.finding


def sketches_replaced(swarm: Swarm, rollout: Rollout, sketches: list[bytes]) -> Rollout:
    """Other sketches behind the honest TOPLOC parts."""
    cut = toploc_bytes(swarm.home.spec.proofs)
    proofs = [proof[:cut] + sketch for proof, sketch in zip(rollout.proofs, sketches, strict=True)]
    assert [len(proof) for proof in proofs] == [len(proof) for proof in rollout.proofs]
    return msgspec.structs.replace(rollout, proofs=proofs)


def own_sketches(swarm: Swarm, rollout: Rollout) -> list[bytes]:
    return [proof[toploc_bytes(swarm.home.spec.proofs) :] for proof in rollout.proofs]


def filled(swarm: Swarm, rollout: Rollout, source: bytes) -> Rollout:
    """Sketches cut from `source`, over and over."""
    octets = cycle(source)
    return sketches_replaced(swarm, rollout, [bytes(islice(octets, len(own))) for own in own_sketches(swarm, rollout)])


@torch.inference_mode()
def sketched(swarm: Swarm, rollout: Rollout, *, prompt_ids: Sequence[int], seed: bytes) -> Rollout:
    """The true sketch of the same completion after another prompt, or for another sample."""
    policy, proofs = swarm.engine.policy, swarm.home.spec.proofs
    ids = torch.tensor([[*prompt_ids, *rollout.completion_ids]])
    states = policy.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-1][0, :-1]
    chunks = list(torch.split(states[-len(rollout.completion_ids) :].bfloat16(), proofs.chunk_tokens))
    others = build_proofs(chunks, [seed] * len(chunks), spec=proofs)
    return sketches_replaced(swarm, rollout, [proof[toploc_bytes(proofs) :] for proof in others])


def test_honest_sketches_are_admitted(swarm: Swarm) -> None:
    """Or nothing below means anything."""
    peer = swarm.peer()
    for _ in range(2):
        lease = peer.lease()
        receipt = swarm.judge(peer, swarm.honest(lease), lease)
        assert receipt.outcome is Outcome.ADMITTED, receipt


def test_a_sketch_of_another_prompt_is_rejected(swarm: Swarm) -> None:
    """An easier problem behind the slot's own: with a hint in front, the states are those of another prompt."""
    hint = swarm.engine.policy.tokenizer.backend_tokenizer.encode("Hint: say 7. ").ids

    def hinted(swarm: Swarm, group: list[Rollout]) -> list[Rollout]:
        return [sketched(swarm, one, prompt_ids=[*hint, *one.prompt_ids], seed=one.seed) for one in group]

    assert finding(swarm, hinted).figure == "sketch_distance"


def test_a_random_sketch_is_rejected(swarm: Swarm) -> None:
    rng = random.Random(1)
    found = finding(swarm, lambda swarm, group: [filled(swarm, one, rng.randbytes(4096)) for one in group])
    assert found.figure == "sketch_distance"
    assert found.value > 3


@pytest.mark.parametrize("octet", [0x00, 0x88, 0xFF])
def test_a_constant_sketch_is_rejected(swarm: Swarm, octet: int) -> None:
    """The constant that other fingerprints accept: here no level is likelier than another, whatever the states are."""
    found = finding(swarm, lambda swarm, group: [filled(swarm, one, bytes([octet])) for one in group])
    assert found.figure == "sketch_distance"


def test_a_replayed_sketch_of_another_sample_is_rejected(swarm: Swarm) -> None:
    """Each row carries the honest sketch of its neighbour, of the same prompt and often of the same first tokens."""

    def swapped(swarm: Swarm, group: list[Rollout]) -> list[Rollout]:
        neighbours = [*group[1:], group[0]]
        return [
            filled(swarm, one, b"".join(own_sketches(swarm, other)))
            for one, other in zip(group, neighbours, strict=True)
        ]

    assert finding(swarm, swapped).figure == "sketch_distance"


def test_the_sketch_of_a_sample_with_the_projections_of_another_is_rejected(swarm: Swarm) -> None:
    """A prefix that two samples share has the same states in both, and still not the same sketch."""

    def reseeded(swarm: Swarm, group: list[Rollout]) -> list[Rollout]:
        return [sketched(swarm, one, prompt_ids=one.prompt_ids, seed=bytes(16)) for one in group]

    assert finding(swarm, reseeded).figure == "sketch_distance"


def test_one_false_sketch_among_honest_rows_is_found(swarm: Swarm) -> None:
    rng = random.Random(2)
    found = finding(swarm, lambda swarm, group: [*group[:3], filled(swarm, group[3], rng.randbytes(4096))])
    assert (found.figure, found.row) == ("sketch_distance", 3)


def test_a_sketch_that_is_right_but_for_its_last_tokens_is_rejected(swarm: Swarm) -> None:
    """Decoding the last tokens with something cheaper: a few tokens must not hide behind many honest ones."""
    rng = random.Random(3)

    def cut_short(swarm: Swarm, group: list[Rollout]) -> list[Rollout]:
        rows = []
        for one in group:
            own = own_sketches(swarm, one)
            whole = b"".join(own)
            kept = len(whole) // 8 * 4
            rows.append(filled(swarm, one, whole[:kept] + rng.randbytes(len(whole) - kept)))
        return rows

    assert finding(swarm, cut_short).figure == "sketch_distance"


def test_sketches_of_the_wrong_length_cost_no_forward_pass(swarm: Swarm) -> None:
    peer = swarm.peer()
    lease = peer.lease()
    group = swarm.honest(lease)
    short = msgspec.structs.replace(group[2], proofs=[proof[:-4] for proof in group[2].proofs])
    receipt = swarm.judge(peer, [*group[:2], short, group[3]], lease)
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.MALFORMED_PROOF)
    assert receipt.detail.startswith("Row 2, proof 0 "), receipt
