"""Verdicts on proofs, forged or not: distances, figures and a judgement, by the code of a real verdict.

Prefill, sampling and files are left out, because they are right in every forgery: the states are known, margins and
errors of log-probabilities are 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from torch import Tensor

from benchmarks.forging.forgers import Proofs, StateForger, Window, prove_all
from coordinator.calibration.fit import fit_limits, rounded
from coordinator.calibration.sketch_step import error_of
from node.protocol.admission import Figures, judge_rows, worst
from node.protocol.evidence import Total, evidence, evidence_limit
from node.protocol.run import LimitsSpec, ProofSpec
from node.verification.deviations import Deviations, sketch_distances
from node.verification.proofs import verify_proofs

BOTH = "toploc/1+sketch/1"
TOGETHER = 256
SCHEMES = ("toploc/1", "sketch/1", BOTH)
# What a run of one scheme has in the other's figures.
_WITHOUT = {
    "toploc/1": {"sketch_distance": 0.0, "sketch_evidence": 0.0, "far_evidence": 0.0},
    "sketch/1": {
        "exponent_mismatches": 0.0,
        "mantissa_mean": 0.0,
        "mantissa_median": 0.0,
        "exponents_evidence": 0.0,
        "mantissa_evidence": 0.0,
    },
    BOTH: {},
}
Group = Sequence[tuple[Window, Deviations]]


@dataclass(frozen=True, slots=True)
class Terms:
    """A run's terms for proofs: both schemes, so that each can also be judged by itself."""

    proofs: ProofSpec
    limits: LimitsSpec


DEFAULT = Terms(ProofSpec(scheme="toploc/1+sketch/1"), LimitsSpec())


def measure(batch: Sequence[Window], states: Tensor, proofs: Proofs, *, spec: ProofSpec) -> list[Deviations]:
    """Measure each rollout's `proofs` against the verifier's `states` [rows, tokens, hidden]. Raise BadProof."""
    chunks = [window.chunks(states, spec.chunk_tokens) for window in batch]
    seeds = [window.seed for window, own in zip(batch, chunks, strict=True) for _ in own]
    flat = [chunk for own in chunks for chunk in own]
    found = iter(verify_proofs(flat, seeds, [proof for own in proofs for proof in own], spec=spec))
    measured = []
    for window, own in zip(batch, chunks, strict=True):
        each = [next(found) for _ in own]
        toploc = [one.toploc for one in each if one.toploc is not None]
        measured.append(
            Deviations(
                exponent_mismatches=[float(one.exp_mismatches) for one in toploc],
                mantissa_means=[one.mant_err_mean for one in toploc],
                mantissa_medians=[one.mant_err_median for one in toploc],
                sketch_distances=sketch_distances([errors for one in each for errors in one.sketch]),
                margins=[0.0] * window.tokens,
                errors=[0.0] * window.tokens,
            )
        )
    return measured


def accepted(measured: Sequence[Deviations], limits: LimitsSpec) -> dict[str, list[bool]]:
    """Return which rollouts a run of each scheme accepts."""
    found = [one.figures(limits) for one in measured]
    return {scheme: [takes(one, scheme, limits=limits) for one in found] for scheme in SCHEMES}


def takes(found: Figures, scheme: str, *, limits: LimitsSpec) -> bool:
    """Whether a run of `scheme` accepts a rollout with these figures of both schemes."""
    return judge_rows({0: msgspec.structs.replace(found, **_WITHOUT[scheme])}, limits=limits) is None


def prove_and_measure(
    groups: Sequence[Sequence[Window]], worker: Tensor, verifier: Tensor, *, spec: ProofSpec
) -> list[list[tuple[Window, Deviations]]]:
    """Prove the worker's states, and measure the proofs against the verifier's."""
    rungs = {"honest": StateForger(worker)}
    flat = [window for group in groups for window in group]
    measured: list[Deviations] = []
    for start in range(0, len(flat), TOGETHER):
        part = flat[start : start + TOGETHER]
        measured += measure(part, verifier, prove_all(rungs, part, spec)["honest"], spec=spec)
    ordered = iter(zip(flat, measured, strict=True))
    return [[next(ordered) for _ in group] for group in groups]


def fitting_step(groups: Sequence[Group]) -> float:
    """Return the sketch's step that `swarmproof calibrate` finds from honest work measured at the default's."""
    far = [value for group in groups for _, one in group for value in one.sketch_distances]
    return float(f"{error_of(far, step=DEFAULT.proofs.sketch_step):.2g}")


def fitted(groups: Sequence[Group]) -> LimitsSpec:
    """Return the limits that `swarmproof calibrate` fits to such honest work."""
    chance = DEFAULT.limits.false_rejections
    return rounded(fit_limits([[one for _, one in group] for group in groups], false_rejections=chance))


def honest_most(groups: Sequence[Group]) -> Figures:
    """Return the largest of each figure over honest rollouts."""
    return worst([one.figures(DEFAULT.limits) for group in groups for _, one in group])


def refused(groups: Sequence[Group], limits: LimitsSpec) -> Mapping[str, int]:
    """Count the rollouts that a run of each scheme rejects."""
    taken = accepted([one for group in groups for _, one in group], limits)
    return {scheme: each.count(False) for scheme, each in taken.items()}


def chance_log10(tokens: int, limits: LimitsSpec) -> float:
    """Bound the chance that sketches of `tokens` tokens which know nothing pass, as a power of ten.

    Errors that know nothing are uniform in -8 .. 8 in each of 8 projections. Chernoff's bound on the sum of
    ln(distance + 0.3), which the limit on `sketch_distance` bounds from above, and on that of the same values cut as
    evidence cuts them; the smaller. For one token the chance itself where the distance fits into the cube.
    """
    distance, weight = _distances()
    values = np.log(distance + 0.3)
    bounds = [_chernoff(values, weight, tokens, tokens * math.log(max(limits.sketch_distance, 0.3001)))]
    level = limits.honest.sketch
    if level is not None:
        most = _most(tokens, limits)
        bounds.append(_chernoff(np.minimum(values, level.largest), weight, tokens, most))
    if tokens == 1:
        passes = values <= math.log(max(limits.sketch_distance, 0.3001))
        bounds.append(math.log10(max(1e-300, weight[passes].sum())))
    return min(bounds)


def _distances(steps: int = 20_000, draws: int = 2**19) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances of errors that know nothing, as points with weights.

    Up to 8 / sqrt(8) the ball of radius sqrt(8) d lies within the cube of side 16, and its volume is known; beyond, a
    sample.
    """
    edge = 8 / math.sqrt(8)
    edges = np.linspace(0, edge, steps + 1)
    inside = math.pi**4 / 24 * (math.sqrt(8) * edges) ** 8 / 16**8
    drawn = np.sqrt((np.random.default_rng(0).uniform(-8, 8, (draws, 8)) ** 2).mean(1))
    drawn = drawn[drawn > edge]
    rest = np.full(len(drawn), (1 - inside[-1]) / len(drawn))
    # The lower edge of each step: distances are not made larger than they are.
    return np.concatenate([edges[:-1], drawn]), np.concatenate([np.diff(inside), rest])


def _most(tokens: int, limits: LimitsSpec) -> float:
    """Return the largest sum of so many cut values whose evidence is within the limit."""
    level = limits.honest.sketch
    assert level is not None
    low, high = tokens * level.mean, tokens * level.largest
    for _ in range(60):
        middle = (low + high) / 2
        over = evidence(Total(count=tokens, sum=middle), level) > evidence_limit(limits)
        low, high = (low, middle) if over else (middle, high)
    return high


def _chernoff(values: np.ndarray, weight: np.ndarray, tokens: int, most: float) -> float:
    """Return log10 of the least bound exp(s most) E[exp(-s value)]^tokens on P(sum <= most), over s >= 0."""
    logs = np.log(weight[weight > 0])
    kept = values[weight > 0]
    best = 0.0
    for s in np.concatenate([[0.0], np.geomspace(0.1, 200, 60)]):
        terms = logs - s * kept
        top = terms.max()
        best = min(best, s * most + tokens * (top + math.log(np.exp(terms - top).sum())))
    return best / math.log(10)
