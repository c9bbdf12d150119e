"""One token at a time for many sequences, over a recurrent model: as `torch_decoder`, with states instead of a cache.

A place of the batch holds one sequence's state. What was read before need not be read again where its state was kept:
states of whole grid chunks are, of what joined and of what places had read when they were freed, within
`max_snapshot_bytes`, the least used of them dropped first. So a second turn, or a row that joins again, reads what is
new and less than a chunk. States are one policy's: a policy that takes over gets a decoder of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from node.models.base import State, join, select, state_bytes
from node.models.wkv import WKV_CHUNK
from node.policy import Policy

MAX_PREFILL_TOKENS = 16 * 1024
"""Tokens in one prefill; a longer sequence goes alone."""
MAX_SNAPSHOT_BYTES = 256 * 1024**2


class RecurrentDecoder:
    """Places 0 .. B - 1 hold the states of sequences, of which each one's next token is due."""

    def __init__(self, policy: Policy, *, max_snapshot_bytes: int = MAX_SNAPSHOT_BYTES) -> None:
        model: Any = policy.model
        self._base = model.base_model
        self._hidden = policy.hidden
        self._dtype: torch.dtype = model.dtype
        self._state: State | None = None
        self._trails: list[_Trail] = []
        self._snapshots = Snapshots(max_snapshot_bytes)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """The hidden states [B, hidden] after one more token in each place."""
        if not tokens:
            return torch.zeros(0, self._hidden, dtype=self._dtype)
        hidden, self._state = self._read(torch.tensor(tokens)[:, None], self._state)
        for place, (token, trail) in enumerate(zip(tokens, self._trails, strict=True)):
            trail.add(token)
            if trail.length % WKV_CHUNK == 0:
                trail.kept = (trail.key, select(self._state, [place]))
        return hidden[:, -1]

    def join(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        """Put each of `sequences` into a new place behind the others; the hidden states [J, hidden] of their ends."""
        ends = torch.zeros(len(sequences), self._hidden, dtype=self._dtype)
        owners: dict[tuple[int, ...], list[int]] = {}
        for index, sequence in enumerate(sequences):
            owners.setdefault(sequence, []).append(index)
        states, order = [], list[int]()
        for part in _parts([self._known(sequence) for sequence in owners]):
            hidden, state = self._prefill(part)
            lines = [line for line, one in enumerate(part) for _ in owners[one.sequence]]
            joined = [index for one in part for index in owners[one.sequence]]
            ends[joined] = hidden[lines]
            states.append(select(state, lines))
            order += joined
        if states:
            placed = torch.tensor(order).argsort()
            new = select(join(states), placed)
            self._state = new if self._state is None else join([self._state, new])
            trails = {sequence: _Trail.of(sequence) for sequence in owners}
            self._trails += [trails[sequence].copy() for sequence in sequences]
        return ends

    def leave(self, leaving: list[bool]) -> list[int]:
        """Free the places with True in `leaving` [B]; which old place each remaining one holds."""
        for trail, leaves in zip(self._trails, leaving, strict=True):
            if leaves and trail.kept is not None:
                self._snapshots.put(*trail.kept)
        order = [place for place, leaves in enumerate(leaving) if not leaves]
        if self._state is not None and len(order) < len(leaving):
            self._state = select(self._state, order) if order else None
        self._trails = [self._trails[place] for place in order]
        return order

    def _known(self, sequence: tuple[int, ...]) -> _Known:
        """What of `sequence` is still to be read, but for its last token at least."""
        keys = _keys(sequence)
        for chunks in range((len(sequence) - 1) // WKV_CHUNK, 0, -1):
            state = self._snapshots.get(keys[chunks - 1])
            if state is not None:
                return _Known(sequence, keys, chunks * WKV_CHUNK, state)
        return _Known(sequence, keys, 0, None)

    def _prefill(self, part: Sequence[_Known]) -> tuple[Tensor, State]:
        """The last hidden states [S, hidden] of sequences of which as many tokens are known and unknown, and the states
        after them. States are kept where the last whole chunk ends.
        """
        known, length = part[0].known, len(part[0].sequence)
        ids = torch.tensor([one.sequence[known:] for one in part])
        state = None if known == 0 else join([one.state for one in part if one.state is not None])
        whole = length // WKV_CHUNK * WKV_CHUNK
        if known < whole:
            hidden, state = self._read(ids[:, : whole - known], state)
            for line, one in enumerate(part):
                self._snapshots.put(one.keys[whole // WKV_CHUNK - 1], select(state, [line]))
        if whole < length:
            hidden, state = self._read(ids[:, whole - known if known < whole else 0 :], state)
        assert state is not None
        return hidden[:, -1], state

    def _read(self, ids: Tensor, state: State | None) -> tuple[Tensor, State]:
        output = self._base(input_ids=ids, state=state, use_cache=True, last_alone=True)
        return output.last_hidden_state, output.state


@dataclass(frozen=True, slots=True)
class _Known:
    """A sequence, the keys of its whole chunks, and the state after its first `known` tokens (None: after none)."""

    sequence: tuple[int, ...]
    keys: list[bytes]
    known: int
    state: State | None


@dataclass(slots=True)
class _Trail:
    """What a place has read, as the key of it, and the last state to keep of it."""

    length: int = 0
    kept: tuple[bytes, State] | None = None
    _digest: Any = field(default_factory=lambda: blake2b(digest_size=32))

    @staticmethod
    def of(sequence: Sequence[int]) -> _Trail:
        trail = _Trail()
        for token in sequence:
            trail.add(token)
        return trail

    def copy(self) -> _Trail:
        """Another place that has read the same."""
        return _Trail(self.length, self.kept, self._digest.copy())

    @property
    def key(self) -> bytes:
        found: bytes = self._digest.digest()
        return found

    def add(self, token: int) -> None:
        self._digest.update(token.to_bytes(8, "little"))
        self.length += 1


def _keys(sequence: Sequence[int]) -> list[bytes]:
    """The key of each beginning of `sequence` that is whole chunks."""
    trail, keys = _Trail(), list[bytes]()
    for token in sequence:
        trail.add(token)
        if trail.length % WKV_CHUNK == 0:
            keys.append(trail.key)
    return keys


class Snapshots:
    """States of single sequences by the key of what was read, of at most `max_bytes` in all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[bytes, State] = OrderedDict()
        self.bytes_held = 0

    def get(self, key: bytes) -> State | None:
        """The state kept under `key`, which is now the last used."""
        state = self._held.get(key)
        if state is not None:
            self._held.move_to_end(key)
        return state

    def put(self, key: bytes, state: State) -> None:
        """Keep `state`, and drop the least used ones that no longer fit."""
        replaced = self._held.pop(key, None)
        self._held[key] = state
        self.bytes_held += state_bytes(state) - (0 if replaced is None else state_bytes(replaced))
        while self.bytes_held > self._max_bytes:
            _, dropped = self._held.popitem(last=False)
            self.bytes_held -= state_bytes(dropped)


def _parts(sequences: list[_Known]) -> Iterator[list[_Known]]:
    """Sequences for one prefill each: as many tokens known and unknown, within MAX_PREFILL_TOKENS."""
    part: list[_Known] = []
    for one in sorted(sequences, key=lambda one: (one.known, len(one.sequence))):
        alike = part and (part[0].known, len(part[0].sequence)) == (one.known, len(one.sequence))
        if part and not (alike and (len(one.sequence) - one.known) * (len(part) + 1) <= MAX_PREFILL_TOKENS):
            yield part
            part = []
        part.append(one)
    if part:
        yield part
