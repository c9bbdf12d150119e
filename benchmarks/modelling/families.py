"""Small models of every family with attention, derived from the table of families: `node.policy.families`.

Everything that a family's configuration can say is said: windows that are shorter than a sequence, caps and
multipliers other than 1, biases, dropout, positions of each kind of layer. So a family in the table is in every test
and measurement that goes through them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from node.policy.attention import kernel_of
from node.policy.experts import SORTED
from node.policy.families import ATTENTION_FAMILIES, FULL, LAYER_KINDS, LINEAR, SLIDING, WINDOW
from node.policy.layout import cast
from node.policy.models.tiny_llama import EOS, PAD
from node.policy.skeleton import unique_tensors

WINDOW_TOKENS: Final = 8
SPREAD: Final = 0.1
"""Standard deviation of what is added to each weight: norms and biases begin at a constant."""
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

_MIXTURE: Final[dict[str, Any]] = {
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "mlp_only_layers": [0],
    "n_group": 2,
    "topk_group": 1,
    "use_qk_norm": True,
    "num_mtp_layers": 0,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "shared_expert_intermediate_size": 24,
}
"""Of experts in two groups; the first layer has none, where a family can have such layers."""


def small_config(family: str, **fields: Any) -> PreTrainedConfig:
    """Return a configuration of `family` with `telling_fields`; `fields` override."""
    wanted = _SIZES | fields
    telling = telling_fields(family, layers=wanted["num_hidden_layers"])
    declared = _declared(family)
    if "kv_lora_rank" in telling:
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]
    sizes = {name: value for name, value in wanted.items() if name in declared}
    return CONFIG_MAPPING[family](**telling | sizes)


def small_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    """Make a model of `small_config` whose every weight is random, with the kernel that policies of it have."""
    config = small_config(family, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=kernel_of(config), experts_implementation=SORTED
        )
        with torch.no_grad():
            for weight in unique_tensors(cast(model, dtype)).values():
                weight.add_(SPREAD * torch.randn_like(weight))
    return model.eval()


def telling_fields(family: str, *, layers: int) -> dict[str, Any]:
    """Return values other than the defaults of every field of a family that changes how its models compute."""
    row, declared = ATTENTION_FAMILIES[family], _declared(family)
    found: dict[str, Any] = {name: 0.1 for name in declared if "dropout" in name or "pdrop" in name}
    found |= {name: True for name in declared if name.endswith("bias")}
    found |= {name: 1.5 for name in declared if name.endswith("_multiplier")}
    found |= {"head_dim": 8, "query_pre_attn_scalar": 24, "no_rope_layers": [layer % 2 for layer in range(layers)]}
    for name, value in ((row.logit_divisor, 0.5), (row.logit_cap, 3.0), (row.score_cap, 1.5)):
        found |= {name: value} if name else {}
    if row.experts:
        found |= _MIXTURE | {row.experts: 4}
    if "kv_lora_rank" in declared:  # whose keys are made for each head
        found["num_key_value_heads"] = _SIZES["num_attention_heads"]
    if row.has_windows:
        kinds = [(SLIDING, FULL)[layer % 2] for layer in range(layers)]
        found |= {WINDOW: WINDOW_TOKENS, LAYER_KINDS: kinds, "use_sliding_window": True}
    if row.is_hybrid:
        found |= {LAYER_KINDS: [(LINEAR, FULL)[layer % 2] for layer in range(layers)], "linear_conv_kernel_dim": 3}
        found |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        found |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
    if row.has_rotary_by_kind:
        full = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
        found["rope_parameters"] = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}
    if row.is_rotary_partial:
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    return {name: value for name, value in found.items() if name in declared}


def _declared(family: str) -> frozenset[str]:
    return ATTENTION_FAMILIES[family].undeclared | {each.name for each in dataclasses.fields(CONFIG_MAPPING[family])}
