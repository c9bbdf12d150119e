"""Which weights of a published folder are the policy's: no drafts of tokens, and the text of a model that sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from transformers import PreTrainedConfig

from node.policy.families import ATTENTION_FAMILIES, Family
from node.policy.weights import StoredTensor

MAX_DRAFTS: Final = 16
"""Layers that predict further tokens; published models have one."""
_EYES, _TEXT = "model.visual.", "model.language_model."
"""How the names of weights begin in a model that sees."""


def without_drafts(tensors: Mapping[str, StoredTensor], config: PreTrainedConfig) -> dict[str, StoredTensor]:
    """Leave out the layers behind the last one that predict further tokens, which no run draws with or trains."""
    count = min(getattr(config, "num_mtp_layers", 0), MAX_DRAFTS)
    if count:
        config.num_mtp_layers = 0
    drafts = [f"model.layers.{config.num_hidden_layers + layer}." for layer in range(count)]
    if ATTENTION_FAMILIES.get(config.model_type, Family()).is_hybrid:
        drafts.append("mtp.")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(drafts))}


def of_text(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the weights of the model of text, under its own names, where the folder's is part of one that sees."""
    if not any(name.startswith(_TEXT) for name in tensors):
        return dict(tensors)
    return {
        f"model.{name.removeprefix(_TEXT)}" if name.startswith(_TEXT) else name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(_EYES)
    }
