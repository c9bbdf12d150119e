"""A policy of random weights of every model family, large enough for proofs."""

from __future__ import annotations

from typing import Any, Final

from transformers import PreTrainedModel

from benchmarks.modelling.families import small_model
from benchmarks.modelling.policies import random_model
from node.policy.families import ATTENTION_FAMILIES, LAYER_KINDS, SLIDING, TINY_RECURRENT, WINDOW

NAMES: Final = (*ATTENTION_FAMILIES, *TINY_RECURRENT)
"""Every family: those with attention by `model_type`, recurrent ones by their name in `node.policy.families`."""
WINDOW_TOKENS: Final = 24
"""Fewer than a prompt of `benchmarks.workload` has."""
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    WINDOW: WINDOW_TOKENS,
}
MIXTURE: Final[dict[str, Any]] = {"num_hidden_layers": 4}
"""Of families with experts, whose first layer often has none."""
EXPERTS: Final = 8


def random_family_model(family: str, *, for_vllm: bool = False) -> PreTrainedModel:
    """Make a policy in float32, evaluating, whose every weight is a random number; one that vLLM serves `for_vllm`."""
    if family in TINY_RECURRENT:
        return random_model(family)
    row, fields = ATTENTION_FAMILIES[family], dict(SIZES)
    if row.experts:
        fields |= MIXTURE | {row.experts: EXPERTS}
    if for_vllm:
        fields |= {name: allowed[-1] for name, allowed in row.vllm_fixed.items()}
        fields |= {LAYER_KINDS: [SLIDING] * 2} if row.is_even_in_vllm else {}
    return small_model(family, **fields)
