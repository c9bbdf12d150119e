"""From measured figures to a verdict (docs/protocol.md, section 7).

Measuring needs the policy and a forward pass and lives elsewhere; judging is pure, so that an auditor who
measures the same figures comes to the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec
from shardcast.wire import Wire


class Outcome(StrEnum):
    ADMITTED = "admitted"
    REJECTED = "rejected"
    INDETERMINATE = "indeterminate"


NOT_FINITE = 1e308  # what stands for NaN and the infinities, which JSON does not have


class Figures(Wire, frozen=True):
    """What one prefill measured for one rollout; the worst chunk or token where several count.

    `exponent_mismatches`, `mantissa_mean` and `mantissa_median` are the largest over the rollout's chunks
    (TOPLOC, arXiv 2501.16007). `token_margin` is the largest amount, in noised and temperature-scaled logits,
    by which a submitted token lost against the forced one, `margin_mean` its mean over tokens.
    `logprob_error` is the largest |submitted - recomputed|, in nats.
    """

    exponent_mismatches: float
    mantissa_mean: float
    mantissa_median: float
    token_margin: float
    margin_mean: float
    logprob_error: float


class Finding(Wire, frozen=True):
    """A check that a rollout failed: what was measured against which limit."""

    reason: Reason
    row: int
    figure: str
    value: float
    limit: float


def worst(figures: Sequence[Figures]) -> Figures:
    """The largest of each figure over a group: what the log records as a verdict's evidence."""
    return Figures(**{name: max(_finite(getattr(f, name)) for f in figures) for name in Figures.__struct_fields__})


def judge(figures: Sequence[Figures], *, limits: LimitsSpec) -> Finding | None:
    """The first failed check in the order of section 7, or None if every rollout is within the limits.

    A figure that is not finite fails its check: doubt never passes. Raises ValueError for no figures at all,
    because nothing measured is not the same as nothing wrong.
    """
    if not figures:
        raise ValueError("nothing was measured")
    checks = (
        (Reason.PROOF_MISMATCH, "exponent_mismatches", limits.exponent_mismatches),
        (Reason.PROOF_MISMATCH, "mantissa_mean", limits.mantissa_mean),
        (Reason.PROOF_MISMATCH, "mantissa_median", limits.mantissa_median),
        (Reason.WRONG_TOKEN, "token_margin", limits.token_margin),
        (Reason.WRONG_TOKEN, "margin_mean", limits.rollout_margin_mean),
        (Reason.WRONG_LOGPROB, "logprob_error", limits.logprob_error),
    )
    for reason, name, limit in checks:
        for row, measured in enumerate(figures):
            value = _finite(getattr(measured, name))
            if value > limit:
                return Finding(reason=reason, row=row, figure=name, value=value, limit=limit)
    return None


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NOT_FINITE
