"""Forced sampling: noise that a seed fixes bit for bit, and the token that follows (sections 4.1 to 4.7)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from blake3 import blake3

from .values import Refused

ENTRIES = 22 * 2048
TABLE_DIGEST = "487087ce087c45ee199c21a01b19e4a80dcec4f694a0d83ec53b25a603685f77"
MASK = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
STEPS = 0x9E3779B9, 0xBB67AE85


def philox(counter: Sequence[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Return Philox4x32-10 of many counters, given as four arrays of 32-bit words in uint64 (4.1)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> HALF) ^ c1 ^ np.uint64(k0),
            second & MASK,
            (first >> HALF) ^ c3 ^ np.uint64(k1),
            first & MASK,
        )
        k0, k1 = (k0 + STEPS[0]) & 0xFFFFFFFF, (k1 + STEPS[1]) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def make_table() -> np.ndarray:
    """Return the table of 4.2 after comparing its digest; refuse to take part if this machine makes another."""
    values = []
    for index in range(ENTRIES):
        octave = max(index // 2048 - 1, 0)
        low = (index - 2048 * octave) << octave
        values.append(-math.log(-math.log1p(-(low + 2**octave / 2) / 2**32)))
    table = np.array(values, dtype=np.float64).astype("<f4")
    if blake3(table.tobytes()).hexdigest() != TABLE_DIGEST:
        raise Refused("other_table", "this machine's logarithm rounds otherwise")
    return table


TABLE = make_table()


def index_of(words: np.ndarray) -> np.ndarray:
    """Return the table's index of each 32-bit word."""
    length = np.frexp(words.astype(np.float64))[1]  # exact below 2^53; 0 for 0
    octave = np.maximum(length - 12, 0).astype(np.uint64)
    return (np.uint64(2048) * octave + (words >> octave)).astype(np.int64)


def noise(seed: bytes, position: int, vocabulary: int) -> np.ndarray:
    """Return the float32 noise of all tokens at a position of a completion (4.3)."""
    s0, s1, s2, s3 = (int.from_bytes(seed[start : start + 4], "little") for start in range(0, 16, 4))
    blocks = np.arange((vocabulary + 3) // 4, dtype=np.uint64)
    counter = [blocks, *(np.full_like(blocks, word) for word in (position, s2, s3))]
    words = np.stack(philox(counter, (s0, s1)), axis=1).reshape(-1)[:vocabulary]
    return TABLE[index_of(words)]


def choose(logits: np.ndarray, seed: bytes, position: int, temperature: float) -> int:
    """Return the forced token: the lowest of those with the largest noised logit, in float32 (4)."""
    scores = np.asarray(logits, dtype=np.float32) / np.float32(temperature) + noise(seed, position, len(logits))
    return int(np.argmax(scores))


def log_probability(logits: np.ndarray, token: int, temperature: float) -> np.float32:
    """Return the log-probability of `token` at the run's temperature, without noise (4.5)."""
    scaled = np.asarray(logits, dtype=np.float32) / np.float32(temperature)
    scaled = scaled - scaled.max()
    return scaled[token] - np.log(np.exp(scaled).sum(dtype=np.float32))


@dataclass(frozen=True)
class Course:
    """How a completion goes: what stands between its tokens, its turns, and where it is over (4.7, 4.10).

    `replies` are by the number of tokens before each, with the ends of thoughts, which are in `turns` as well. `end`
    is the number of tokens after which a turn's end ends the rollout, None where none does; `most` the most that it may
    have.
    """

    replies: dict[int, list[int]]
    turns: list[list[int]]
    end: int | None
    most: int

    @property
    def over(self) -> int:
        """The number of tokens of the whole rollout."""
        return self.most if self.end is None else self.end


@dataclass(frozen=True)
class Turns:
    """Where the turns of a completion end, and what stands between its tokens (4.7, 4.10).

    `ask(turns)` is what the environment says, as token ids, after these turns; None for nothing more. `text` is that of
    tokens. `thought` is a budget and the tokens of what ends a thought, `is_open` whether one is open.
    """

    eos_ids: frozenset[int]
    max_new_tokens: int
    max_turns: int
    max_reply_tokens: int
    stop: Sequence[str] = ()
    text: Callable[[Sequence[int]], str] = repr
    thought: tuple[int, Sequence[int]] | None = None
    is_open: Callable[[str], bool] = bool

    def _stops(self, piece: Sequence[int]) -> bool:
        window = max((len(one.encode()) for one in self.stop), default=0) + 8
        return any(one in self.text(piece[-window:]) for one in self.stop)

    def course(self, tokens: Sequence[int], ask: Callable[[list[list[int]]], Sequence[int] | None]) -> Course:
        """Return how a completion goes that begins with `tokens`."""
        course = Course({}, [], None, self.max_new_tokens)
        said, before, turn, piece = 0, 0, list[int](), list[int]()
        for count, token in enumerate(tokens, 1):
            piece.append(token)
            if token in self.eos_ids or self._stops(piece):
                course.turns.append(turn + piece)
                before, turn, piece = count, [], []
                reply = None
                if len(course.turns) < self.max_turns and count < course.most:
                    reply = ask(course.turns)
                if reply is None or said + len(reply) > self.max_reply_tokens:
                    return replace(course, end=count)
                said += len(reply)
                course.replies[count] = list(reply)
            elif self.thought is not None and not turn and len(piece) == self.thought[0]:
                budget, end = self.thought
                if before + budget + len(end) < course.most:
                    ending = list(end) if self.is_open(self.text(piece)) else []
                    course.replies[count] = ending
                    course, turn, piece = replace(course, most=course.most - len(ending)), piece + ending, []
        if turn or piece:
            course.turns.append(turn + piece)
        return course


def context_of(prompt: Sequence[int], tokens: Sequence[int], replies: dict[int, list[int]]) -> list[int]:
    """Return the sequence over which the token after `tokens` is drawn."""
    context = list(prompt)
    for count, token in enumerate(tokens, 1):
        context += [token, *replies.get(count, ())]
    return context


def chunks_of(segment_tokens: Sequence[int], turn_ends: Sequence[int], chunk_tokens: int) -> list[tuple[int, int, int]]:
    """Return (segment, first token, tokens) of each chunk: cut where a segment or a turn ends (6.2)."""
    chunks, start = [], 0
    for segment, count in enumerate(segment_tokens):
        end = start + count
        cuts = sorted({start, end, *(cut for cut in turn_ends if start < cut < end)})
        for low, high in itertools.pairwise(cuts):
            chunks += [(segment, first, min(chunk_tokens, high - first)) for first in range(low, high, chunk_tokens)]
        start = end
    return chunks
