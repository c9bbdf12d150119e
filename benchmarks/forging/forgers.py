"""The ladder of forgers: proofs of states never computed, from random bytes to all of the policy but one layer.

Every forger knows the run, the policy's weights, the tokens it proves, the seed of the sketch's projections, and as
many honest states of other prompts as it likes. The tokens and log-probabilities of a forgery are right, so that the
proofs alone decide: what a worker that decodes from something cheaper would have to bring about besides is forced
sampling's to stop.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.forging.policies import PROMPT_TOKENS, SAMPLES
from node.protocol.run import ProofSpec
from node.protocol.submission import chunk_sizes
from toploc import build_chunk_proofs, build_chunk_sketches

MODULUS = 65497
"""Every index of a chunk here is below it, so an honest proof has no other."""
FEATURE_TOKENS = 8
"""Number of last tokens whose embeddings the linear surrogate sees."""
_RIDGE = 1e-3
_KNOWN_STATES = 64
_CHUNKS_FOR_SEARCH = 256


@dataclass(frozen=True, slots=True)
class Window:
    """The rollout of tokens `start` .. `start + tokens` - 1 of a row, all before it being its prompt."""

    row: int
    start: int
    tokens: int
    seed: bytes

    def of(self, states: Tensor) -> Tensor:
        """Return its part of [rows, tokens, hidden]."""
        return states[self.row, self.start : self.start + self.tokens]

    def chunks(self, states: Tensor, chunk_tokens: int) -> list[Tensor]:
        return list(torch.split(self.of(states), chunk_tokens))


Proofs = list[list[bytes]]
"""For each rollout, a proof for each chunk."""


def windows(rows: int, positions: int, *, tokens: int, count: int, label: str) -> list[Window]:
    """Draw `count` rollouts of `tokens` tokens within `rows` of `positions`, each with its own seed.

    All samples of a prompt are adjacent, at the same place. None begins at a row's first state, which they have in
    common. Once every place was taken, they are taken again.
    """
    each = positions - tokens
    order = list(range(rows // SAMPLES * each))
    random.Random(label).shuffle(order)
    found = []
    for number in range(count):
        prompt, start = divmod(order[number // SAMPLES % len(order)], each)
        seed = blake2b(f"{label} {tokens} {number}".encode(), digest_size=16).digest()
        found.append(Window(prompt * SAMPLES + number % SAMPLES, start + 1, tokens, seed))
    return found


def sizes(window: Window, spec: ProofSpec) -> list[int]:
    """Return the tokens of each chunk."""
    return chunk_sizes([window.tokens], chunk_tokens=spec.chunk_tokens)


class ByteForger(ABC):
    """Makes bytes without states of its own."""

    def __init__(self, spec: ProofSpec) -> None:
        self.spec = spec

    @abstractmethod
    def prove(self, batch: Sequence[Window]) -> Proofs:
        """Make for each chunk TOPLOC's bytes, then the sketch's."""


class StateForger:
    """Proves states [rows, tokens, hidden] that are not the policy's, over the right tokens."""

    def __init__(self, states: Tensor) -> None:
        self.states = states

    def source(self, batch: Sequence[Window], index: int) -> Window:
        """Return the window whose states are proved for rollout `index` of the batch."""
        return batch[index]


Forger = ByteForger | StateForger


def prove_all(rungs: Mapping[str, Forger], batch: Sequence[Window], spec: ProofSpec) -> dict[str, Proofs]:
    """Make each rung's proofs of each rollout.

    The bytes that `node.verification.proofs.build_proofs` makes of each forger's chunks, but TOPLOC's, in which there
    is no seed, are made once for all who prove the same states.
    """
    found = {name: forger.prove(batch) for name, forger in rungs.items() if isinstance(forger, ByteForger)}
    states = {name: forger for name, forger in rungs.items() if isinstance(forger, StateForger)}
    sources = {name: [forger.source(batch, index) for index in range(len(batch))] for name, forger in states.items()}
    unlike: dict[tuple[int, int, int, int], list[Tensor]] = {}
    for name, forger in states.items():
        for window in sources[name]:
            key = (id(forger.states), window.row, window.start, window.tokens)
            if key not in unlike:
                unlike[key] = window.chunks(forger.states, spec.chunk_tokens)
    built = iter(build_chunk_proofs([chunk for own in unlike.values() for chunk in own], spec.top_k))
    toploc = {key: [next(built) for _ in own] for key, own in unlike.items()}
    keys = {
        name: [(id(forger.states), window.row, window.start, window.tokens) for window in sources[name]]
        for name, forger in states.items()
    }
    chunks = [chunk for own in keys.values() for key in own for chunk in unlike[key]]
    seeds = [batch[index].seed for own in keys.values() for index, key in enumerate(own) for _ in unlike[key]]
    sketches = iter(build_chunk_sketches(chunks, seeds, step=spec.sketch_step))
    found |= {name: [[proof + next(sketches) for proof in toploc[key]] for key in own] for name, own in keys.items()}
    return {name: found[name] for name in rungs}


class RandomBytes(ByteForger):
    """Random bytes of the right form: the one modulus, coefficients below the prime, any sketch."""

    def prove(self, batch: Sequence[Window]) -> Proofs:
        generator = np.random.default_rng(int.from_bytes(batch[0].seed, "little"))
        return [[self._proof(generator, size) for size in sizes(window, self.spec)] for window in batch]

    def _proof(self, generator: np.random.Generator, tokens: int) -> bytes:
        words = generator.integers(MODULUS, size=self.spec.top_k).astype(">u2")
        return MODULUS.to_bytes(2, "big") + words.tobytes() + generator.bytes(4 * tokens)


def constant_proof(pattern: int, *, top_k: int) -> bytes:
    """Make TOPLOC's proof whose polynomial is `pattern` everywhere."""
    return b"".join(word.to_bytes(2, "big") for word in (MODULUS, pattern, *[0] * (top_k - 1)))


class Zero(ByteForger):
    """The polynomial that is 0 everywhere, and level 0 for every projection."""

    def prove(self, batch: Sequence[Window]) -> Proofs:
        toploc = constant_proof(0, top_k=self.spec.top_k)
        return [[toploc + bytes(4 * size) for size in sizes(window, self.spec)] for window in batch]


class Searched(ByteForger):
    """The constant that fits known honest states best.

    TOPLOC: the constant nearest to known chunks of the same length. Sketch: for each
    projection, which the seed makes public, the level that most known states fall on.
    """

    def __init__(self, spec: ProofSpec, known: Tensor) -> None:
        super().__init__(spec)
        self._known = known
        self._constants: dict[int, bytes] = {}
        flat = known.reshape(-1, known.shape[-1])
        self._sample = flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))[:_KNOWN_STATES]]

    def prove(self, batch: Sequence[Window]) -> Proofs:
        seeds = [window.seed for window in batch]
        sketches = build_chunk_sketches([self._sample] * len(batch), seeds, step=self.spec.sketch_step)
        return [
            [self._constant(size) + _commonest(sketch) * size for size in sizes(window, self.spec)]
            for window, sketch in zip(batch, sketches, strict=True)
        ]

    def pattern(self, tokens: int) -> int:
        """Return the constant, without a sign, that is least far from known chunks of so many tokens."""
        chunks = self._known.unfold(1, tokens, tokens).transpose(2, 3).reshape(-1, tokens * self._known.shape[-1])
        return nearest_constant(chunks[:_CHUNKS_FOR_SEARCH], top_k=self.spec.top_k)

    def _constant(self, tokens: int) -> bytes:
        if tokens not in self._constants:
            self._constants[tokens] = constant_proof(self.pattern(tokens), top_k=self.spec.top_k)
        return self._constants[tokens]


def nearest_constant(chunks: Tensor, *, top_k: int) -> int:
    """Return the bit pattern nearest to the largest elements of `chunks` [n, elements].

    Of all with their commonest exponent it is the one whose distances are the smallest share of TOPLOC's published
    limits: of the limit that is nearest to being exceeded, on average over chunks.
    """
    largest = (chunks.contiguous().view(torch.int16).int() & 0x7FFF).topk(top_k, dim=1).values
    exponent = int((largest >> 7).mode(dim=1).values.mode().values)
    same = largest >> 7 == exponent
    count = same.sum(1).clamp(min=1)
    shares = []
    for mantissa in range(128):
        error = ((largest & 127) - mantissa).abs().float()
        mean = (error * same).sum(1) / count
        median = error.masked_fill(~same, torch.nan).nanmedian(1).values.nan_to_num(128.0)
        shares.append(torch.stack([(top_k - count) / 38, mean / 10, median / 8]).amax(0).mean())
    return exponent << 7 | int(torch.stack(shares).argmin())


def _commonest(sketch: bytes) -> bytes:
    """Return the four bytes of a token whose every level is the commonest in `sketch`."""
    octets = np.frombuffer(sketch, dtype=np.uint8).reshape(-1, 4)
    low, high = ((part[..., None] == np.arange(16)).sum(0).argmax(-1) for part in (octets & 15, octets >> 4))
    return bytes((low | high << 4).tolist())


class Everywhere(StateForger):
    """One state [hidden] for every token of every rollout."""

    def __init__(self, state: Tensor, *, tokens: int) -> None:
        super().__init__(state.expand(1, tokens, -1))

    def source(self, batch: Sequence[Window], index: int) -> Window:
        return Window(0, 0, batch[index].tokens, batch[index].seed)


class OtherPrompt(StateForger):
    """Replays another prompt's completion: an honest worker's states, where they belong to another rollout.

    Its sketch is of these states under the rollout's own projections. The bytes as they were sent, under the other
    rollout's, would be as good as random.
    """

    def source(self, batch: Sequence[Window], index: int) -> Window:
        own = batch[index]
        for step in range(1, len(batch)):
            other = batch[(index + step) % len(batch)]
            if own.row // SAMPLES != other.row // SAMPLES:
                return other
        return Window((own.row + SAMPLES) % len(self.states), own.start, own.tokens, own.seed)


class OtherSample(OtherPrompt):
    """Replays another completion of the same prompt, one that differs before this one's first token."""

    def __init__(self, states: Tensor, ids: Tensor) -> None:
        super().__init__(states)
        self._ids = ids

    def source(self, batch: Sequence[Window], index: int) -> Window:
        own = batch[index]
        first = own.row - own.row % SAMPLES
        before = slice(0, PROMPT_TOKENS + own.start)
        for step in range(1, SAMPLES):
            row = first + (own.row + step) % SAMPLES
            if not torch.equal(self._ids[row, before], self._ids[own.row, before]):
                return Window(row, own.start, own.tokens, own.seed)
        # All of them begin alike, so that their states here are the right ones.
        return super().source(batch, index)


def linear(embedding: Tensor, known_ids: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    """Predict final states for `ids` by ridge regression from the last tokens' embeddings, at the honest length."""
    x, y = _features(embedding, known_ids), known.float().flatten(0, 1)
    gram = x.T @ x
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    weights = torch.linalg.solve(gram, x.T @ y)
    length = y.norm(dim=1).mean()
    parts = []
    for part in torch.split(ids, 64):
        states = _features(embedding, part) @ weights
        parts.append((states * length / states.norm(dim=1, keepdim=True)).bfloat16().view(len(part), -1, y.shape[1]))
    return torch.cat(parts)


def _features(embedding: Tensor, ids: Tensor) -> Tensor:
    """Return [rows * tokens, FEATURE_TOKENS * hidden + 1], for the states that are proved."""
    table = embedding.float() / embedding.float().std()
    last = ids[:, PROMPT_TOKENS - FEATURE_TOKENS : -1].unfold(1, FEATURE_TOKENS, 1)
    x = table[last.flatten(0, 1)].flatten(1)
    return torch.cat([x, torch.ones(len(x), 1)], 1)


def every_other(right: Tensor, wrong: Tensor) -> Tensor:
    """Return the right states [rows, tokens, hidden] for every second token, and the wrong ones between them."""
    odd = torch.arange(right.shape[1])[:, None] % 2 == 1
    return torch.where(odd, wrong, right)


def mean_state(known: Tensor) -> Tensor:
    """Return the mean of each dimension over known states [rows, tokens, hidden]."""
    return known.float().mean((0, 1)).bfloat16()


def save(path: Path, states: Tensor) -> None:
    """Save [rows, tokens, hidden], bfloat16, as a file that processes can share."""
    np.save(path, states.contiguous().view(torch.int16).numpy())


def load(path: Path) -> Tensor:
    """Load saved states, mapped from the file."""
    return torch.from_numpy(np.load(path, mmap_mode="c")).view(torch.bfloat16)
