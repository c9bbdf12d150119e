"""Families of models by data: what a configuration of each may say. Names for --help, which imports this, so no torch.

A family of `ATTENTION_FAMILIES` is built by transformers' own modules, an embedding, layers and a final norm, whose
output is the hidden state that is proved. What differs between families is a row of that table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TINY_ATTENTION: Final = {"tiny": "llama", "gemma3": "gemma3_text", "glm4-moe": "glm4_moe"}
"""Tiny policies with attention, with the `model_type` of each."""
TINY_RECURRENT: Final = ("eagle", "finch", "goldfinch", "frame-action")
TINY_FAMILIES: Final = (*TINY_ATTENTION, *TINY_RECURRENT)
"""Values of `model.initial`: each is warm-started, or untrained with the prefix "random-"."""
PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Llama, which can have adapters."""
FUSED_PROJECTIONS: Final = ("qkv_proj", "gate_up_proj")
"""Those that some families have in place of several, which can have adapters too."""
TINY_POSITIONS: Final = 512
"""Longest sequence of those with attention; the recurrent ones have no limit."""
TINY_HIDDEN: Final = 128
"""Hidden units of each."""

FIELDS: Final = frozenset(
    {
        "attention_bias",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "max_position_embeddings",
        "mlp_bias",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "pretraining_tp",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "vocab_size",
    }
)
"""Fields that mean in each family that has them what they mean in a Llama."""
WINDOW: Final = "sliding_window"
"""Field of the tokens that a layer of the kind SLIDING attends to, its own included."""
LAYER_KINDS: Final = "layer_types"
"""Field of each layer's kind; where a family has none, all its layers have the window, if there is one."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LONGROPE: Final = "longrope"
"""Kind of rotary positions with factors for short sequences, which are used here, and for long ones."""
RECURRENT_BLOCK: Final = "linear_attn"
"""The module of a layer of the kind LINEAR that reads tokens into a state of constant size."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of published files: of a layer's feed-forward block, and of each expert's three matrices."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the configurations of a family with attention may say, by the fields of transformers' class.

    `fields` are those that its modules read besides `FIELDS`; any other field has its default or is refused, so that
    none is ignored. `undeclared` are those that the class takes, and computes by, without declaring them. `fixed` are
    the values that some may have, also of those that a folder's config.json has alone, and `former` the fields of a
    config.json that the class reads as others, or that its modules have no use for.

    `rotary` are the kinds of rotary positions, which are given for each kind of layer where `has_rotary_by_kind`, and
    may turn a part of each head where `is_rotary_partial`. `logit_divisor`, `logit_cap` and `score_cap` name the fields
    that divide logits, and bound logits and attention scores by x -> cap tanh(x / cap). `experts` names the field that
    counts a layer's experts, None without any, and `expert_names` what published files have of each, None where these
    have all in one tensor, as transformers has. Where it `has_sinks`, a head may attend to nothing, and where it
    `is_hybrid`, layers may be of the kind LINEAR. `engines` are those that serve it, vLLM only where fields have the
    values of `vllm_fixed`, and where all layers attend alike if `is_even_in_vllm`.
    """

    fields: frozenset[str] = frozenset()
    undeclared: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    former: frozenset[str] = frozenset()
    activation: str = "silu"
    activation_field: str = "hidden_act"
    rotary: frozenset[str] = frozenset({"default", "linear", "llama3", "yarn"})
    has_rotary_by_kind: bool = False
    is_rotary_partial: bool = False
    logit_divisor: str | None = None
    logit_cap: str | None = None
    score_cap: str | None = None
    experts: str | None = None
    expert_names: ExpertNames | None = None
    has_sinks: bool = False
    is_hybrid: bool = False
    engines: frozenset[str] = frozenset({"torch"})
    vllm_fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    is_even_in_vllm: bool = False

    @property
    def known_fields(self) -> frozenset[str]:
        """The fields that may differ from their defaults."""
        named = {self.activation_field, self.logit_divisor, self.logit_cap, self.score_cap} - {None}
        return FIELDS | self.fields | self.undeclared | {name for name in named if name}

    @property
    def has_windows(self) -> bool:
        """Whether its layers may attend through a window."""
        return WINDOW in self.fields


_BOTH: Final = frozenset({"torch", "vllm"})
_CAUSAL: Final = {"use_bidirectional_attention": (None, False)}
_PLAIN: Final = frozenset({"default"})
_PARTIAL: Final = frozenset({"partial_rotary_factor"})
# Of some families, vLLM's own models ignore biases of attention without saying so.
_NO_BIAS: Final = {"attention_bias": (False,)}
_ROUTED: Final = frozenset({"moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok", "router_aux_loss_coef"})
"""Of these the last belongs to a loss that no run has, and means nothing."""
_SHARED: Final = frozenset(
    {"first_k_dense_replace", "n_group", "n_shared_experts", "num_mtp_layers", "routed_scaling_factor", "topk_group"}
)
_DELTA: Final = frozenset(
    {"linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"}
    | {LAYER_KINDS, "linear_value_head_dim"}
)
"""Of layers with a gated delta rule (arXiv 2412.06464)."""
_DRAFTS: Final = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
_QWEN: Final = frozenset({WINDOW, LAYER_KINDS, "use_sliding_window", "max_window_layers"})

ATTENTION_FAMILIES: Final[Mapping[str, Family]] = {
    "arcee": Family(activation="relu2", engines=_BOTH),
    "deepseek_v3": Family(
        fields=_ROUTED
        | _SHARED
        | {"kv_lora_rank", "n_routed_experts", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"}
        | {"rope_interleave", "v_head_dim"},
        fixed={"ep_size": (1,), "moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        former=frozenset({"aux_loss_alpha", "head_dim", "qk_head_dim", "seq_aux"}),
        experts="n_routed_experts",
        expert_names=ExpertNames(),
    ),
    "ernie4_5": Family(fields=frozenset({"use_bias"}), vllm_fixed={"use_bias": (None, False)}, engines=_BOTH),
    "exaone4": Family(fields=frozenset({WINDOW, LAYER_KINDS, "sliding_window_pattern"}), engines=_BOTH),
    "gemma": Family(
        fixed=_CAUSAL,
        former=frozenset({"hidden_activation"}),
        activation="gelu_pytorch_tanh",
        vllm_fixed=_NO_BIAS,
        engines=_BOTH,
    ),
    "gemma2": Family(
        fields=frozenset({WINDOW, LAYER_KINDS, "query_pre_attn_scalar"}),
        fixed=_CAUSAL,
        former=frozenset({"hidden_act"}),
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
        logit_cap="final_logit_softcapping",
        score_cap="attn_logit_softcapping",
        vllm_fixed={"tie_word_embeddings": (True,)},
        engines=_BOTH,
    ),
    # Its modules ignore attn_logit_softcapping, so that only null, its default, says what they compute.
    "gemma3_text": Family(
        fields=frozenset({WINDOW, LAYER_KINDS, "query_pre_attn_scalar"}),
        fixed=_CAUSAL,
        former=frozenset({"hidden_act", "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"}),
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
        has_rotary_by_kind=True,
        logit_cap="final_logit_softcapping",
        engines=_BOTH,
    ),
    "glm": Family(former=_PARTIAL, rotary=_PLAIN, is_rotary_partial=True, engines=_BOTH),
    "glm4": Family(former=_PARTIAL, rotary=_PLAIN, is_rotary_partial=True, engines=_BOTH),
    "glm4_moe": Family(
        fields=_ROUTED | _SHARED | {"n_routed_experts", "use_qk_norm"},
        undeclared=frozenset({"head_dim"}),
        former=_PARTIAL,
        rotary=_PLAIN,
        is_rotary_partial=True,
        experts="n_routed_experts",
        expert_names=ExpertNames(),
        engines=_BOTH,
    ),
    "gpt_oss": Family(
        fields=frozenset({WINDOW, LAYER_KINDS, "num_experts_per_tok", "num_local_experts", "router_aux_loss_coef"})
        | {"swiglu_alpha", "swiglu_limit"},
        former=frozenset({"experts_per_token", "initial_context_length"}),
        experts="num_local_experts",
        has_sinks=True,
    ),
    "granite": Family(
        fields=frozenset({"attention_multiplier", "embedding_multiplier", "residual_multiplier"}),
        logit_divisor="logits_scaling",
        engines=_BOTH,
    ),
    "llama": Family(engines=_BOTH),
    "ministral": Family(fields=frozenset({WINDOW, LAYER_KINDS}), engines=_BOTH),
    "mistral": Family(fields=frozenset({WINDOW}), engines=_BOTH),
    "mixtral": Family(
        fields=frozenset({WINDOW, "num_experts_per_tok", "num_local_experts", "router_aux_loss_coef"}),
        experts="num_local_experts",
        expert_names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        vllm_fixed={WINDOW: (None,)},
        engines=_BOTH,
    ),
    "olmo2": Family(engines=_BOTH),
    "olmo3": Family(fields=frozenset({WINDOW, LAYER_KINDS}), has_rotary_by_kind=True, engines=_BOTH),
    "phi3": Family(
        fields=frozenset({WINDOW, "embd_pdrop", "resid_pdrop", "original_max_position_embeddings"}),
        former=_PARTIAL,
        rotary=_PLAIN | {LONGROPE},
        is_rotary_partial=True,
        engines=_BOTH,
    ),
    # vLLM's own models of the two have the window in all layers or in none, whatever layer_types says.
    "qwen2": Family(fields=_QWEN, is_even_in_vllm=True, engines=_BOTH),
    "qwen3": Family(fields=_QWEN, vllm_fixed=_NO_BIAS, is_even_in_vllm=True, engines=_BOTH),
    "qwen3_5_text": Family(
        fields=_DELTA,
        fixed={"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)},
        former=_PARTIAL | _DRAFTS | {"full_attention_interval", "mlp_only_layers"},
        rotary=_PLAIN,
        is_rotary_partial=True,
        is_hybrid=True,
    ),
    "qwen3_moe": Family(
        fields=_ROUTED | {WINDOW, "decoder_sparse_step", "mlp_only_layers", "num_experts", "use_sliding_window"},
        undeclared=frozenset({"head_dim"}),
        former=frozenset({"max_window_layers"}),
        experts="num_experts",
        expert_names=ExpertNames(),
        vllm_fixed=_NO_BIAS | {WINDOW: (None,), "use_sliding_window": (False,)},
        engines=_BOTH,
    ),
    "qwen3_next": Family(
        fields=_ROUTED
        | _DELTA
        | {"decoder_sparse_step", "mlp_only_layers", "num_experts", "shared_expert_intermediate_size"},
        former=_PARTIAL | {"full_attention_interval"},
        rotary=_PLAIN,
        is_rotary_partial=True,
        experts="num_experts",
        expert_names=ExpertNames(),
        is_hybrid=True,
    ),
    "seed_oss": Family(fields=frozenset({"attention_out_bias", "residual_dropout"}), engines=_BOTH),
    "smollm3": Family(
        fields=frozenset({WINDOW, LAYER_KINDS, "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"}),
        former=frozenset({"max_window_layers", "pretraining_tp"}),
        engines=_BOTH,
    ),
}
"""By `model_type`."""
WITH_EYES: Final = {"qwen3_5": "qwen3_5_text"}
"""Published as part of a model that sees: its `model_type`, and that of its model of text, which a run trains alone."""
RECURRENT_FAMILIES: Final = ("eagle", "finch", "frame_action", "goldfinch")
"""The `model_type` of every other family: `node.policy.models.RECURRENT`."""


def engines_of(family: str) -> frozenset[str]:
    """Return the engines that serve policies of a family; of a recurrent one it is torch alone."""
    found = ATTENTION_FAMILIES.get(family)
    return found.engines if found else frozenset({"torch"})
