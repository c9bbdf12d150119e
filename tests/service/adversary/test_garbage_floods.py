"""Well-formed garbage: what costs its sender nothing must cost the verifier little, and be found wherever it stands.

Every file here passes the checks of the shape: the slot's prompt and seeds, valid token ids, log-probabilities and
proofs of the right number and size. Only proofs and tokens that a model computed are missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from verifying import InMemory, drawn, judged

from node.environments import Environment, load_environment
from node.episodes.expected import expected_of
from node.policy.file import Policy, load_policy
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec, LimitsSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import Expected, Rollout, chunk_count, proof_bytes
from node.verification.deviations import SpanMeasured
from node.verification.judge import JudgedClaim
from node.verification.plan import Claim, Probe, Rules
from node.verification.prefill import TransformersPrefill
from node.verification.spans import Span
from toploc import build_chunk_proofs

RUN_ID, MANIFEST, OLD, NEW = "12" * 32, "34" * 32, 5, 6
ROWS, TOKENS = 4, 40
SPEC = RunSpec(
    name="flooded",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=ROWS, max_new_tokens=TOKENS, max_version_lead=1),
    proofs=ProofSpec(scheme="toploc/1"),
    limits=LimitsSpec(
        exponent_mismatches=8.0,
        mantissa_mean=0.5,
        mantissa_median=1.0,
        token_margin=1e-3,
        rollout_margin_mean=1e-4,
        logprob_error=1e-3,
    ),
)
ENVIRONMENTS: list[Environment] = [load_environment(spec) for spec in SPEC.environments]
RULES = Rules(RUN_ID, SPEC, ENVIRONMENTS)


class Counting(TransformersPrefill):
    """The reference, which notes the spans that it is asked to measure."""

    def __init__(self, policy: Policy, spans: list[Span]) -> None:
        super().__init__(policy)
        self._spans = spans

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        self._spans.extend(spans)
        return super().measure(spans, spec=spec)


@dataclass
class Counted(InMemory):
    """Policies in memory that note which spans were measured."""

    spans: list[Span] = field(default_factory=list)

    async def prefill(self, version: int) -> Counting:
        self.measured.append(version)
        return Counting(await self.blueprint(version), self.spans)


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    return load_policy(tiny_policy_path, dtype=torch.float32)


@pytest.fixture(scope="module")
def honest(policy: Policy) -> list[Rollout]:
    wanted = expected(policy, slot=0)
    return [drawn([(OLD, policy, None)], wanted, seed, spec=SPEC) for seed in wanted.seeds]


def expected(policy: Policy, *, slot: int) -> Expected:
    return expected_of(SPEC, policy, ENVIRONMENTS, run_id=RUN_ID, version=OLD, manifest_digest=MANIFEST, slot=slot)


def invented(policy: Policy, *, slot: int, segments: dict[int, int] | None = None) -> list[Rollout]:
    """A group for `slot` that no policy drew, with one proof of random hidden states throughout."""
    rng = random.Random(slot)
    parts = segments or {OLD: TOKENS}
    states = torch.randn(32, policy.hidden, generator=torch.Generator().manual_seed(slot)).bfloat16()
    wanted = expected(policy, slot=slot)
    allowed = [token for token in range(policy.vocabulary) if token not in policy.eos_ids]
    return [
        Rollout(
            seed=seed,
            prompt_ids=list(wanted.prompt_ids),
            completion_ids=rng.choices(allowed, k=TOKENS),
            logprobs=[-rng.random() * 12 for _ in range(TOKENS)],
            segment_versions=list(parts),
            segment_tokens=list(parts.values()),
            proofs=build_chunk_proofs([states], SPEC.proofs.top_k) * chunk_count(parts.values(), chunk_tokens=32),
        )
        for seed in wanted.seeds
    ]


def claim_of(rollouts: Sequence[Rollout], *, slot: int = 0) -> Claim:
    return Claim(version=OLD, manifest_digest=MANIFEST, slot=slot, rollouts=rollouts)


def decide(claims: Sequence[Claim], policies: InMemory, **probe: Probe) -> list[JudgedClaim]:
    return judged(claims, policies, rules=RULES, **probe)


def first_is(row: int) -> Probe:
    return lambda rows: row % rows


def test_a_flood_of_well_formed_garbage_costs_the_verifier_one_row_each(policy: Policy) -> None:
    """Whoever invents tokens and proofs for nothing must not buy a prefill of all of them."""
    policies = Counted({OLD: policy})
    found = decide([claim_of(invented(policy, slot=slot), slot=slot) for slot in range(6)], policies)
    assert {one.verdict.reason for one in found} == {Reason.PROOF_MISMATCH}
    assert len(policies.spans) == 6
    for one, span in zip(found, policies.spans, strict=True):
        verdict = one.verdict
        assert verdict.finding is not None
        assert verdict.finding.row == span.row
        assert list(one.rows) == [span.row]
        assert verdict.tokens == ROWS * TOKENS


def test_a_flood_beside_honest_work_costs_the_honest_nothing(policy: Policy, honest: list[Rollout]) -> None:
    """Claims share forward passes: the garbage leaves them after its first row, and the honest group is admitted."""
    policies = Counted({OLD: policy})
    flood = [claim_of(invented(policy, slot=slot), slot=slot) for slot in (1, 2, 3)]
    found = decide([flood[0], claim_of(honest), *flood[1:]], policies)
    assert [one.verdict.outcome is Outcome.ADMITTED for one in found] == [False, True, False, False]
    assert len(policies.spans) == 3 + ROWS


@pytest.mark.parametrize("probed", range(ROWS))
@pytest.mark.parametrize("bad", range(ROWS))
def test_garbage_in_one_row_is_found_whichever_row_is_measured_first(
    bad: int, probed: int, policy: Policy, honest: list[Rollout]
) -> None:
    """A flooder who draws all rows but one honestly must not have the rest taken on trust."""
    group = [*honest[:bad], invented(policy, slot=0)[bad], *honest[bad + 1 :]]
    policies = Counted({OLD: policy})
    (found,) = decide([claim_of(group)], policies, probe=first_is(probed))
    verdict = found.verdict
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, Reason.PROOF_MISMATCH)
    assert verdict.finding is not None
    assert verdict.finding.row == bad
    assert verdict.detail.startswith(f"Row {bad}: ")
    assert len(policies.spans) == (1 if bad == probed else ROWS)


def test_one_honest_row_where_the_verifier_is_expected_to_look_first(policy: Policy, honest: list[Rollout]) -> None:
    """If the row could be foreseen, one honest row would buy a prefill of all the garbage beside it every time."""
    group = [honest[0], *invented(policy, slot=0)[1:]]
    asked = []
    for _ in range(40):
        policies = Counted({OLD: policy})
        decide([claim_of(group)], policies)
        asked.append(policies.spans[0].row)
    assert set(asked) == set(range(ROWS))


def test_honest_rows_are_measured_once_each_and_keep_their_order(policy: Policy, honest: list[Rollout]) -> None:
    for probed in range(ROWS):
        policies = Counted({OLD: policy})
        (found,) = decide([claim_of(honest)], policies, probe=first_is(probed))
        assert sorted(span.row for span in policies.spans) == list(range(ROWS))
        assert policies.spans[0].row == probed
        assert found.logprobs is not None
        for ours, one in zip(found.logprobs, honest, strict=True):
            assert ours == pytest.approx(one.logprobs, abs=1e-5)


def test_garbage_that_names_many_policies_loads_those_of_one_row(policy: Policy) -> None:
    """A policy costs far more to load than a row to measure."""
    split = invented(policy, slot=0, segments={OLD: 8, NEW: TOKENS - 8})
    group = [invented(policy, slot=0)[0], *split[1:]]
    policies = Counted({OLD: policy, NEW: policy})
    assert decide([claim_of(group)], policies, probe=first_is(0))[0].verdict.outcome is Outcome.REJECTED
    assert policies.measured == [OLD]
    policies = Counted({OLD: policy, NEW: policy})
    assert decide([claim_of(group)], policies, probe=first_is(2))[0].verdict.outcome is Outcome.REJECTED
    assert policies.measured == [OLD, NEW]
    assert {span.row for span in policies.spans} == {2}


def test_the_policy_that_was_loaded_last_goes_on(policy: Policy) -> None:
    """An honest group of two policies needs both twice; with room for one in memory, the order saves a load."""
    wanted = expected(policy, slot=0)
    group = [drawn([(OLD, policy, 4), (NEW, policy, None)], wanted, seed, spec=SPEC) for seed in wanted.seeds]
    assert sum(len(one.segments) == 2 for one in group) > 1
    policies = Counted({OLD: policy, NEW: policy})
    probed = next(row for row, one in enumerate(group) if len(one.segments) == 2)
    (found,) = decide([claim_of(group)], policies, probe=first_is(probed))
    assert found.verdict.outcome is Outcome.ADMITTED
    assert policies.measured == [OLD, NEW, OLD]
    assert found.logprobs is not None
    for ours, one in zip(found.logprobs, group, strict=True):
        assert ours == pytest.approx(one.logprobs, abs=1e-5)


MALFORMED: dict[str, Callable[[bytes], bytes]] = {
    "random bytes": lambda proof: b"\xff\xd9" + b"\xff" * (len(proof) - 2),
    "no modulus": lambda proof: bytes(2) + proof[2:],
    "a modulus that folds the indices": lambda proof: b"\xff\xd8" + proof[2:],
}


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_proofs_that_no_prover_makes_buy_no_forward_pass(
    kind: str, row: int, policy: Policy, honest: list[Rollout]
) -> None:
    """Wherever they stand: the last proof of the last row is as cheap to reject as the first."""
    proofs = [*honest[row].proofs[:-1], MALFORMED[kind](honest[row].proofs[-1])]
    assert len(proofs[-1]) == proof_bytes(SPEC.proofs, tokens=32)
    group = [*honest[:row], msgspec.structs.replace(honest[row], proofs=proofs), *honest[row + 1 :]]
    policies = Counted({OLD: policy})
    (found,) = decide([claim_of(group)], policies)
    verdict = found.verdict
    assert (verdict.reason, verdict.figures) == (Reason.MALFORMED_PROOF, None)
    assert verdict.detail.startswith(f"Row {row}, proof {len(proofs) - 1}: ")
    assert (policies.measured, policies.spans) == ([], [])
