"""A slot's rollouts, and every check of them that needs no model (docs/protocol.md, section 6)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec

from node.protocol.reasons import Reason, Refusal
from node.protocol.run import ProofSpec, RunSpec, SamplingSpec
from node.protocol.turns import RUN_RULES, AskReply, Replies, TurnRules, pieces, replay

MAX_LOGPROB = 1e-4
MIN_LOGPROB = -80.0
"""Nobody draws what is as unlikely; and exp(80) is finite in float32, whatever a row says that is not measured."""

"""A log-probability may exceed 0 by rounding only."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The completion's tokens `start` .. `end` - 1, all drawn from policy `version` over everything before them."""

    version: int
    start: int
    end: int


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One completion with its prompt, log-probabilities and proofs.

    `logprobs` are of the run's temperature-scaled distribution, natural logarithm, one per completion token.
    `segment_versions` and `segment_tokens` say which policy drew which tokens, in order: a policy that arrived
    on the way begins a new segment. `proofs` are of the final hidden states that the completion's tokens were chosen
    from, one per started chunk; chunks begin anew at a segment, and where the environment spoke. What it said is
    nowhere in here.
    """

    seed: bytes
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    segment_versions: list[int]
    segment_tokens: list[int]
    proofs: list[bytes]

    @property
    def segments(self) -> list[Segment]:
        """The segments; meaningful once `check_rollouts` has passed."""
        edges = pairwise(accumulate(self.segment_tokens, initial=0))
        return [
            Segment(version, start, end) for version, (start, end) in zip(self.segment_versions, edges, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Expected:
    """The re-derived expectation of a slot's submission.

    `version` is the leased policy's: the oldest one that may have drawn a token. `published` are the versions
    of the run so far, from the leased one on; None where they are not known, as on a worker, and not checked.
    `ask` is the environment of several turns, None for any other; `rules` are what the environment adds to the run's,
    and `max_prompt_tokens` is its own, if it has one.
    """

    version: int
    published: Collection[int] | None
    prompt_ids: Sequence[int]
    seeds: Sequence[bytes]
    vocabulary: int
    eos_ids: Collection[int]
    ask: AskReply | None = None
    rules: TurnRules = RUN_RULES
    max_prompt_tokens: int | None = None

    def most_prompt_tokens(self, sampling: SamplingSpec) -> int:
        """Return the most tokens of a prompt; a longer one is for nobody."""
        run = sampling.max_prompt_tokens
        return run if self.max_prompt_tokens is None else min(run, self.max_prompt_tokens)


def chunk_count(pieces_tokens: Iterable[int], *, chunk_tokens: int) -> int:
    """Return the number of proofs of pieces with these lengths; a shorter last chunk counts."""
    return sum(-(-tokens // chunk_tokens) for tokens in pieces_tokens)


def chunk_sizes(pieces_tokens: Iterable[int], *, chunk_tokens: int) -> list[int]:
    """Return the tokens of each chunk; a piece's last one may be shorter (`node.protocol.turns.pieces`)."""
    return [min(chunk_tokens, tokens - start) for tokens in pieces_tokens for start in range(0, tokens, chunk_tokens)]


def toploc_bytes(proofs: ProofSpec) -> int:
    """Return the size of the TOPLOC part of a proof: a modulus and `top_k` coefficients, two bytes each."""
    return 2 + 2 * proofs.top_k if proofs.has_toploc else 0


def proof_bytes(proofs: ProofSpec, *, tokens: int) -> int:
    """Return the size of the proof of a chunk of `tokens`; a sketch has four bytes for each."""
    return toploc_bytes(proofs) + (4 * tokens if proofs.has_sketch else 0)


def check_rollouts(rollouts: Sequence[Rollout], *, expected: Expected, spec: RunSpec) -> list[Replies]:
    """Raise the first Refusal, in the order of section 6; cheap, and free of any model.

    Returns what the environment said in each rollout. Raises whatever asking it raises.
    """
    if len(rollouts) != len(expected.seeds):
        raise Refusal(Reason.WRONG_GROUP_SIZE, f"{len(rollouts)} rows where {len(expected.seeds)} were leased.")
    said: list[Replies] = []
    most_prompt = expected.most_prompt_tokens(spec.sampling)
    for row, (rollout, seed) in enumerate(zip(rollouts, expected.seeds, strict=True)):
        if list(rollout.prompt_ids) != list(expected.prompt_ids):
            raise Refusal(Reason.WRONG_PROMPT, f"Row {row} answers another prompt.")
        if len(rollout.prompt_ids) > most_prompt:
            raise Refusal(Reason.WRONG_PROMPT, f"Row {row} answers a prompt of more than {most_prompt} tokens.")
        if rollout.seed != seed:
            raise Refusal(Reason.WRONG_SEED, f"Row {row} carries seed {rollout.seed.hex()[:32]}.")
        said.append(_check_tokens(row, rollout.completion_ids, expected=expected, spec=spec))
        _check_logprobs(row, rollout)
        _check_segments(row, rollout, expected=expected, lead=spec.sampling.max_version_lead)
        _check_proofs(row, rollout, said[-1], spec=spec)
    return said


def _check_tokens(row: int, tokens: Sequence[int], *, expected: Expected, spec: RunSpec) -> Replies:
    cap = expected.rules.most_tokens(spec.sampling)
    if not tokens:
        raise Refusal(Reason.EMPTY_COMPLETION, f"Row {row} is empty.")
    if len(tokens) > cap:
        raise Refusal(Reason.TOO_LONG, f"Row {row} has {len(tokens)} tokens, the cap is {cap}.")
    for position, token in enumerate(tokens):
        if not 0 <= token < expected.vocabulary:
            raise Refusal(Reason.TOKEN_OUT_OF_RANGE, f"Row {row} has token id {token} at position {position}.")
    replayed = replay(tokens, eos_ids=expected.eos_ids, sampling=spec.sampling, ask=expected.ask, rules=expected.rules)
    most = replayed.most if replayed.end is None else replayed.end
    if len(tokens) > most:
        raise Refusal(Reason.TOKENS_AFTER_EOS, f"Row {row} goes on after position {most - 1}.")
    if len(tokens) < most:
        raise Refusal(Reason.UNFINISHED, f"Row {row} stops after {len(tokens)} of {most} tokens without an end.")
    return replayed.replies


def _check_logprobs(row: int, rollout: Rollout) -> None:
    if len(rollout.logprobs) != len(rollout.completion_ids):
        raise Refusal(
            Reason.WRONG_LOGPROB_COUNT,
            f"Row {row} has {len(rollout.logprobs)} for {len(rollout.completion_ids)} tokens.",
        )
    for position, logprob in enumerate(rollout.logprobs):
        if not MIN_LOGPROB <= logprob <= MAX_LOGPROB:  # NaN is not
            raise Refusal(Reason.LOGPROB_NOT_FINITE, f"Row {row} has {logprob} at position {position}.")


def _check_segments(row: int, rollout: Rollout, *, expected: Expected, lead: int) -> None:
    versions, tokens, leased = rollout.segment_versions, rollout.segment_tokens, expected.version
    if not versions or len(versions) != len(tokens) or min(tokens) < 1 or sum(tokens) != len(rollout.completion_ids):
        raise Refusal(
            Reason.WRONG_SEGMENTS,
            f"Row {row} has {len(versions)} versions and {len(tokens)} lengths, which are not those of its tokens.",
        )
    if any(later <= earlier for earlier, later in pairwise(versions)):
        raise Refusal(Reason.WRONG_SEGMENTS, f"Row {row}: its versions do not rise.")
    if versions[0] < leased or versions[-1] > leased + lead:
        raise Refusal(
            Reason.WRONG_SEGMENTS,
            f"Row {row} has policies {versions[0]} to {versions[-1]}, {leased} to {leased + lead} are allowed.",
        )
    if expected.published is not None:
        for version in versions:
            if version not in expected.published:
                raise Refusal(Reason.WRONG_SEGMENTS, f"Row {row}: policy {version} was not published.")


def _check_proofs(row: int, rollout: Rollout, replies: Replies, *, spec: RunSpec) -> None:
    sizes = chunk_sizes(pieces(rollout.segment_tokens, replies), chunk_tokens=spec.proofs.chunk_tokens)
    if len(rollout.proofs) != len(sizes):
        raise Refusal(Reason.WRONG_PROOF_COUNT, f"Row {row} has {len(rollout.proofs)} proofs, {len(sizes)} are due.")
    for index, (proof, tokens) in enumerate(zip(rollout.proofs, sizes, strict=True)):
        size = proof_bytes(spec.proofs, tokens=tokens)
        if len(proof) != size:
            raise Refusal(Reason.MALFORMED_PROOF, f"Row {row}, proof {index} has {len(proof)} bytes, not {size}.")
