"""Distributions of every verification figure over honest completions, and rejections.

`python -m benchmarks.honest [--json]`. The engine draws whole groups in bfloat16 (`--dtype`), as a worker does for its
slots, and each group's file goes through the whole verification (`node.verification.verify.verify`) twice: by
transformers in bfloat16, and by transformers in float32, at a run's default limits. Two policies:

- `trained`: the tiny policy after its warm start, rounded to bfloat16 (most of its choices are clear);
- `random`: random weights over a vocabulary of 32,000 (23 million by default), whose logits are normal with a
  standard deviation of 3: hundreds of tokens compete at each step, so that rounding decides far more often than in a
  trained policy, and its errors are those of logits of a usual size.

There is nothing to compare with: the figures are distributions, from which an operator sets limits. Exponent
mismatches and mantissa errors are of a completion's worst chunk, sampling margins and |dlogp| of each token, margin
means of each completion. `honest_rejected` counts all completions of every group that was not admitted, over both
policies and both dtypes: a rejection costs a worker the group.

The floor is 0 for each figure, which float32 on both sides nearly reaches. In bfloat16 a rounding step is 2^-8 of a
value: decoding and prefill add up in different orders, so hidden states differ by a few of the mantissa's last steps.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import workload
from benchmarks.timing import quantile
from benchmarks.warm_start import add_warm_start, warmed_up
from benchmarks.workload import HeldPolicies, WorkloadVerifier
from node.policy.file import Blueprint, save_policy
from node.protocol.admission import Outcome
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout
from node.submission.writer import write_rollouts
from node.verification.deviations import SpanMeasured
from node.verification.plan import Rules
from node.verification.prefill import TransformersPrefill
from node.verification.spans import Span

DTYPES = ("bfloat16", "float32")
SLOTS_AT_ONCE = 8
QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}


class RecordingPrefill:
    """Prefill that keeps what it measured: a verdict holds only the worst of a group."""

    def __init__(self, prefill: TransformersPrefill) -> None:
        self._prefill = prefill
        self.kept: dict[int, SpanMeasured | Refusal] = {}

    @property
    def blueprint(self) -> Blueprint:
        return self._prefill.blueprint

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        found = self._prefill.measure(spans, spec=spec)
        self.kept |= {span.row: one for span, one in zip(spans, found, strict=True)}
        return found


MEASURED = (
    "exponent_mismatches",
    "mantissa_mean",
    "mantissa_median",
    "sampling_margin",
    "margin_mean",
    "logprob_error",
)


@dataclass
class Distributions:
    """All values of each figure, of one policy under one verifier."""

    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURED})
    rejected: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, rollout: Rollout, measured: SpanMeasured) -> None:
        """Add one completion that one policy drew, so that it is one span."""
        errors = [abs(ours - theirs) for ours, theirs in zip(measured.logprobs, rollout.logprobs, strict=True)]
        found = (
            [max(measured.exponent_mismatches)],
            [max(measured.mantissa_means)],
            [max(measured.mantissa_medians)],
            measured.margins,
            [statistics.fmean(measured.margins)],
            errors,
        )
        for name, values in zip(MEASURED, found, strict=True):
            self.values[name] += values

    def figures(self) -> dict[str, float]:
        """Return the quantiles of each figure, and how many tokens were not the forced ones."""
        found = {
            f"{name}_{label}": quantile(each, at)
            for name, each in self.values.items()
            for label, at in QUANTILES.items()
            if each
        }
        margins = self.values["sampling_margin"]
        others = sum(margin > 0 for margin in margins) / max(1, len(margins))
        return found | {"other_token_share": others, "rejected": self.rejected}


async def draw(options: argparse.Namespace, rules: Rules, path: Path, *, slots: int) -> list[list[Rollout]]:
    """Draw the groups of slots 0, 1, …, as a worker with 8 slots in flight does."""
    async with workload.running(options, rules.spec, path) as engine:
        groups: dict[int, list[Rollout]] = {}
        waiting = iter(range(slots))

        async def work() -> None:
            for slot in waiting:
                groups[slot] = await engine.generate(workload.slot_requests(rules, engine.policy, [slot]))

        await asyncio.gather(*(work() for _ in range(SLOTS_AT_ONCE)))
    return [groups[slot] for slot in range(slots)]


async def judge(
    groups: Sequence[Sequence[Rollout]], keeping: RecordingPrefill, path: Path, *, rules: Rules
) -> Distributions:
    """Put all groups through the whole verification."""
    seen = Distributions()
    verifier = WorkloadVerifier(rules, HeldPolicies({0: keeping}, {0: path}))
    for slot, group in enumerate(groups):
        verdict = await verifier.verdict(write_rollouts(group), slot=slot)
        if verdict.outcome is Outcome.REJECTED:
            workload.say(f"slot {slot} was rejected: {verdict.reason}: {verdict.detail}")
            seen.rejected += len(group)
            seen.reasons[str(verdict.reason)] += 1
        measured, keeping.kept = keeping.kept, {}
        for row, one in sorted(measured.items()):
            if isinstance(one, SpanMeasured):
                seen.add(group[row], one)
    return seen


def save_trained(path: Path, *, share: float, threads: int) -> None:
    """Save the warm-started tiny policy, in bfloat16."""
    torch.set_num_threads(1)  # two are slower for a model of this size
    model, tokenizer = warmed_up(share)
    torch.set_num_threads(threads)
    save_policy(model.bfloat16(), tokenizer, path)


async def measure(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure all figures; return them with notes on rejections."""
    detail: dict[str, float] = {}
    notes: dict[str, str] = {}
    seen: list[Distributions] = []
    completions = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("trained", "random"):
            path = Path(folder) / f"{name}.safetensors"
            tokens = 48 if name == "trained" else options.tokens
            workload.say(f"making the {name} policy")
            if name == "trained":
                save_trained(path, share=options.warm_start, threads=options.threads)
            else:
                workload.save_random_policy(path, workload.size_of(options), dtype=torch.bfloat16, ends=True)
            rules = workload.make_rules(workload.make_spec(dtype=options.dtype, tokens=tokens))
            slots = -(-options.completions // rules.spec.sampling.group_size)
            groups = await draw(options, rules, path, slots=slots)
            completions += sum(len(group) for group in groups)
            workload.say(
                f"{name}: {sum(len(rollout.completion_ids) for group in groups for rollout in group)} tokens drawn"
            )
            for dtype in DTYPES:
                keeping = RecordingPrefill(
                    TransformersPrefill(workload.verifier_policy(path, dtype=getattr(torch, dtype)))
                )
                one = await judge(groups, keeping, path, rules=rules)
                workload.say(f"{name}: verified in {dtype}: {one.rejected} rejected")
                detail |= {f"{key}_{name}_{dtype}": value for key, value in one.figures().items()}
                if one.reasons:
                    notes[f"rejected_{name}_{dtype}"] = f"groups by reason: {dict(one.reasons)}"
                seen.append(one)
    figures = {
        "completions": completions,
        "honest_rejected": sum(one.rejected for one in seen),
        "exponent_mismatches_max": _largest(seen, "exponent_mismatches", 1.0),
        "mantissa_mean_max": _largest(seen, "mantissa_mean", 1.0),
        "sampling_margin_p999": _largest(seen, "sampling_margin", 0.999),
    }
    return figures | detail, notes


def _largest(seen: Sequence[Distributions], name: str, at: float) -> float | None:
    """Return a quantile over everything; None if nothing was measured."""
    values = [value for one in seen for value in one.values[name]]
    return quantile(values, at) if values else None


def main() -> None:
    parser = workload.make_parser(__doc__, tokens=64, hidden=256, layers=8)
    parser.add_argument("--completions", type=int, default=1024, help="of each of the two policies (default 1024)")
    add_warm_start(parser)
    options = workload.parse(parser)
    figures, notes = asyncio.run(measure(options))
    limits = "default limits; each completion is verified in bfloat16 and in float32"
    workload.report("honest", options, figures, {"honest_rejected": limits, **notes})


if __name__ == "__main__":
    main()
