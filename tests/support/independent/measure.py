"""What a verifier measures of a completion, given logits and hidden states (sections 7.1 and 7.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .admission import evidence
from .messages import STATISTICS
from .proofs import Sketcher, to_bfloat16, toploc_distance
from .sampling import chunks_of, context_of, log_probability, noise
from .submission import Row

Model = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray]]
"""Of a policy: from a sequence to its final hidden states [tokens, hidden] and logits [tokens, vocabulary]."""


@dataclass
class Measured:
    """The values of a completion: of chunks for TOPLOC's statistics, of tokens for the others."""

    mismatches: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def totals(self, limits: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return number and sum of each statistic that the run has a level for (7.3)."""
        values = {
            "exponents": self.mismatches,
            "mantissa": self.means,
            "sketch": [math.log(distance + 0.3) for distance in self.distances],
            "far": [min(max(distance - 3, 0.0), 1.0) for distance in self.distances],
            "margin": self.margins,
            "logprob": self.errors,
        }
        return {name: _total(values[name], limits["honest"][name]) for name in STATISTICS}

    def figures(self, limits: dict[str, Any]) -> dict[str, float]:
        """Return the thirteen figures, a value that is not finite as 1e308."""
        logs = [math.log(distance + 0.3) for distance in self.distances]
        figures = {
            "exponent_mismatches": max(self.mismatches, default=0.0),
            "mantissa_mean": max(self.means, default=0.0),
            "mantissa_median": max(self.medians, default=0.0),
            "token_margin": max(self.margins),
            "margin_mean": sum(self.margins) / len(self.margins),
            "logprob_error": max(self.errors),
            "sketch_distance": math.exp(sum(logs) / len(logs)) if logs else 0.0,
        }
        totals = self.totals(limits)
        figures |= {f"{name}_evidence": evidence(totals[name], limits["honest"][name]) for name in STATISTICS}
        return {name: float(value) if math.isfinite(value) else 1e308 for name, value in figures.items()}


def _total(values: Sequence[float], level: dict[str, Any] | None) -> dict[str, Any]:
    if level is None:
        return {"count": 0, "sum": 0.0}
    most = level["largest"]
    counted = [value if value <= most else most for value in values]  # noqa: FURB136  (NaN counts as the largest)
    return {"count": len(values), "sum": float(sum(counted))}


def add_totals(rows: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the totals of a group: the sum of its rows'."""
    return {
        name: {"count": sum(row[name]["count"] for row in rows), "sum": sum(row[name]["sum"] for row in rows)}
        for name in STATISTICS
    }


def measure(row: Row, replies: dict[int, list[int]], models: Callable[[int], Model], spec: dict[str, Any]) -> Measured:
    """Measure one completion with one reading; `models` gives the policy of each version.

    Each segment is read anew, from the prompt to its end, by its own policy.
    """
    measured = Measured()
    temperature = spec["sampling"]["temperature"]
    tokens = row.completion_ids
    chunks = chunks_of(row.segment_tokens, list(replies), spec["proofs"]["chunk_tokens"])
    end = 0
    for segment, (version, count) in enumerate(zip(row.segment_versions, row.segment_tokens, strict=True)):
        start, end = end, end + count
        hidden, logits = models(version)(context_of(row.prompt_ids, tokens[: end - 1], replies))
        places = [len(context_of(row.prompt_ids, tokens[:index], replies)) - 1 for index in range(start, end)]
        for index, place in zip(range(start, end), places, strict=True):
            scores = logits[place] / np.float32(temperature) + noise(row.seed, index, logits.shape[1])
            measured.margins.append(float(scores.max() - scores[tokens[index]]))
            own = log_probability(logits[place], tokens[index], temperature)
            measured.errors.append(abs(row.logprobs[index] - float(own)))
        for proof, (of, first, length) in zip(row.proofs, chunks, strict=True):
            if of == segment:
                states = hidden[places[first - start : first - start + length]]
                _compare(measured, to_bfloat16(states), proof, row.seed, spec["proofs"])
    return measured


def _compare(measured: Measured, chunk: np.ndarray, proof: bytes, seed: bytes, proofs: dict[str, Any]) -> None:
    toploc = 2 + 2 * proofs["top_k"] if "toploc/1" in proofs["scheme"] else 0
    if toploc:
        found = toploc_distance(chunk, proof[:toploc])
        measured.mismatches.append(float(found.exponent_mismatches))
        measured.means.append(found.mantissa_mean)
        measured.medians.append(found.mantissa_median)
    if "sketch/1" in proofs["scheme"]:
        sketcher = Sketcher(seed, chunk.shape[1], proofs["sketch_step"])
        measured.distances += map(float, sketcher.distances(chunk, proof[toploc:]))
