"""A policy's model with the weights of one layer in memory at a time.

For policies with attention (`node.policy.config.ATTENTION`), whose models are an embedding, layers and a norm.
Each part computes by transformers' own modules, which never hold weights themselves, so that the hidden states are,
bit for bit, those of the whole model. A recurrent policy has no such form, and is always loaded whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedConfig

from node.policy.experts import routers
from node.policy.layout import dtype_of, stored_layout
from node.policy.packed import ModelInput
from node.policy.packed_attention import can_share, use_packed_attention
from node.policy.products import LogitRule, OutputHead
from node.policy.reading import OpenPolicy
from node.policy.skeleton import build_skeleton, fill_buffers, is_matrix, unique_tensors

PIECE_NUMBERS = 2**22
"""Of a weight that are converted together."""

Alter = Callable[[Tensor], Tensor]
"""Changes some rows [rows, in] of a layer's matrix, in float32."""


class LayeredModel:
    """The model of `file`, computing in `dtype` with weights that are rounded to the dtype `rounded` first.

    `alter` changes the layers' matrices before they are rounded once more. Not for several threads at once.
    """

    def __init__(
        self, file: OpenPolicy, *, rounded: torch.dtype, dtype: torch.dtype, alter: Alter | None = None
    ) -> None:
        model: Any = build_skeleton(file.blueprint.config, dtype=dtype)
        model.train(False)
        if can_share(model.config):
            use_packed_attention(model)
        base = model.base_model
        self._file, self._rounded, self._dtype, self._alter = file, rounded, dtype, alter
        self._parts: dict[str, dict[str, slice]] = {}
        for stored, part in stored_layout(model).items():
            self._parts.setdefault(part.name, {})[stored] = part.numbers
        self._names = {id(tensor): name for name, tensor in unique_tensors(model).items()}
        self._embedding, self._layers, self._norm = base.embed_tokens, list(base.layers), base.norm
        self._embedding.padding_idx = None  # for gradients alone, and no row of the table that is read here
        self._head: nn.Module = model.get_output_embeddings()
        fill_buffers(model, file.device)
        base.norm, self._entries = nn.Identity(), [_Entry() for _ in self._layers]
        base.layers = nn.ModuleList(self._entries)
        self._base, self._rule = base, LogitRule.of(model.config)
        self.config: PreTrainedConfig = model.config

    @property
    def state_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self._file.blueprint.hidden * self._dtype.itemsize

    @property
    def routers(self) -> list[Any]:
        """The routers of its layers, which each see all batches in their order; none without experts."""
        return [router for layer in self._layers for router in routers(layer)]

    def hidden_states(self, batches: Sequence[ModelInput]) -> list[Tensor]:
        """Return the final hidden states [B, T, hidden] of each batch, in one row where the model `can_share`.

        Each layer is read once. In memory at a time: those states, the weights of the largest layer, and a layer's
        activations for one batch; of the embedding only the rows of these tokens. Raises UnreadablePolicy.
        """
        others = [batch.arguments(self._file.device) for batch in batches]
        states = self._enter(batches, others)
        for layer, entry in zip(self._layers, self._entries, strict=True):
            weights = self._weights(layer, altered=True)
            for at, inputs in enumerate(states):
                self._base(
                    inputs_embeds=inputs, use_cache=False, **others[at]
                )  # for this batch's arguments: a mask is as large as it
                states[at] = functional_call(layer, weights, (inputs,), entry.arguments)
            del weights  # before the next layer's are read
        weights = self._weights(self._norm)
        return [functional_call(self._norm, weights, (inputs,)) for inputs in states]

    def head(self) -> OutputHead:
        """Read the output head. Raises UnreadablePolicy."""
        return OutputHead(self._weights(self._head)["weight"], self._rule)

    def _enter(self, batches: Sequence[ModelInput], others: Sequence[dict[str, Any]]) -> list[Tensor]:
        """Return the first layer's input of each batch."""
        states = []
        rows = sorted({row for batch in batches for row in batch.ids.flatten().tolist()})
        (name,) = (self._names[id(parameter)] for parameter in self._embedding.parameters())
        # Converted before it is used: some families scale what they look up, in the dtype that they compute in.
        table = self._file.read_rows(name, rows, dtype=self._rounded).to(self._dtype)
        for batch, given in zip(batches, others, strict=True):
            places = torch.searchsorted(torch.tensor(rows), batch.ids).to(self._file.device)
            embedded = functional_call(self._embedding, {"weight": table}, (places,))
            states.append(self._base(inputs_embeds=embedded, use_cache=False, **given).last_hidden_state)
        return states

    def _weights(self, module: nn.Module, *, altered: bool = False) -> dict[str, Tensor]:
        """Read the weights of one module, by its own names."""
        return {
            local: self._read(self._names[id(tensor)], tensor.shape, altered=altered)
            for local, tensor in module.state_dict(keep_vars=True).items()
        }

    def _read(self, name: str, shape: torch.Size, *, altered: bool) -> Tensor:
        """Read one tensor of the model, of all its parts in the file."""
        dtype = dtype_of(name, self._dtype)
        weight = self._file.read(self._parts[name], shape=shape, dtype=dtype)
        if dtype == self._dtype:
            self._convert(weight, self._alter if altered and is_matrix(name, shape) else None)
        return weight

    def _convert(self, weight: Tensor, alter: Alter | None) -> None:
        """Round, and alter, a weight in place."""
        if weight.dtype == self._rounded and alter is None:
            return
        matrix = weight.flatten(0, -2) if weight.ndim > 1 else weight  # every expert's rows
        for rows in torch.split(matrix, max(1, PIECE_NUMBERS // matrix[0].numel())):
            rows.copy_(rows.to(self._rounded))
            if alter is not None:
                rows.copy_(alter(rows.float()).to(self._rounded))


class _Entry(nn.Module):
    """Stands where a model has a layer: keeps the arguments that it is given, and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        self.arguments = arguments
        return hidden_states
