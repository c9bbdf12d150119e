"""What a continuously batched engine notes of each step: hidden states, forced tokens, proofs, policy versions.

It lives in the process that holds the model, and is told of every step twice: `begin` with the rows of the batch
before tokens are chosen, `sample` with the logits. Hidden states stay on the device in a ring of one chunk per
completion and become proof bytes on another thread as soon as the chunk is full, so memory does not grow with
length. Rows may come in any order, with other requests between them, again after a preemption, and twice where a
scheduler threw a step away: the last write of a position counts, as it does for the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from node.engines.base import BrokenPolicy, EngineError
from node.proofs import build_proofs
from node.protocol.run import ProofSpec
from node.sampling import Choose, choose
from toploc.errors import CallerFault

logger = logging.getLogger(__name__)

FIRST_PLACES = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Whose token a row of the batch chooses: completion `name`'s at `position`; that of its first is `first`, 0 unless
    it goes on after an earlier turn."""

    name: str
    seed: bytes
    position: int
    first: int = 0


class Recorded(msgspec.Struct, frozen=True):
    """One finished completion, as `node.protocol.submission.Rollout` wants it; `fault` says why it is unusable.

    `rereads` is how often it lost its place in the engine's cache, and was read again from its beginning.
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
    """A completion under way. Its ring holds positions `start` .. `end` - 1, all drawn under `version`; `start` and
    `end` count from its own first token."""

    place: int
    version: int
    seed: bytes
    start: int = 0
    end: int = 0
    chunks: list[_Chunk] = field(default_factory=list)
    rereads: int = 0
    fault: str | None = None


class Recorder:
    """Forces and proves the tokens of one engine. Not thread-safe: `begin`, `sample`, `take` come from one thread.

    `version` is the policy's that the model holds now; whoever changes the weights sets it in the same breath.
    `choose` is another rule than the protocol's only where it is measured who is caught.
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
    ) -> None:
        self.version = version
        self._span = chunk_tokens = proofs.chunk_tokens
        self._scheme = proofs
        self._temperature = temperature
        self._device = device
        self._proves = proves
        self._choose = choose
        self._tracks: dict[str, _Track] = {}
        self._free: list[int] = []
        self._hidden = torch.zeros(0, chunk_tokens, hidden, dtype=torch.bfloat16, device=device)
        self._tokens = torch.zeros(0, chunk_tokens, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(0, chunk_tokens, device=device)
        self._step: tuple[list[int], list[Place], Tensor] | None = None
        # One thread: chunks are finished in the order in which they were cut.
        self._prover = ThreadPoolExecutor(1, thread_name_prefix="proofs")
        self._last: Future[None] | None = None

    # -- during a step

    def begin(self, rows: Sequence[Place | None], hidden: Tensor) -> None:
        """Announce a step: row r of `hidden` [rows, H] and of the logits to come is `rows[r]`'s, None: nobody's."""
        kept = [row for row, place in enumerate(rows) if place is not None]
        places = [place for place in rows if place is not None]
        self._step = (kept, places, hidden) if kept else None

    def sample(self, logits: Tensor) -> Tensor:
        """Make the forced token of each announced row its largest logit [rows, V], in place, and note it."""
        step, self._step = self._step, None
        if step is None:
            return logits
        kept, places, hidden = step
        whole = len(kept) == len(logits)
        rows = torch.tensor(kept, device=logits.device)
        choice = self._choose(
            logits if whole else logits[rows],
            [place.seed for place in places],
            [place.position for place in places],
            temperature=self._temperature,
        )
        logits[rows, choice.tokens] = torch.finfo(logits.dtype).max
        if self._proves:
            self._note(places, hidden if whole else hidden[rows], choice.tokens, choice.logprobs)
        return logits

    def end(self) -> None:
        """The step is over; one that was announced and never sampled leaves nothing behind."""
        self._step = None

    def reread(self, names: Sequence[str]) -> None:
        """Completions begin to be read again; those of which nothing was drawn yet do not count."""
        for name in names:
            if name in self._tracks:
                self._tracks[name].rereads += 1

    def _note(self, places: Sequence[Place], hidden: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        full: list[tuple[_Track, _Chunk]] = []
        tracks = [self._track(place) for place in places]
        for track, place in zip(tracks, places, strict=True):
            position = place.position - place.first
            if track.fault is None and not track.start <= position <= track.end:
                track.fault = f"position {position} was drawn where {track.start} to {track.end} was due"
            if track.version != self.version:
                full += self._cut(track, position - track.start)
                track.version = self.version
            elif position - track.start == self._span:
                full += self._cut(track, self._span)
            track.end = position + 1
        self._prove(full)
        sound = [index for index, track in enumerate(tracks) if track.fault is None]
        if len(sound) < len(tracks):
            chosen = torch.tensor(sound, dtype=torch.int64, device=self._device)
            hidden, tokens, logprobs = hidden[chosen], tokens[chosen], logprobs[chosen]
        where = torch.tensor(
            [[tracks[index].place, tracks[index].end - 1 - tracks[index].start] for index in sound],
            dtype=torch.int64,
            device=self._device,
        ).reshape(-1, 2)
        row, column = where.unbind(1)
        self._hidden[row, column] = hidden.bfloat16()
        self._tokens[row, column] = tokens
        self._logprobs[row, column] = logprobs

    def _track(self, place: Place) -> _Track:
        track = self._tracks.get(place.name)
        if track is None:
            if not self._free:
                self._grow()
            track = self._tracks[place.name] = _Track(place=self._free.pop(), version=self.version, seed=place.seed)
        return track

    def _grow(self) -> None:
        old = len(self._hidden)
        more = max(old, FIRST_PLACES)
        self._hidden, self._tokens, self._logprobs = (
            torch.cat([held, held.new_zeros(more, *held.shape[1:])])
            for held in (self._hidden, self._tokens, self._logprobs)
        )
        self._free += range(old, old + more)

    # -- chunks

    def _cut(self, track: _Track, count: int) -> list[tuple[_Track, _Chunk]]:
        """End the ring's chunk after `count` tokens; the next one begins there."""
        if track.fault is not None or count <= 0:
            return []
        chunk = _Chunk(version=track.version, start=track.start, count=count, seed=track.seed)
        track.chunks.append(chunk)
        track.start += count
        return [(track, chunk)]

    def _prove(self, cuts: Sequence[tuple[_Track, _Chunk]]) -> None:
        """Hand chunks to the other thread: copies, because the ring goes on."""
        if not cuts:
            return
        places = torch.tensor([track.place for track, _ in cuts], device=self._device)
        held = self._hidden[places], self._tokens[places], self._logprobs[places]
        self._last = self._prover.submit(_fill, [chunk for _, chunk in cuts], *held, scheme=self._scheme)

    # -- after a completion

    def take(self, wanted: Sequence[tuple[str, int]]) -> list[Recorded]:
        """What was recorded of each completion, `(name, its tokens)`, which is forgotten. Waits for the proofs."""
        tracks = [self._tracks.pop(name, None) for name, _ in wanted]
        cuts: list[tuple[_Track, _Chunk]] = []
        for track, (_, count) in zip(tracks, wanted, strict=True):
            if track is not None:
                cuts += self._cut(track, min(count, track.end) - track.start)
        self._prove(cuts)
        self._free += [track.place for track in tracks if track is not None]
        if self._last is not None:
            self._last.result()
        return [_recorded(track, count) for track, (_, count) in zip(tracks, wanted, strict=True)]

    def drop(self, names: Sequence[str]) -> None:
        """Forget completions that nobody wants any more."""
        for name in names:
            track = self._tracks.pop(name, None)
            if track is not None:
                self._free.append(track.place)

    def __len__(self) -> int:
        return len(self._tracks)


def _fill(chunks: Sequence[_Chunk], hidden: Tensor, tokens: Tensor, logprobs: Tensor, *, scheme: ProofSpec) -> None:
    """Finish chunks from their places of the ring: [chunks, span, H], [chunks, span], [chunks, span]."""
    try:
        states = [row[: chunk.count] for row, chunk in zip(hidden.cpu(), chunks, strict=True)]
        for chunk, row, values in zip(chunks, tokens.tolist(), logprobs.tolist(), strict=True):
            chunk.tokens, chunk.logprobs = row[: chunk.count], values[: chunk.count]
        _build(chunks, states, scheme=scheme)
    except Exception as error:
        logger.exception("proofs could not be built")
        for chunk in chunks:
            chunk.fault = f"{type(error).__name__}: {error}"


def _build(chunks: Sequence[_Chunk], states: Sequence[Tensor], *, scheme: ProofSpec) -> None:
    try:
        proofs = build_proofs(list(states), [chunk.seed for chunk in chunks], spec=scheme)
        for chunk, proof in zip(chunks, proofs, strict=True):
            chunk.proof = proof
    except CallerFault as error:
        if len(chunks) == 1:
            chunks[0].fault = f"its hidden states cannot be proved: {error}"
            return
        for chunk, state in zip(chunks, states, strict=True):
            _build([chunk], [state], scheme=scheme)


def _recorded(track: _Track | None, count: int) -> Recorded:
    if track is None:
        return Recorded([], [], [], [], [], fault="nothing was recorded of it")
    chunks = [chunk for chunk in track.chunks if chunk.start < count]
    fault = track.fault or next((chunk.fault for chunk in chunks if chunk.fault is not None), None)
    if fault is None and sum(chunk.count for chunk in chunks) != count:
        fault = f"{sum(chunk.count for chunk in chunks)} tokens were recorded of {count}"
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
    """Raise what makes `recorded` unfit to be submitted; `delivered` are the tokens that the engine's front said."""
    if recorded.fault is not None:
        raise BrokenPolicy(f"a completion could not be proved: {recorded.fault}")
    if recorded.tokens != list(delivered):
        raise EngineError("the engine delivered other tokens than the run's seeds force")
    if not bool(torch.tensor(recorded.logprobs).isfinite().all()):
        raise BrokenPolicy("the policy's log-probabilities are not finite")
