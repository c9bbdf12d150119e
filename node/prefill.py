"""The reference prefill: how far rollouts are from what a policy forces (docs/protocol.md, section 7).

It shares no code with the engines that workers run: it sees whole sequences at once, has no KV cache and no
padding mask, and computes in the policy's own dtype. An auditor calls the same function and gets the same
figures, up to rounding. What the figures are worth is for `node.protocol.admission` to judge.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any

import torch
from torch import Tensor

from node.parquet_reader import VerifierFailed
from node.policy import Policy
from node.protocol.admission import Figures
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.submission import Rollout
from toploc import VerificationResult, verify_chunk_proofs
from toploc.errors import BadProof, WrongProofCount

MAX_BATCH_TOKENS = 16 * 1024
"""Tokens in one forward pass, padding included; a longer sequence goes alone."""

MAX_LOGITS = 2**24
"""Logits held at once: 64 MiB in float32, and a few tensors of that size."""

MAX_NOISE_VALUES = 2**20
"""Sampling noise made at once; its generator needs some 80 bytes for each value."""

NOT_FINITE = 1e308
"""Stands for a figure that is NaN or infinite: JSON has neither, and no limit admits it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the prefill says of each rollout: the figures to judge, and the log-probabilities to train on."""

    figures: list[Figures]
    logprobs: list[list[float]]


def measure(policy: Policy, rollouts: Sequence[Rollout], *, spec: RunSpec) -> Measured:
    """What one prefill says of `rollouts` (of one prompt or of several), which passed `check_rollouts`.

    Raises Refusal for proofs that no honest prover makes of these tokens (MALFORMED_PROOF, WRONG_PROOF_COUNT),
    VerifierFailed where the policy cannot be measured at all.
    """
    (result,) = measure_many(policy, [rollouts], spec=spec)
    if isinstance(result, Refusal):
        raise result
    return result


def measure_many(policy: Policy, groups: Sequence[Sequence[Rollout]], *, spec: RunSpec) -> list[Measured | Refusal]:
    """As `measure`, for each of several groups; they share forward passes, and a refusal is one group's own."""
    rows = [_Row(group, row, rollout) for group, rollouts in enumerate(groups) for row, rollout in enumerate(rollouts)]
    done: dict[tuple[int, int], _Measurement | Refusal] = {}
    with own_faults("the prefill"), torch.inference_mode():
        for batch in _batches(rows):
            hidden = _final_hidden_states(policy, batch)
            replays = _replays(policy, batch, hidden, spec=spec)
            proofs = _check_proofs(batch, hidden, spec=spec)
            for row, replay, proof in zip(batch, replays, proofs, strict=True):
                done[row.group, row.row] = proof if isinstance(proof, Refusal) else _measurement(row, replay, proof)
    return [_collected([done[group, row] for row in range(len(rollouts))]) for group, rollouts in enumerate(groups)]


@contextlib.contextmanager
def own_faults(what: str) -> Iterator[None]:
    """Let refusals pass, and turn whatever else goes wrong in the block into VerifierFailed: nobody's fault."""
    try:
        yield
    except (Refusal, VerifierFailed):
        raise
    except Exception as error:
        raise VerifierFailed(f"{what} failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Row:
    """One rollout, and where it came from."""

    group: int
    row: int
    rollout: Rollout

    @property
    def length(self) -> int:
        """Tokens that the model sees: the last one is only predicted."""
        return len(self.rollout.prompt_ids) + len(self.rollout.completion_ids) - 1

    @property
    def tokens(self) -> int:
        return len(self.rollout.completion_ids)


@dataclass(frozen=True, slots=True)
class _Replay:
    """Per completion token: the recomputed log-probability, and by how much the token lost."""

    logprobs: list[float]
    margins: list[float]


@dataclass(frozen=True, slots=True)
class _Measurement:
    figures: Figures
    logprobs: list[float]


def _batches(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows for one forward pass each: of similar length, within MAX_BATCH_TOKENS."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        if batch and batch[0].length * (len(batch) + 1) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _final_hidden_states(policy: Policy, batch: Sequence[_Row]) -> list[Tensor]:
    """For each row, what feeds the output head where its completion is predicted: [tokens, hidden].

    Padding is on the right, and no token attends to a later one, so it needs no mask and changes nothing.
    """
    ids = torch.zeros(len(batch), max(row.length for row in batch), dtype=torch.int64)
    for index, row in enumerate(batch):
        ids[index, : row.length] = torch.tensor([*row.rollout.prompt_ids, *row.rollout.completion_ids[:-1]])
    outputs = policy.model.base_model(input_ids=ids.to(policy.model.device), use_cache=False)
    hidden: Tensor = outputs.last_hidden_state
    return [hidden[index, row.length - row.tokens : row.length] for index, row in enumerate(batch)]


def _replays(policy: Policy, batch: Sequence[_Row], hidden: Sequence[Tensor], *, spec: RunSpec) -> list[_Replay]:
    """Sample again with each row's own seed, and see what the submitted tokens are worth (section 4)."""
    states = torch.cat(list(hidden))
    chosen = torch.tensor([token for row in batch for token in row.rollout.completion_ids], device=states.device)
    seeds = [row.rollout.seed for row in batch for _ in range(row.tokens)]
    positions = [position for row in batch for position in range(row.tokens)]
    logprobs: list[float] = []
    margins: list[float] = []
    head: Any = policy.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    step = max(1, MAX_LOGITS // policy.vocabulary)
    for start in range(0, len(seeds), step):
        part = slice(start, start + step)
        logits = head(states[part]).float() / spec.sampling.temperature
        token = chosen[part, None]
        logprobs += logits.log_softmax(-1).gather(1, token)[:, 0].tolist()
        scores = logits + _noise(seeds[part], positions[part], vocabulary=policy.vocabulary).to(logits.device)
        margins += (scores.amax(-1, keepdim=True) - scores.gather(1, token))[:, 0].tolist()
    ends = list(accumulate(row.tokens for row in batch))
    return [
        _Replay(logprobs=logprobs[end - row.tokens : end], margins=margins[end - row.tokens : end])
        for row, end in zip(batch, ends, strict=True)
    ]


def _noise(seeds: list[bytes], positions: list[int], *, vocabulary: int) -> Tensor:
    """The protocol's noise [rows, vocabulary], made a bounded number of values at a time."""
    step = max(1, MAX_NOISE_VALUES // vocabulary)
    parts = [
        torch.from_numpy(
            gumbel_noise(seeds[start : start + step], positions[start : start + step], vocabulary=vocabulary)
        )
        for start in range(0, len(seeds), step)
    ]
    return torch.cat(parts)


def _check_proofs(
    batch: Sequence[_Row], hidden: Sequence[Tensor], *, spec: RunSpec
) -> list[list[VerificationResult] | Refusal]:
    """The distances of each row's chunks from its proofs; faults are found again row by row."""
    chunks = [list(torch.split(states.bfloat16(), spec.proofs.chunk_tokens)) for states in hidden]
    if any(len(row.rollout.proofs) != len(own) for row, own in zip(batch, chunks, strict=True)):
        return [_check_row(row, own, spec=spec) for row, own in zip(batch, chunks, strict=True)]
    try:
        results = iter(
            verify_chunk_proofs(
                list(chain.from_iterable(chunks)),
                list(chain.from_iterable(row.rollout.proofs for row in batch)),
                spec.proofs.top_k,
            )
        )
    except BadProof:
        return [_check_row(row, own, spec=spec) for row, own in zip(batch, chunks, strict=True)]
    return [list(islice(results, len(own))) for own in chunks]


def _check_row(row: _Row, chunks: list[Tensor], *, spec: RunSpec) -> list[VerificationResult] | Refusal:
    try:
        return verify_chunk_proofs(chunks, row.rollout.proofs, spec.proofs.top_k)
    except WrongProofCount:
        count = len(row.rollout.proofs)
        return Refusal(Reason.WRONG_PROOF_COUNT, f"Row {row.row} has {count} proofs, {len(chunks)} are due.")
    except BadProof as error:
        return Refusal(Reason.MALFORMED_PROOF, f"Row {row.row}, proof {error.index}: {error.code}.")


def _measurement(row: _Row, replay: _Replay, proofs: Sequence[VerificationResult]) -> _Measurement:
    errors = [abs(ours - theirs) for ours, theirs in zip(replay.logprobs, row.rollout.logprobs, strict=True)]
    figures = Figures(
        exponent_mismatches=_worst(result.exp_mismatches for result in proofs),
        mantissa_mean=_worst(result.mant_err_mean for result in proofs),
        mantissa_median=_worst(result.mant_err_median for result in proofs),
        token_margin=_worst(replay.margins),
        margin_mean=_worst([sum(replay.margins) / len(replay.margins)]),
        logprob_error=_worst(errors),
    )
    return _Measurement(figures=figures, logprobs=replay.logprobs)


def _worst(values: Iterable[float]) -> float:
    """The largest value; NOT_FINITE if one is not (`max` alone would let a NaN hide behind its neighbours)."""
    return max(float(value) if math.isfinite(value) else NOT_FINITE for value in values)


def _collected(rows: Sequence[_Measurement | Refusal]) -> Measured | Refusal:
    measured = [row for row in rows if isinstance(row, _Measurement)]
    if len(measured) < len(rows):
        return next(row for row in rows if isinstance(row, Refusal))
    return Measured(figures=[row.figures for row in measured], logprobs=[row.logprobs for row in measured])
