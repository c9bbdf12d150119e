"""The verifier's measurement: rollouts cut into spans, each prefilled under the policy that is said to have drawn it.

A span is one segment of one rollout (docs/protocol.md, section 7.1). Every span is measured by an ordinary prefill
of its whole prefix under its own policy, so a completion that several policies drew needs nothing special.
`TransformersPrefill` is the reference: it shares no code with the engines that workers run, sees whole sequences
at once, has no KV cache and no padding mask, and computes in the policy's own dtype. What the figures are worth is
for `node.protocol.admission` to judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from node.measurement import Deviations, Span, SpanMeasured, measure_states
from node.parquet_reader import VerifierFailed
from node.policy import Blueprint, Policy, load_policy
from node.protocol.admission import Figures
from node.protocol.evidence import Totals
from node.protocol.reasons import Refusal
from node.protocol.run import LimitsSpec, RunSpec
from node.protocol.submission import Rollout, chunk_count
from node.protocol.turns import Replies, interleaved, pieces

logger = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 16 * 1024
"""Tokens in one forward pass, padding included; a longer sequence goes alone."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the prefill says of each rollout: the figures to judge, what they sum up to, the log-probabilities to train
    on, and the numbers that all of it was made of.
    """

    figures: list[Figures]
    totals: list[Totals]
    logprobs: list[list[float]]
    deviations: list[Deviations]


class Prefill(Protocol):
    """One policy, ready to measure."""

    @property
    def blueprint(self) -> Blueprint:
        """The policy without its weights."""

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        """What the policy says of each span, in their order; blocks, so it is called in a thread.

        A Refusal is for proofs that no honest prover makes of the span's tokens. Whatever else goes wrong raises.
        """


class Prefills(Protocol):
    """Makes policy files ready to measure, all by one engine."""

    async def prefill(self, path: Path, *, version: int) -> Prefill:
        """The policy in `path`, which is version `version`; raises PolicyError. `path` stays while it is used."""

    async def close(self) -> None:
        """End what was started for it."""


class TransformersPrefills:
    """The reference `Prefills`: each policy a transformers model in this process, computing in `dtype`."""

    def __init__(self, *, dtype: str) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)

    async def prefill(self, path: Path, *, version: int) -> Prefill:  # noqa: ARG002  (the file says it all)
        return TransformersPrefill(await asyncio.to_thread(load_policy, path, dtype=self._dtype))

    async def close(self) -> None:
        """Nothing was started."""


class TransformersPrefill:
    """The reference `Prefill`: the transformers model of a policy, in this process."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def policy(self) -> Policy:
        """The policy, weights and all."""
        return self._policy

    @property
    def blueprint(self) -> Blueprint:
        return self._policy

    def states(self, spans: Sequence[Span]) -> list[Tensor]:
        """For each span the hidden states that its tokens were chosen from, [tokens, hidden]."""
        found: dict[int, Tensor] = {}
        with torch.inference_mode():
            for batch in _batches(spans):
                found.update(zip(batch, self._hidden_states([spans[index] for index in batch]), strict=True))
        return [found[index] for index in range(len(spans))]

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        """As `Prefill.measure`, in forward passes of spans of similar length."""
        results: dict[int, SpanMeasured | Refusal] = {}
        with torch.inference_mode():
            for batch in _batches(spans):
                own = [spans[index] for index in batch]
                measured = measure_states(
                    own,
                    self._hidden_states(own),
                    self._policy.logits,
                    vocabulary=self._policy.vocabulary,
                    temperature=spec.sampling.temperature,
                    proofs=spec.proofs,
                )
                results.update(zip(batch, measured, strict=True))
        return [results[index] for index in range(len(spans))]

    def _hidden_states(self, batch: Sequence[Span]) -> list[Tensor]:
        """For each span, what feeds the output head where its tokens are predicted: [tokens, hidden].

        Padding is on the right, and no token attends to a later one, so it needs no mask and changes nothing.
        """
        ids = torch.zeros(len(batch), max(span.length for span in batch), dtype=torch.int64)
        for index, span in enumerate(batch):
            ids[index, : span.length] = torch.tensor(span.input_ids)
        model: Any = self._policy.model
        hidden: Tensor = model.base_model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
        return [
            span.predicted_from(hidden[index, len(span.context_ids) - 1 : span.length])
            for index, span in enumerate(batch)
        ]


def _batches(spans: Sequence[Span]) -> Iterator[list[int]]:
    """Indices of spans for one forward pass each: of similar length, within MAX_BATCH_TOKENS."""
    batch: list[int] = []
    for index in sorted(range(len(spans)), key=lambda index: spans[index].length, reverse=True):
        if batch and spans[batch[0]].length * (len(batch) + 1) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class Measuring:
    """Several groups of rollouts, which passed `check_rollouts`, on their way through the policies that drew them.

    `rows` are those of each group that are measured, ascending; None for all. `replies` are what `check_rollouts`
    found of each group's rollouts; None where no environment says anything. Call `measure` once for each of
    `versions`, in any order, then `result` for each group. Groups share forward passes, but neither a refusal nor a
    failure is anybody's but the group's own.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Rollout]],
        *,
        spec: RunSpec,
        rows: Sequence[Sequence[int]] | None = None,
        replies: Sequence[Sequence[Replies]] | None = None,
    ) -> None:
        chosen = [range(len(group)) for group in groups] if rows is None else rows
        self._groups = [{row: group[row] for row in own} for group, own in zip(groups, chosen, strict=True)]
        self._spec = spec
        self._ended: dict[int, Refusal | VerifierFailed] = {}
        self._measured: dict[tuple[int, int], dict[int, SpanMeasured]] = {}
        self._spans: dict[int, dict[int, list[Span]]] = {}
        for number, group in enumerate(self._groups):
            for row, rollout in group.items():
                said = () if replies is None else replies[number][row]
                for version, span in spans_of(rollout, said, row=row, chunk_tokens=spec.proofs.chunk_tokens):
                    self._spans.setdefault(version, {}).setdefault(number, []).append(span)

    @property
    def versions(self) -> list[int]:
        """Those that groups still wait for, ascending; empty once nothing is left to measure."""
        return sorted(version for version in self._spans if self.waiting(version))

    def waiting(self, version: int) -> list[int]:
        """The groups that policy `version` is still to be asked about."""
        return [group for group in self._spans.get(version, {}) if group not in self._ended]

    def measure(self, prefill: Prefill, version: int) -> None:
        """Let policy `version` measure what it is said to have drawn; failures are kept for `result`."""
        groups = self.waiting(version)
        spans = self._spans.pop(version)
        try:
            self._measure(prefill, {group: spans[group] for group in groups})
        except VerifierFailed as error:
            if len(groups) == 1:
                self.fail(groups[0], error)
                return
            logger.warning("measuring %d submissions together failed, now one by one: %s", len(groups), error)
            for group in groups:
                self._measure_alone(prefill, group, spans[group])

    def _measure_alone(self, prefill: Prefill, group: int, spans: list[Span]) -> None:
        try:
            self._measure(prefill, {group: spans})
        except VerifierFailed as error:
            self.fail(group, error)

    def _measure(self, prefill: Prefill, spans: dict[int, list[Span]]) -> None:
        asked = [(group, span) for group, own in spans.items() for span in own]
        with own_faults("the prefill"):
            answers = list(zip(asked, prefill.measure([span for _, span in asked], spec=self._spec), strict=True))
        for (group, span), answer in answers:
            if isinstance(answer, Refusal):
                self._ended.setdefault(group, answer)
            else:
                self._measured.setdefault((group, span.row), {})[span.position] = answer

    def fail(self, group: int, error: VerifierFailed) -> None:
        """Ask no policy about this group any more: this side cannot measure it."""
        self._ended.setdefault(group, error)

    def result(self, group: int) -> Measured | Refusal | VerifierFailed:
        """What the policies say of a group's rows, in their order, or why they say nothing."""
        if group in self._ended:
            return self._ended[group]
        limits = self._spec.limits
        rows = [
            _joined(rollout, self._measured[group, row], limits=limits) for row, rollout in self._groups[group].items()
        ]
        figures, totals, logprobs, deviations = (list(column) for column in zip(*rows, strict=True))
        return Measured(figures=figures, totals=totals, logprobs=logprobs, deviations=deviations)


def spans_of(rollout: Rollout, replies: Replies = (), *, row: int, chunk_tokens: int) -> Iterator[tuple[int, Span]]:
    """The segments of `rollout`, in which the environment said `replies`, with the versions that drew them.

    Proofs left over go to the last.
    """
    first = 0
    for segment in rollout.segments:
        tokens = rollout.completion_ids[segment.start : segment.end]
        last = segment.end == len(rollout.completion_ids)
        within = [(at - segment.start, list(ids)) for at, ids in replies if segment.start < at < segment.end]
        end = None if last else first + chunk_count(pieces([len(tokens)], within), chunk_tokens=chunk_tokens)
        before = [(at, ids) for at, ids in replies if at <= segment.start]
        proofs = rollout.proofs[first:end]
        yield (
            segment.version,
            Span(
                row=row,
                seed=rollout.seed,
                context_ids=[*rollout.prompt_ids, *interleaved(rollout.completion_ids[: segment.start], before)],
                position=segment.start,
                token_ids=tokens,
                proofs=proofs,
                first_proof=first,
                replies=within,
            ),
        )
        first += len(proofs)


@contextlib.contextmanager
def own_faults(what: str) -> Iterator[None]:
    """Let refusals pass, and turn whatever else goes wrong in the block into VerifierFailed: nobody's fault."""
    try:
        yield
    except (Refusal, VerifierFailed):
        raise
    except Exception as error:
        raise VerifierFailed(f"{what} failed: {type(error).__name__}: {error}") from error


def _joined(
    rollout: Rollout, measured: Mapping[int, SpanMeasured], *, limits: LimitsSpec
) -> tuple[Figures, Totals, list[float], Deviations]:
    """A rollout's figures, totals, recomputed log-probabilities and deviations, from its segments by their first
    positions."""
    spans = [measured[position] for position in sorted(measured)]
    deviations = Deviations.of(spans, rollout.logprobs)
    logprobs = [value for span in spans for value in span.logprobs]
    return deviations.figures(limits), deviations.totals(limits), logprobs, deviations
