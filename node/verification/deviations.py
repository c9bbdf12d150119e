"""Deviations of a rollout from its policies, and the figures and totals made of them.

The same for every engine (docs/protocol.md, section 7.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from node.protocol.admission import EVIDENCE, Figures, finite
from node.protocol.evidence import Totals, evidences, far_value, sketch_value, total
from node.protocol.run import LimitsSpec
from toploc import distances


class SpanMeasured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurement of one span under its policy, per chunk and per token.

    `exponent_mismatches`, `mantissa_means` and `mantissa_medians` are of each chunk, `sketch_errors` eight of each
    token, in steps; each is empty where the run's proofs do not have it. `sketch_disagreements` say of each token how
    far two readings of it are apart (`node.verification.readings`); empty where there was one. `logprobs` are the
    recomputed ones; `margins` say by how much each token lost against the forced one. `experts` are those that each
    input token met, its context included (`node.policy.routing`): empty without experts, or where the engine keeps
    them to itself.
    """

    exponent_mismatches: list[float]
    mantissa_means: list[float]
    mantissa_medians: list[float]
    sketch_errors: list[list[float]]
    logprobs: list[float]
    margins: list[float]
    sketch_disagreements: list[float] = []
    experts: bytes = b""


@dataclass(frozen=True, slots=True)
class Deviations:
    """A rollout's deviations from its policies, per chunk and per token.

    `errors` are |submitted - recomputed log-probability|, `sketch_distances` root mean squares of sketch errors; the
    others as in `SpanMeasured`.
    """

    exponent_mismatches: Sequence[float]
    mantissa_means: Sequence[float]
    mantissa_medians: Sequence[float]
    sketch_distances: Sequence[float]
    margins: Sequence[float]
    errors: Sequence[float]
    sketch_disagreements: Sequence[float] = ()

    @staticmethod
    def of(spans: Sequence[SpanMeasured], logprobs: Sequence[float]) -> Deviations:
        """Join a rollout's spans in order, and compare with its submitted log-probabilities."""

        def joined(name: str) -> list[Any]:
            if len(spans) == 1:
                found: list[Any] = getattr(spans[0], name)
                return found
            return [value for span in spans for value in getattr(span, name)]

        return Deviations(
            exponent_mismatches=joined("exponent_mismatches"),
            mantissa_means=joined("mantissa_means"),
            mantissa_medians=joined("mantissa_medians"),
            sketch_distances=sketch_distances(joined("sketch_errors")),
            sketch_disagreements=joined("sketch_disagreements"),
            margins=joined("margins"),
            errors=[abs(ours - theirs) for ours, theirs in zip(joined("logprobs"), logprobs, strict=True)],
        )

    @property
    def statistics(self) -> dict[str, Sequence[float]]:
        """The values that are summed up, by `node.protocol.evidence.STATISTICS`."""
        return {
            "exponents": self.exponent_mismatches,
            "mantissa": self.mantissa_means,
            "sketch": self._sketch_values,
            "far": [far_value(distance) for distance in self.sketch_distances],
            "margin": self.margins,
            "logprob": self.errors,
        }

    @property
    def _sketch_values(self) -> list[float]:
        values = [sketch_value(distance) for distance in self.sketch_distances]
        if not self.sketch_disagreements:
            return values
        return [value - sketch_value(apart) / 2 for value, apart in zip(values, self.sketch_disagreements, strict=True)]

    def totals(self, limits: LimitsSpec) -> Totals:
        """Sum up the statistics under the run's levels."""
        return Totals(**{name: total(values, getattr(limits.honest, name)) for name, values in self.statistics.items()})

    def figures(self, limits: LimitsSpec, totals: Totals | None = None) -> Figures:
        """Compute the figures that the rollout is judged by; `totals` are its own, where they are known."""
        totals = self.totals(limits) if totals is None else totals
        far = [sketch_value(distance) for distance in self.sketch_distances]
        return Figures(
            exponent_mismatches=worst_of(self.exponent_mismatches or [0.0]),
            mantissa_mean=worst_of(self.mantissa_means or [0.0]),
            mantissa_median=worst_of(self.mantissa_medians or [0.0]),
            token_margin=worst_of(self.margins),
            margin_mean=worst_of([sum(self.margins) / len(self.margins)]),
            logprob_error=worst_of(self.errors),
            sketch_distance=math.exp(sum(far) / len(far)) if far else 0.0,
            **{f"{name}{EVIDENCE}": nats for name, nats in evidences(totals, limits=limits)},
        )


@dataclass(frozen=True, slots=True)
class RowMeasured:
    """Measurement of one rollout: figures and totals to judge, log-probabilities and `experts` to train on.

    `deviations` are the underlying values. `experts` are those that each token but the last met, under the policy that
    drew what follows; empty if they are not known.
    """

    figures: Figures
    totals: Totals
    logprobs: Sequence[float]
    deviations: Deviations
    experts: bytes = b""

    @staticmethod
    def of(spans: Sequence[SpanMeasured], logprobs: Sequence[float], *, limits: LimitsSpec) -> RowMeasured:
        """Make the measurement from a rollout's spans in order and its submitted log-probabilities."""
        deviations = Deviations.of(spans, logprobs)
        totals = deviations.totals(limits)
        return RowMeasured(
            figures=deviations.figures(limits, totals),
            totals=totals,
            logprobs=[value for span in spans for value in span.logprobs],
            deviations=deviations,
            experts=_experts(spans),
        )


def _experts(spans: Sequence[SpanMeasured]) -> bytes:
    """Join what the tokens of a rollout's spans met: of each span what those before it did not have as input."""
    found = b""
    for span in spans:
        if not span.experts:
            return b""
        found += span.experts[len(found) :]
    return found


def sketch_distances(errors: Sequence[Sequence[float]]) -> list[float]:
    """Return the root mean square of each token's eight errors, in steps."""
    found: list[float] = distances(torch.tensor(errors)).tolist() if errors else []
    return found


def worst_of(values: Sequence[float]) -> float:
    """Return the largest value; NOT_FINITE if one is not (`max` alone would let a NaN hide behind its neighbours)."""
    if math.isfinite(sum(values)):  # then each of them is
        return float(max(values))
    return max(finite(float(value)) for value in values)
