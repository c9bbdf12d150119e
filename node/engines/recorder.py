"""Records each step of a continuously batched engine: hidden states, forced tokens, proofs, policy versions.

It lives in the process that holds the model and is called twice per step: `begin` with the batch rows before tokens are
chosen, `sample` with the logits. Hidden states stay on the device in a ring of one chunk per completion and become
proofs on another thread once a chunk is full, so memory does not grow with length. A step waits for no copy between
host and device, and states are proved where they are: of a chunk only what its proof is made of comes to the host. Rows
may come in any order, among other requests, again after a preemption, and twice if a scheduler discarded a step: the
last write of a position counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from node.engines.base import BrokenPolicy, EngineError
from node.engines.streams import Streams, Taken, streams_of
from node.protocol.run import ProofSpec
from node.sampling.forced import choose
from node.sampling.transfers import to_device
from node.sampling.types import Choose
from node.verification.proofs import build_proofs
from toploc.errors import CallerFault

logger = logging.getLogger(__name__)

INITIAL_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The completion whose token a batch row chooses: `name`'s at `position`; `first` is the position of its first
    token (0 unless it continues an earlier turn).
    """

    name: str
    seed: bytes
    position: int
    first: int = 0


class Recorded(msgspec.Struct, frozen=True):
    """One finished completion, with the fields of `node.protocol.submission.Rollout`; `fault` says why it is unusable.

    `rereads` counts how often it was evicted from the engine's cache and read again from its beginning.
    """

    tokens: list[int]
    logprobs: list[float]
    segment_versions: list[int]
    segment_tokens: list[int]
    proofs: list[bytes]
    rereads: int = 0
    fault: str | None = None


@dataclass(slots=True)
class _Chunk:
    """A chunk that left the ring: `count` tokens from `start` on, under one version."""

    version: int
    start: int
    count: int
    seed: bytes
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    proof: bytes = b""
    fault: str | None = None


@dataclass(slots=True)
class _Track:
    """A running completion. Its ring slot holds positions `start` .. `end` - 1, all drawn under `version`, counted from
    its own first token.
    """

    slot: int
    version: int
    seed: bytes
    start: int = 0
    end: int = 0
    chunks: list[_Chunk] = field(default_factory=list)
    rereads: int = 0
    fault: str | None = None


class Recorder:
    """Forces and proves the tokens of one engine. Not thread-safe: call every method from one thread.

    `version` is that of the policy the model holds; update it together with the weights. `scheme` may be replaced by
    one with chunks of the same size. `choose` replaces the protocol's sampling rule only in measurements of who is
    caught.
    """

    def __init__(
        self,
        *,
        hidden: int,
        proofs: ProofSpec,
        temperature: float,
        version: int,
        device: torch.device,
        proves: bool = True,
        choose: Choose = choose,
        streams: Streams | None = None,
    ) -> None:
        self.version = version
        self._span = chunk_tokens = proofs.chunk_tokens
        self.scheme = proofs
        self._temperature = temperature
        self._device = device
        self._proves = proves
        self._choose = choose
        self._streams = streams or streams_of(device)
        self._tracks: dict[str, _Track] = {}
        self._free: list[int] = []
        self._hidden = torch.zeros(0, chunk_tokens, hidden, dtype=torch.bfloat16, device=device)
        self._tokens = torch.zeros(0, chunk_tokens, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(0, chunk_tokens, dtype=torch.float32, device=device)
        self._step: tuple[list[int], list[DecodeRow], Tensor] | None = None
        # One thread, so that chunks finish in the order in which they were cut.
        self._prover = ThreadPoolExecutor(1, thread_name_prefix="proofs")
        self._last: Future[None] | None = None

    # -- during a step

    def begin(self, rows: Sequence[DecodeRow | None], hidden: Tensor) -> None:
        """Announce a step: row r of `hidden` [rows, H] and of the logits to come belongs to `rows[r]` (None: to
        nobody).
        """
        kept = [row for row, slot in enumerate(rows) if slot is not None]
        batch_rows = [slot for slot in rows if slot is not None]
        self._step = (kept, batch_rows, hidden) if kept else None

    def sample(self, logits: Tensor) -> Tensor:
        """Set the forced token of each announced row to its largest logit [rows, V], in place, and record it."""
        step, self._step = self._step, None
        if step is None:
            return logits
        kept, batch_rows, hidden = step
        whole = len(kept) == len(logits)
        device = logits.device
        rows = torch.arange(len(kept), device=device) if whole else to_device(np.array(kept), device)
        choice = self._choose(
            logits if whole else logits[rows],
            [slot.seed for slot in batch_rows],
            [slot.position for slot in batch_rows],
            temperature=self._temperature,
        )
        # A number would be copied to the device, which waits for it; this one is made there.
        logits[rows, choice.tokens] = logits.new_full((), torch.finfo(logits.dtype).max)
        if self._proves:
            self._record(batch_rows, hidden if whole else hidden[rows], choice.tokens, choice.logprobs)
        return logits

    def end(self) -> None:
        """End the step; one that was announced but never sampled is discarded."""
        self._step = None

    def reread(self, names: Sequence[str]) -> None:
        """Count completions that are read again; those without any token do not count."""
        for name in names:
            if name in self._tracks:
                self._tracks[name].rereads += 1

    def _record(self, batch_rows: Sequence[DecodeRow], hidden: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        full: list[tuple[_Track, _Chunk]] = []
        tracks = [self._track_of(slot) for slot in batch_rows]
        for track, slot in zip(tracks, batch_rows, strict=True):
            position = slot.position - slot.first
            if track.fault is None and not track.start <= position <= track.end:
                track.fault = f"position {position} was drawn, expected {track.start} to {track.end}"
            if track.version != self.version:
                full += self._cut(track, position - track.start)
                track.version = self.version
            elif position - track.start == self._span:
                full += self._cut(track, self._span)
            track.end = position + 1
        self._prove(full)
        sound = [index for index, track in enumerate(tracks) if track.fault is None]
        if len(sound) < len(tracks):
            chosen = to_device(np.array(sound, dtype=np.int64), self._device)
            hidden, tokens, logprobs = hidden[chosen], tokens[chosen], logprobs[chosen]
        places = [(tracks[index].slot, tracks[index].end - 1 - tracks[index].start) for index in sound]
        row, column = to_device(np.array(places, dtype=np.int64).reshape(-1, 2), self._device).unbind(1)
        self._hidden[row, column] = hidden.bfloat16()
        self._tokens[row, column] = tokens
        self._logprobs[row, column] = logprobs

    def _track_of(self, slot: DecodeRow) -> _Track:
        track = self._tracks.get(slot.name)
        if track is None:
            if not self._free:
                self._grow()
            track = self._tracks[slot.name] = _Track(slot=self._free.pop(), version=self.version, seed=slot.seed)
        return track

    def _grow(self) -> None:
        old = len(self._hidden)
        more = max(old, INITIAL_CAPACITY)
        self._hidden, self._tokens, self._logprobs = (
            torch.cat([held, held.new_zeros(more, *held.shape[1:])])
            for held in (self._hidden, self._tokens, self._logprobs)
        )
        self._free += range(old, old + more)

    # -- chunks

    def _cut(self, track: _Track, count: int) -> list[tuple[_Track, _Chunk]]:
        """Cut the ring's chunk after `count` tokens; the next one begins there."""
        if track.fault is not None or count <= 0:
            return []
        chunk = _Chunk(version=track.version, start=track.start, count=count, seed=track.seed)
        track.chunks.append(chunk)
        track.start += count
        return [(track, chunk)]

    def _prove(self, cuts: Sequence[tuple[_Track, _Chunk]]) -> None:
        """Submit copies of chunks to the proof thread, as the ring is reused."""
        if not cuts:
            return
        slots = to_device(np.array([track.slot for track, _ in cuts]), self._device)
        held = self._hidden[slots], self._tokens[slots], self._logprobs[slots]
        taken = self._streams.hand_over(held)
        self._last = self._prover.submit(_complete_chunks, [chunk for _, chunk in cuts], taken, scheme=self.scheme)

    # -- after a completion

    def collect(self, wanted: Sequence[tuple[str, int]]) -> list[Recorded]:
        """Return and forget the records of completions `(name, its tokens)`; waits for their proofs.

        A chunk that was proved with tokens beyond a completion's is left out of its record.
        """
        tracks = [self._tracks.pop(name, None) for name, _ in wanted]
        cuts: list[tuple[_Track, _Chunk]] = []
        for track, (_, count) in zip(tracks, wanted, strict=True):
            if track is not None:
                cuts += self._cut(track, min(count, track.end) - track.start)
        self._prove(cuts)
        self._free += [track.slot for track in tracks if track is not None]
        if self._last is not None:
            self._last.result()
        return [_to_recorded(track, count) for track, (_, count) in zip(tracks, wanted, strict=True)]

    def drop(self, names: Sequence[str]) -> None:
        """Forget abandoned completions."""
        for name in names:
            track = self._tracks.pop(name, None)
            if track is not None:
                self._free.append(track.slot)

    def __len__(self) -> int:
        return len(self._tracks)


def _complete_chunks(chunks: Sequence[_Chunk], taken: Taken, *, scheme: ProofSpec) -> None:
    """Complete chunks from their ring slots: states [chunks, span, H], tokens and log-probabilities [chunks, span]."""
    try:
        with taken as (hidden, tokens, logprobs):
            for chunk, row, values in zip(chunks, tokens.tolist(), logprobs.tolist(), strict=True):
                chunk.tokens, chunk.logprobs = row[: chunk.count], values[: chunk.count]
            states = [row[: chunk.count] for row, chunk in zip(hidden, chunks, strict=True)]
            _build_proofs(chunks, states, scheme=scheme)
    except Exception as error:
        logger.exception("building proofs failed; the completions are unusable")
        for chunk in chunks:
            chunk.fault = f"{type(error).__name__}: {error}"


def _build_proofs(chunks: Sequence[_Chunk], states: Sequence[Tensor], *, scheme: ProofSpec) -> None:
    try:
        proofs = build_proofs(list(states), [chunk.seed for chunk in chunks], spec=scheme)
        for chunk, proof in zip(chunks, proofs, strict=True):
            chunk.proof = proof
    except CallerFault as error:
        if len(chunks) == 1:
            chunks[0].fault = f"hidden states cannot be proved: {error}"
            return
        for chunk, state in zip(chunks, states, strict=True):
            _build_proofs([chunk], [state], scheme=scheme)


def _to_recorded(track: _Track | None, count: int) -> Recorded:
    if track is None:
        return Recorded([], [], [], [], [], fault="no tokens were recorded")
    begun = [chunk for chunk in track.chunks if chunk.start < count]
    chunks = [chunk for chunk in begun if chunk.start + chunk.count <= count]
    fault = track.fault or next((chunk.fault for chunk in chunks if chunk.fault is not None), None)
    if fault is None and sum(chunk.count for chunk in begun) < count:
        fault = f"{sum(chunk.count for chunk in begun)} tokens were recorded of {count}"
    versions = list(dict.fromkeys(chunk.version for chunk in chunks))
    return Recorded(
        tokens=[token for chunk in chunks for token in chunk.tokens],
        logprobs=[value for chunk in chunks for value in chunk.logprobs],
        segment_versions=versions,
        segment_tokens=[sum(chunk.count for chunk in chunks if chunk.version == version) for version in versions],
        proofs=[chunk.proof for chunk in chunks],
        rereads=track.rereads,
        fault=fault,
    )


def check_recorded(recorded: Recorded, *, delivered: Sequence[int]) -> None:
    """Raise if `recorded` is unfit for submission; `delivered` are the tokens the engine's front end reported."""
    if recorded.fault is not None:
        raise BrokenPolicy(f"completion could not be proved: {recorded.fault}")
    if recorded.tokens != list(delivered):
        raise EngineError("engine delivered other tokens than the run's seeds force")
    if not bool(torch.tensor(recorded.logprobs).isfinite().all()):
        raise BrokenPolicy("policy's log-probabilities are not finite")
