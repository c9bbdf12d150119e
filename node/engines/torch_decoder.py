"""Batched decoder over a transformers model in plain torch, one token at a time.

A batch slot holds one sequence's keys and values from column 0 on, so slots of any length stand beside each other, and
a freed slot costs a copy of the last one, never of the cache. Equal sequences are prefilled once: a group's samples
share their prompt.

The base model gives the final norm's output; the caller applies the output head, as it needs both. A layer with a
window keeps all columns, and hides those before its window by a mask. A LINEAR layer has a state of constant size in
place of keys and values; as padding would go into it, such a policy's sequences are prefilled beside those of equal
length.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from node.policy.attention import layer_masks
from node.policy.families import ATTENTION_FAMILIES
from node.policy.file import Policy
from node.sampling.transfers import to_device

GROUPED = "swarmproof_grouped"

COLUMNS = 256
"""By which a cache becomes longer where memory that is reserved is taken: each time it is copied."""
LAZY = ("cpu",)
"""Devices whose memory is taken when it is first written to."""

MAX_PREFILL_TOKENS = 16 * 1024
"""Per prefill, padding included; a longer sequence is prefilled alone."""


class Decoder:
    """Slots 0 .. B - 1 hold sequences of at most `columns` tokens."""

    def __init__(self, policy: Policy, *, columns: int) -> None:
        model: Any = policy.model
        if model.config._attn_implementation == "sdpa":  # noqa: SLF001  (transformers sets it by a method, reads it so)
            model.set_attn_implementation(GROUPED)
        self._base, self._config = model.base_model, model.config
        self._hidden = policy.hidden
        self._dtype: torch.dtype = model.dtype
        self._device: torch.device = model.device
        self._lengths: list[int] = []
        self._pads = not ATTENTION_FAMILIES[model.config.model_type].is_hybrid
        self._cache = _Cache(columns)
        self._cache_keyword = cache_keyword(self._base)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each slot; return the hidden states [B, hidden] after it."""
        if not tokens:
            return self._no_states()
        width = max(self._lengths) + 1
        ends = to_device(np.array(self._lengths), self._device)
        self._cache.extend(ends, width=width)
        hidden = self._forward(
            to_device(np.array(tokens), self._device)[:, None],
            columns=width,
            position_ids=ends[:, None],
            cache=self._cache,
        )
        self._lengths = [length + 1 for length in self._lengths]
        return hidden[:, 0]

    def join(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        """Add `sequences` in new slots behind the others; return the hidden states [J, hidden] of their last tokens."""
        first = len(self._lengths)
        owners: dict[tuple[int, ...], list[int]] = {}
        for index, sequence in enumerate(sequences):
            owners.setdefault(sequence, []).append(index)
        self._lengths += map(len, sequences)
        ends = self._no_states(len(sequences))
        for batch in _prefill_batches(list(owners), pads=self._pads):
            prefix = _Prefix()
            hidden = self._prefill(batch, prefix)
            for line, sequence in enumerate(batch):
                ends[owners[sequence]] = hidden[line, len(sequence) - 1]
            source = [line for line, sequence in enumerate(batch) for _ in owners[sequence]]
            target = [first + index for sequence in batch for index in owners[sequence]]
            self._cache.place(prefix, source, target, rows=len(self._lengths))
        return ends

    def leave(self, leaving: list[bool]) -> list[int]:
        """Free the slots with True in `leaving` [B]; return the old slot of each remaining one.

        The last remaining slots move into the freed ones, and the end is cut off.
        """
        kept = leaving.count(False)
        spare = (place for place in range(kept, len(leaving)) if not leaving[place])
        order = [next(spare) if leaving[place] else place for place in range(kept)]
        moved = [(source, target) for target, source in enumerate(order) if source != target]
        self._cache.move([source for source, _ in moved], [target for _, target in moved])
        self._lengths = [self._lengths[place] for place in order]
        return order

    def _no_states(self, rows: int = 0) -> Tensor:
        return torch.zeros(rows, self._hidden, dtype=self._dtype, device=self._device)

    def _prefill(self, sequences: Sequence[tuple[int, ...]], prefix: _Prefix) -> Tensor:
        """Prefill; return hidden states [S, width, hidden], right-padded."""
        width = max(map(len, sequences))
        ids = torch.zeros(len(sequences), width, dtype=torch.int64)
        for line, sequence in zip(ids, sequences, strict=True):
            line[: len(sequence)] = torch.tensor(sequence)
        column = torch.arange(width, device=self._device)
        return self._forward(ids.to(self._device), columns=width, position_ids=column[None], cache=prefix)

    def _forward(self, ids: Tensor, *, columns: int, position_ids: Tensor, cache: _Cache | _Prefix) -> Tensor:
        """Run the model on tokens at `position_ids` [B or 1, Q], which attend to `columns` columns up to their own."""
        masks = layer_masks(self._config, position_ids, columns=columns, dtype=self._dtype)
        cached = {self._cache_keyword: cache}
        output = self._base(input_ids=ids, attention_mask=masks, position_ids=position_ids, use_cache=True, **cached)
        hidden: Tensor = output.last_hidden_state
        return hidden


def cache_keyword(model: nn.Module) -> str:
    """Return what a transformers' model calls the keys and values that it is given: another name since 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def attend_grouped(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' `sdpa`, with a single token's query heads [B, H, 1, D] grouped as queries of the keys they share.

    `sdpa` would copy all keys and values for each of them: at 512 columns twenty times the kernel's own time.
    """
    batch, heads, tokens, size = query.shape
    if tokens > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], size)
    attended = F.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return attended.reshape(batch, 1, heads, -1), None


AttentionInterface.register(GROUPED, attend_grouped)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def _prefill_batches(sequences: list[tuple[int, ...]], *, pads: bool) -> Iterator[list[tuple[int, ...]]]:
    """Split into prefill batches of similar length, or of equal one unless it `pads`, within MAX_PREFILL_TOKENS."""
    batch: list[tuple[int, ...]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        is_full = batch and len(batch[0]) * (len(batch) + 1) > MAX_PREFILL_TOKENS
        if is_full or (batch and not pads and len(sequence) < len(batch[0])):
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _State:
    """What a LINEAR layer has read of S sequences, by the names of transformers' own: the inputs of its convolution's
    last tokens [S, channels, kernel], and the state of its recurrence [S, heads, key size, value size].
    """

    conv_states: tuple[Tensor]
    recurrent_states: tuple[Tensor]
    record_past: bool = False

    @staticmethod
    def of(conv: Tensor, recurrent: Tensor) -> _State:
        return _State((conv,), (recurrent,))

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.conv_states[0], self.recurrent_states[0]

    def rows(self, count: int) -> _State:
        """Return the first sequences', in the same memory."""
        return _State.of(*(held[:count] for held in self.tensors))


class _Prefix:
    """What each layer keeps of a prefill: keys and values [S, heads, width, head size], or its `states`."""

    def __init__(self) -> None:
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, _State] = {}
        self._conv: Tensor

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values and return all it may attend to; called by transformers' attention."""
        self.keys[layer] = key, value
        return key, value

    def has_previous_state(self, _layer: int, **_: object) -> bool:
        """Return whether a LINEAR layer goes on from a state; called by transformers, as are the following."""
        return False

    def get_conv_state(self, _layer: int, **_: object) -> None:
        """Return that there is no state yet: from transformers 5.24 on its models ask for it."""

    get_recurrent_state = get_conv_state

    def update_conv_state(self, inputs: Tensor, _layer: int, *, conv_kernel_size: int, **_: object) -> Tensor:
        """Store the last of a convolution's inputs [S, channels, width] and return all that it looks at."""
        missing = max(0, conv_kernel_size - inputs.shape[2])
        self._conv = F.pad(inputs, (missing, 0))[:, :, -conv_kernel_size:].clone()
        return inputs

    def update_recurrent_state(self, state: Tensor, layer: int, **_: object) -> Tensor:
        """Store the state after the last token."""
        self.states[layer] = _State.of(self._conv, state)
        return state


class _Cache:
    """What each layer keeps of all slots: keys and values [slots, heads, columns, head size], or its states.

    On LAZY devices memory is reserved at full length and touched only as far as used; elsewhere columns come COLUMNS at
    a time. Those up to `_initialised_columns` are set everywhere, since what a mask hides must still be finite.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, _State] = {}
        self._slots = 0
        self._initialised_columns = 0
        self._width = 0
        self._ends: Tensor
        self._rows: Tensor

    def extend(self, ends: Tensor, *, width: int) -> None:
        """Make the next `update` of each layer write slot b's token into column `ends[b]`, and show `width` columns."""
        self._ends, self._rows, self._width = ends, torch.arange(len(ends), device=ends.device), width
        self._widen(width)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Update like `_Prefix.update`, for one new token in each slot."""
        keys, values = self._keys[layer]
        keys[self._rows, :, self._ends] = key[:, :, 0]
        values[self._rows, :, self._ends] = value[:, :, 0]
        count = len(self._rows)
        return keys[:count, :, : self._width], values[:count, :, : self._width]

    def has_previous_state(self, _layer: int, **_: object) -> bool:
        """Return whether a LINEAR layer goes on from a state; called by transformers, as are the following."""
        return True

    @property
    def layers(self) -> Mapping[int, _State]:
        """The slots' states by layer; a convolution writes into them."""
        return {layer: state.rows(len(self._rows)) for layer, state in self._states.items()}

    def get_conv_state(self, layer: int, **_: object) -> Tensor:
        """Return what transformers reads of `layers` up to 5.23, from 5.24 on; likewise the following two."""
        return self.layers[layer].conv_states[0]

    def get_recurrent_state(self, layer: int, **_: object) -> Tensor:
        return self.layers[layer].recurrent_states[0]

    def is_recording_past(self, layer: int) -> bool:
        return self.layers[layer].record_past

    def update_recurrent_state(self, state: Tensor, layer: int, **_: object) -> Tensor:
        """Store the slots' states after one more token."""
        held = self._states[layer].recurrent_states[0]
        held[: len(state)] = state
        return state

    def place(self, prefix: _Prefix, source: list[int], target: list[int], *, rows: int) -> None:
        """Copy line `source[i]` of a prefill to slot `target[i]`, with room for `rows` slots in all."""
        width = max((key.shape[2] for key, _ in prefix.keys.values()), default=0)
        if self._slots < rows:
            self._keys = self._keys or {layer: (key[:0], value[:0]) for layer, (key, value) in prefix.keys.items()}
            self._states = self._states or {layer: state.rows(0) for layer, state in prefix.states.items()}
            self._make_room(rows, width)
        self._widen(width)
        for layer, pair in prefix.keys.items():
            for new, held in zip(pair, self._keys[layer], strict=True):
                held[target, :, :width] = new[source]
        for layer, state in prefix.states.items():
            for new, held in zip(state.tensors, self._states[layer].tensors, strict=True):
                held[target] = new[source]

    def move(self, source: list[int], target: list[int]) -> None:
        """Overwrite slots `target` with `source`."""
        if source:
            for held in chain.from_iterable(self._keys.values()):
                held[target, :, : self._initialised_columns] = held[source, :, : self._initialised_columns]
            for state in self._states.values():
                for held in state.tensors:
                    held[target] = held[source]

    def _widen(self, width: int) -> None:
        if width > self._initialised_columns:
            if any(width > key.shape[2] for key, _ in self._keys.values()):
                self._make_room(self._slots, width)
            for held in chain.from_iterable(self._keys.values()):
                held[:, :, self._initialised_columns : width] = 0
            self._initialised_columns = width

    def _make_room(self, rows: int, width: int) -> None:
        """Copy what is held to tensors of `rows` slots, with room for `width` columns at least, layer by layer."""
        self._slots = rows
        for layer, (key, value) in self._keys.items():
            self._keys[layer] = self._roomy(key, rows, width), self._roomy(value, rows, width)
        for layer, state in self._states.items():
            self._states[layer] = _State.of(*(_with_rows(held, rows) for held in state.tensors))

    def _roomy(self, held: Tensor, rows: int, width: int) -> Tensor:
        old, heads, _, size = held.shape
        columns = self._columns
        if held.device.type not in LAZY:
            needed = max(width, self._initialised_columns)
            columns = min(columns, -(-needed // COLUMNS) * COLUMNS)
        roomy = held.new_empty(rows, heads, columns, size)
        roomy[:, :, : self._initialised_columns] = 0
        roomy[:old, :, : self._initialised_columns] = held[:, :, : self._initialised_columns]
        return roomy


def _with_rows(held: Tensor, rows: int) -> Tensor:
    """Copy to a tensor of more rows, zeros behind the others."""
    roomy = held.new_zeros(rows, *held.shape[1:])
    roomy[: len(held)] = held
    return roomy
