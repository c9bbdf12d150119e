"""Batched decoder of a recurrent model, one token at a time; like `torch_decoder`, with states instead of a cache.

A batch slot holds one sequence's state. Prefixes are not read again where their state was kept: after each whole grid
chunk of a joining sequence, and of what a slot had read when it was freed. Snapshots take at most `max_snapshot_bytes`,
least recently used evicted first; slots keep as much again, or nothing. So a second turn, or a row that joins again,
reads what is new plus less than a chunk. States belong to one policy: another one needs its own decoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from node.policy.file import Policy
from node.policy.models.base import State, join, select, state_bytes
from node.policy.models.wkv import WKV_CHUNK

MAX_PREFILL_TOKENS = 16 * 1024
"""Per prefill; a longer sequence is prefilled alone."""
MAX_SNAPSHOT_BYTES = 256 * 1024**2


class RecurrentDecoder:
    """Slots 0 .. B - 1 hold the states of sequences."""

    def __init__(self, policy: Policy, *, max_snapshot_bytes: int = MAX_SNAPSHOT_BYTES) -> None:
        model: Any = policy.model
        self._base = model.base_model
        self._hidden = policy.hidden
        self._dtype: torch.dtype = model.dtype
        self._device: torch.device = model.device
        self._state: State | None = None
        self._histories: list[_History] = []
        self._snapshots = Snapshots(max_snapshot_bytes)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each slot; return the hidden states [B, hidden] after it."""
        if not tokens:
            return self._no_states()
        hidden, self._state = self._read(torch.tensor(tokens, device=self._device)[:, None], self._state)
        assert self._state is not None
        keeps = state_bytes(self._state) <= self._snapshots.max_bytes
        for place, (token, history) in enumerate(zip(tokens, self._histories, strict=True)):
            history.add(token)
            if history.length % WKV_CHUNK == 0:
                history.kept = (history.key, select(self._state, [place])) if keeps else None
        return hidden[:, -1]

    def join(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        """Add `sequences` in new slots behind the others; return the hidden states [J, hidden] of their last tokens."""
        ends = self._no_states(len(sequences))
        owners: dict[tuple[int, ...], list[int]] = {}
        for index, sequence in enumerate(sequences):
            owners.setdefault(sequence, []).append(index)
        states, order = [], list[int]()
        for part in _prefill_batches([self._resume_point(sequence) for sequence in owners]):
            hidden, state = self._prefill(part)
            lines = [line for line, entry in enumerate(part) for _ in owners[entry.sequence]]
            joined = [index for entry in part for index in owners[entry.sequence]]
            ends[joined] = hidden[lines]
            states.append(select(state, lines))
            order += joined
        if states:
            placed = torch.tensor(order).argsort()
            new = select(join(states), placed)
            self._state = new if self._state is None else join([self._state, new])
            histories = {sequence: _History.of(sequence) for sequence in owners}
            self._histories += [histories[sequence].copy() for sequence in sequences]
        return ends

    def leave(self, leaving: list[bool]) -> list[int]:
        """Free the slots with True in `leaving` [B]; return the old slot of each remaining one."""
        for history, leaves in zip(self._histories, leaving, strict=True):
            if leaves and history.kept is not None:
                self._snapshots.put(*history.kept)
        order = [place for place, leaves in enumerate(leaving) if not leaves]
        if self._state is not None and len(order) < len(leaving):
            self._state = select(self._state, order) if order else None
        self._histories = [self._histories[place] for place in order]
        return order

    def _resume_point(self, sequence: tuple[int, ...]) -> _ResumePoint:
        """Find the longest prefix of `sequence` with a snapshot, its last token excluded."""
        keys = _chunk_keys(sequence)
        for chunks in range((len(sequence) - 1) // WKV_CHUNK, 0, -1):
            state = self._snapshots.get(keys[chunks - 1])
            if state is not None:
                return _ResumePoint(sequence, keys, chunks * WKV_CHUNK, state)
        return _ResumePoint(sequence, keys, 0, None)

    def _prefill(self, part: Sequence[_ResumePoint]) -> tuple[Tensor, State]:
        """Prefill sequences with equal read and unread lengths; return their last hidden states [S, hidden] and states.

        Snapshots are stored at the end of the last whole chunk.
        """
        tokens_read, length = part[0].tokens_read, len(part[0].sequence)
        ids = torch.tensor([entry.sequence[tokens_read:] for entry in part], device=self._device)
        state = None if tokens_read == 0 else join([entry.state for entry in part if entry.state is not None])
        whole = length // WKV_CHUNK * WKV_CHUNK
        if tokens_read < whole:
            hidden, state = self._read(ids[:, : whole - tokens_read], state)
            for line, entry in enumerate(part):
                self._snapshots.put(entry.keys[whole // WKV_CHUNK - 1], select(state, [line]))
        if whole < length:
            hidden, state = self._read(ids[:, whole - tokens_read if tokens_read < whole else 0 :], state)
        assert state is not None
        return hidden[:, -1], state

    def _no_states(self, rows: int = 0) -> Tensor:
        return torch.zeros(rows, self._hidden, dtype=self._dtype, device=self._device)

    def _read(self, ids: Tensor, state: State | None) -> tuple[Tensor, State]:
        output = self._base(input_ids=ids, state=state, use_cache=True, last_alone=True)
        return output.last_hidden_state, output.state


@dataclass(frozen=True, slots=True)
class _ResumePoint:
    """A sequence, the keys of its whole chunks, and the state after its first `tokens_read` tokens (None for 0)."""

    sequence: tuple[int, ...]
    keys: list[bytes]
    tokens_read: int
    state: State | None


@dataclass(slots=True)
class _History:
    """What a slot has read, as a running digest, and the last state to keep of it."""

    length: int = 0
    kept: tuple[bytes, State] | None = None
    _digest: Any = field(default_factory=lambda: blake2b(digest_size=32))

    @staticmethod
    def of(sequence: Sequence[int]) -> _History:
        history = _History()
        for token in sequence:
            history.add(token)
        return history

    def copy(self) -> _History:
        """Copy for another slot that has read the same."""
        return _History(self.length, self.kept, self._digest.copy())

    @property
    def key(self) -> bytes:
        found: bytes = self._digest.digest()
        return found

    def add(self, token: int) -> None:
        self._digest.update(token.to_bytes(8, "little"))
        self.length += 1


def _chunk_keys(sequence: Sequence[int]) -> list[bytes]:
    """Compute the keys of each prefix of `sequence` made of whole chunks."""
    history, keys = _History(), list[bytes]()
    for token in sequence:
        history.add(token)
        if history.length % WKV_CHUNK == 0:
            keys.append(history.key)
    return keys


class Snapshots:
    """LRU cache of single sequences' states by prefix key, of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: OrderedDict[bytes, State] = OrderedDict()
        self.bytes_held = 0

    def get(self, key: bytes) -> State | None:
        """Return the state under `key`, marking it as used; None if absent."""
        state = self._held.get(key)
        if state is not None:
            self._held.move_to_end(key)
        return state

    def put(self, key: bytes, state: State) -> None:
        """Store `state`, evicting the least recently used ones that no longer fit."""
        replaced = self._held.pop(key, None)
        self._held[key] = state
        self.bytes_held += state_bytes(state) - (0 if replaced is None else state_bytes(replaced))
        while self.bytes_held > self.max_bytes:
            _, dropped = self._held.popitem(last=False)
            self.bytes_held -= state_bytes(dropped)


def _prefill_batches(sequences: list[_ResumePoint]) -> Iterator[list[_ResumePoint]]:
    """Split into prefill batches of equal read and unread lengths, within MAX_PREFILL_TOKENS."""
    part: list[_ResumePoint] = []
    for entry in sorted(sequences, key=lambda entry: (entry.tokens_read, len(entry.sequence))):
        alike = part and (part[0].tokens_read, len(part[0].sequence)) == (entry.tokens_read, len(entry.sequence))
        if part and not (alike and (len(entry.sequence) - entry.tokens_read) * (len(part) + 1) <= MAX_PREFILL_TOKENS):
            yield part
            part = []
        part.append(entry)
    if part:
        yield part
