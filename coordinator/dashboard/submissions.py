"""A submission's page: prompt and completions, measurements, verdict and inclusion proof."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.dashboard.conversation import Utterance, conversation_of
from coordinator.dashboard.figures import read_entry
from coordinator.dashboard.formatting import name_of, number
from coordinator.dashboard.listed import MOST_NAME
from coordinator.dashboard.verdict_words import GROUP_FIGURES, headline, why
from coordinator.dashboard.visible import visible
from coordinator.errors import StorageFault
from coordinator.storage import log
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Connection
from coordinator.storage.schema import SubmissionState
from coordinator.storage.steps import manifest_digests
from coordinator.storage.submissions import SubmissionRow, step_of, submission_row
from coordinator.verifier.evidence import (
    MAX_BLOB_BYTES,
    ChunkEvidence,
    Evidence,
    RowEvidence,
    decode_evidence,
    halves,
    token_ids,
)
from node.environments import known_answer
from node.protocol import merkle
from node.protocol.admission import limit_of
from node.protocol.messages import VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec, RunSpec
from node.protocol.slots import SlotProblem, slot_problem

logger = logging.getLogger(__name__)

MOST_TOKENS: Final = 4000
"""Maximum tokens on one page; the chosen completion comes first."""

MOST_CHUNKS: Final = 256
MOST_ANSWER: Final = 2000
SHOWN_REPLY: Final = 100
"""Maximum characters of an environment's reply."""

MARGIN_STEPS: Final = (0.001, 0.01, 0.1, 0.5, 1.0)
"""Bounds of the colours of margins, as shares of the limit `token_margin`."""

_UNREADABLE: Final = (Reason.MALFORMED_SUBMISSION, Reason.WRONG_SCHEMA, Reason.WRONG_GROUP_SIZE)
_CHUNK_FIGURES: Final = (
    ("exponent_mismatches", "exponent mismatches", "TOPLOC: values of the chunk whose exponents differ"),
    ("mantissa_mean", "mantissa, mean", "TOPLOC: how far the other mantissas are apart on average"),
    ("mantissa_median", "mantissa, median", "TOPLOC: the same, in the middle"),
    (
        "sketch_distance",
        "sketch",
        "how far a typical token is from its sketch, in steps; the limit is that of the whole completion",
    ),
)


@dataclass(frozen=True, slots=True)
class Token:
    """A token: `text` made visible, `grade` 0 .. 5 of its margin (None if not measured).

    `said` is the environment's reply before it, None if there is none.
    """

    text: str
    id: int
    grade: int | None
    margin: str
    error: str
    chunk: int | None
    said: str | None


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure of a chunk: `share` of its limit in per cent, at most 100; `over` if it exceeds the limit."""

    value: str
    share: int
    over: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    number: int
    first: int
    tokens: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One completion of `count` tokens: `kept` of them are in the evidence, `shown` are those on the page."""

    number: int
    count: int
    kept: int
    measured: bool
    reward: float | None
    shown: Sequence[Token]
    chunks: Sequence[Chunk]
    more_chunks: int
    worst_margin: str
    segments: str
    failed: bool
    conversation: Sequence[Utterance]


@dataclass(frozen=True, slots=True)
class Proof:
    """A verdict's log index and inclusion proof; hashes in hexadecimal."""

    index: int
    leaf: str
    leaf_hash: str
    size: int
    path: Sequence[str]
    root: str


@dataclass(frozen=True, slots=True)
class ShownVerdict:
    """A verdict's log entry, with its proof and explanation."""

    entry: VerdictEntry
    proof: Proof
    headline: str
    why: str
    figures: Sequence[tuple[str, str, str, Cell]]


@dataclass(frozen=True, slots=True)
class SubmissionView:
    """The content of the page; `answer` is the right one, "" where it is not public."""

    submission: str
    node: str
    request: str
    body: str
    body_bytes: int
    version: int
    slot: int
    state: str
    received_at: float
    decided_at: float | None
    attempts: int
    step: int | None
    judgements: Sequence[ShownVerdict]
    environment: str
    problem: int
    answer: str
    prompt: str
    prompt_tokens: int
    rows: Sequence[RolloutRow]
    chosen: int
    missing: str
    chunk_names: Sequence[tuple[str, str, str]]
    grades: Sequence[str]


@dataclass(frozen=True, slots=True)
class Record:
    """A submission in the database: its row, its problem, the step that used it, and its verdicts."""

    submission: str
    row: SubmissionRow
    problem: SlotProblem
    step: int | None
    judgements: Sequence[ShownVerdict]


def read_record(connection: Connection, submission: str, *, spec: RunSpec, run_id: str) -> Record | None:
    """Read the record of `submission`; return None if it is unknown."""
    found = submission_row(connection, submission)
    if found is None:
        return None
    size = log.size(connection)
    indices = [index for index in (found.log_index, found.recheck_index) if index is not None]
    judgements = [one for index in indices if (one := _judgement(connection, index, size, spec=spec)) is not None]
    step = step_of(connection, submission)
    manifest = manifest_digests(connection, [found.version])[found.version]
    problem = slot_problem(
        spec, run_id=run_id, manifest_digest=manifest, slot=found.slot, candidate=found.candidate or 0
    )
    return Record(submission, found, problem, step, judgements)


def view_of(record: Record, blobs: BlobStore, *, spec: RunSpec, row: int | None) -> SubmissionView:
    """Build the page, with the tokens of completion `row` before those of the others."""
    found, judgements = record.row, record.judgements
    environment = spec.environments[record.problem.environment]
    evidence, missing = _evidence(blobs, found, decided=bool(judgements))
    entry = judgements[-1].entry if judgements else None
    rewards = next((one.entry.rewards for one in judgements if one.entry.rewards), None)
    chosen = _chosen(entry, row, evidence)
    return SubmissionView(
        submission=record.submission,
        node=found.node,
        request=found.request,
        body=found.body,
        body_bytes=found.body_bytes,
        version=found.version,
        slot=found.slot,
        state=found.state,
        received_at=found.received_at,
        decided_at=found.decided_at,
        attempts=found.attempts,
        step=record.step,
        judgements=judgements,
        environment=visible(environment.name, most=MOST_NAME),
        problem=record.problem.problem,
        answer=visible(known_answer(environment, record.problem.problem) or "", most=MOST_ANSWER, lines=True),
        prompt="" if evidence is None else visible(evidence.prompt, most=8000, lines=True),
        prompt_tokens=0 if evidence is None else evidence.prompt_tokens,
        rows=[] if evidence is None else _rows(evidence, entry, rewards, chosen=chosen, limits=spec.limits),
        chosen=chosen,
        missing=missing,
        chunk_names=[
            (label, said, number(limit_of(name, spec.limits)[1])) for name, label, said in _chunk_figures(spec)
        ],
        grades=_grades(spec.limits),
    )


def _judgement(connection: Connection, index: int, size: int, *, spec: RunSpec) -> ShownVerdict | None:
    leaves = log.leaves(connection, index, index + 1)
    entry = read_entry(leaves[0]) if leaves else None
    if not isinstance(entry, VerdictEntry):
        return None
    proof = Proof(
        index=index,
        leaf=leaves[0].decode(errors="replace"),
        leaf_hash=merkle.leaf_hash(leaves[0]).hex(),
        size=size,
        path=[one.hex() for one in log.inclusion(connection, index, size)],
        root=log.root(connection, size).hex(),
    )
    return ShownVerdict(entry, proof, headline(entry), why(entry, spec), _figures(entry, spec.limits))


def _figures(entry: VerdictEntry, limits: LimitsSpec) -> list[tuple[str, str, str, Cell]]:
    """Return the group's figures from the log, with their limits."""
    if entry.figures is None:
        return []
    found = []
    for name, said in GROUP_FIGURES.items():
        limit = limit_of(name, limits)[1]
        found.append((name_of(name), said, number(limit), _cell(getattr(entry.figures, name), limit)))
    return found


def _cell(value: float, limit: float) -> Cell:
    over = not value <= limit
    share = 100 if over or limit <= 0 else round(100 * value / limit)
    return Cell(number(value), 0 if limit <= 0 and not over else share, over)


def _evidence(blobs: BlobStore, found: Any, *, decided: bool) -> tuple[Evidence | None, str]:
    """Load the evidence, or say why there is none."""
    if found.state == SubmissionState.EXPIRED:
        return None, "The files of this submission are removed: the operator keeps them for some days only."
    if found.evidence is None:
        if not decided:
            return None, "The verifier has not judged it yet."
        if found.reason in _UNREADABLE:
            return None, "There is nothing to show: the file could not be read as a submission."
        return None, (
            "No evidence was kept: the verifier could not decide, was told to keep none, or was of an earlier release."
        )
    try:
        return decode_evidence(blobs.get(found.evidence, max_bytes=MAX_BLOB_BYTES)), ""
    except StorageFault as error:
        logger.warning("evidence blob %s not shown: %s", found.evidence, error)
        return None, "Evidence was kept, and is no longer in the run's store."


def _chosen(entry: VerdictEntry | None, row: int | None, evidence: Evidence | None) -> int:
    count = 0 if evidence is None else len(evidence.rows)
    found = entry.finding.row if entry is not None and entry.finding is not None else None
    for wanted in (row, found, None if entry is None else entry.spot):
        if wanted is not None and 0 <= wanted < count:
            return wanted
    return 0


def _rows(
    evidence: Evidence,
    entry: VerdictEntry | None,
    rewards: tuple[float, ...] | None,
    *,
    chosen: int,
    limits: LimitsSpec,
) -> list[RolloutRow]:
    """Return all completions, with tokens of the chosen one, then of the others as far as they fit."""
    left, shown = MOST_TOKENS, {}
    for number_ in (chosen, *(at for at in range(len(evidence.rows)) if at != chosen)):
        own = evidence.rows[number_]
        shown[number_] = _tokens(own, limits, most=left) if number_ == chosen or len(own.pieces) <= left else []
        left -= len(shown[number_])
    failed = entry.finding.row if entry is not None and entry.finding is not None else None
    return [
        RolloutRow(
            number=at,
            count=row.tokens,
            kept=len(row.pieces),
            measured=row.is_measured,
            reward=rewards[at] if rewards is not None and at < len(rewards) else None,
            shown=shown[at],
            chunks=[_chunk(index, chunk, limits) for index, chunk in enumerate(row.chunks[:MOST_CHUNKS])],
            more_chunks=max(0, len(row.chunks) - MOST_CHUNKS),
            worst_margin=number(max(halves(row.margins), default=None)) if row.is_measured else "",
            segments=_segments(row),
            failed=at == failed,
            conversation=conversation_of(row, most_tokens=len(shown[at])),
        )
        for at, row in enumerate(evidence.rows)
    ]


def _segments(row: RowEvidence) -> str:
    if len(row.segments) == 1:
        return f"by policy {row.segments[0][0]}"
    return ", ".join(f"{tokens} by policy {version}" for version, tokens in row.segments)


def _tokens(row: RowEvidence, limits: LimitsSpec, *, most: int) -> list[Token]:
    ids, margins, errors = token_ids(row.ids), halves(row.margins), halves(row.errors)
    chunk_at = [index for index, chunk in enumerate(row.chunks) for _ in range(chunk.tokens)]
    replies = {before: visible(said, most=SHOWN_REPLY, lines=True) for before, said in row.replies}
    found = []
    for at, (piece, id_) in enumerate(zip(row.pieces[:most], ids, strict=False)):
        measured = at < len(margins) and at < len(errors)
        found.append(
            Token(
                text=visible(piece, most=64, lines=True) if piece else "·",
                id=id_,
                grade=_grade(margins[at], limits) if measured else None,
                margin=number(margins[at]) if measured else "",
                error=number(errors[at]) if measured else "",
                chunk=chunk_at[at] if at < len(chunk_at) else None,
                said=replies.get(at),
            )
        )
    return found


def _grade(margin: float, limits: LimitsSpec) -> int:
    """Grade a token's margin: 0 for as good as forced, up to 5 for beyond the limit."""
    if math.isnan(margin):
        return len(MARGIN_STEPS)
    steps = [share * limits.token_margin for share in MARGIN_STEPS]
    return sum(margin > step for step in steps)


def _grades(limits: LimitsSpec) -> list[str]:
    """Return what each colour means, from grade 0 on."""
    steps = [number(share * limits.token_margin, 2) for share in MARGIN_STEPS]
    return [f"up to {step}" for step in steps] + [f"above {steps[-1]}, the limit"]


def _chunk_figures(spec: RunSpec) -> list[tuple[str, str, str]]:
    has = {"sketch_distance": spec.proofs.has_sketch}
    return [one for one in _CHUNK_FIGURES if has.get(one[0], spec.proofs.has_toploc)]


def _chunk(index: int, chunk: ChunkEvidence, limits: LimitsSpec) -> Chunk:
    cells = []
    for name, _, _ in _CHUNK_FIGURES:
        value = getattr(chunk, name)
        if value is not None:
            cells.append(_cell(value, limit_of(name, limits)[1]))
    return Chunk(index, chunk.start, chunk.tokens, tuple(cells))
