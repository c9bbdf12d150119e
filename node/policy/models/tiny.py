"""Tiny policies, one per family, for `model.initial` = "tiny", "finch", ...

All use the tokenizer of `node.policy.models.tiny_llama`, 128 hidden units and about 0.4 million parameters (the mixture
of experts 0.7). Their architectures are fixed: changing one changes every file that a run of it ever published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel

from node.policy.families import TINY_HIDDEN, TINY_POSITIONS
from node.policy.models.eagle import EagleConfig, EagleForCausalLM
from node.policy.models.finch import FinchConfig, FinchForCausalLM
from node.policy.models.frame_action import FrameActionConfig, FrameActionForCausalLM
from node.policy.models.goldfinch import GoldFinchConfig, GoldFinchForCausalLM
from node.policy.models.tiny_llama import EOS, PAD, VOCABULARY, token_codepoints
from node.policy.models.tiny_llama import make_model as make_llama

COMMON_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": TINY_HIDDEN,
    "num_hidden_layers": 2,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
"""Common to all but the Llama."""


TINY_WINDOW: Final = 16
"""Tokens that a layer of the Gemma sees, some of a prompt and its answer."""


def make_gemma3(seed: int) -> PreTrainedModel:
    """A layer with a window below one without, each with positions of its own."""
    config = Gemma3TextConfig(
        **COMMON_SIZES,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=TINY_POSITIONS,
        sliding_window=TINY_WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        bos_token_id=None,
    )
    return seeded(seed, lambda: Gemma3ForCausalLM(config))


def make_glm4_moe(seed: int) -> PreTrainedModel:
    """A layer without experts below two of eight experts each, of which a token meets two, and one that all meet."""
    config = Glm4MoeConfig(
        **COMMON_SIZES | {"num_hidden_layers": 3},
        intermediate_size=256,
        moe_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_POSITIONS,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        use_qk_norm=True,
        num_mtp_layers=0,
        bos_token_id=None,
    )
    return seeded(seed, lambda: Glm4MoeForCausalLM(config))


def make_eagle(seed: int) -> PreTrainedModel:
    return seeded(seed, lambda: EagleForCausalLM(EagleConfig(**COMMON_SIZES, intermediate_size=320)))


def make_finch(seed: int) -> PreTrainedModel:
    config = FinchConfig(**COMMON_SIZES, intermediate_size=256, shift_rank=16, decay_rank=16)
    return seeded(seed, lambda: FinchForCausalLM(config))


def make_goldfinch(seed: int) -> PreTrainedModel:
    sizes = COMMON_SIZES | {"num_hidden_layers": 3, "intermediate_size": 128}
    config = GoldFinchConfig(**sizes, shift_rank=8, decay_rank=16, value_rank=16, adapt_rank=16)
    return seeded(seed, lambda: GoldFinchForCausalLM(config))


def make_frame_action(seed: int) -> PreTrainedModel:
    config = FrameActionConfig(
        **COMMON_SIZES | {"num_hidden_layers": 3},
        frame_size=64,
        cell_size=24,
        convolution_size=32,
        intermediate_size=256,
        rows=8,
        columns=16,
        codepoints=128,
        foregrounds=3,
        backgrounds=2,
        token_codepoints=token_codepoints(),
        initializer_range=0.1,
    )
    return seeded(seed, lambda: FrameActionForCausalLM(config))


def seeded(seed: int, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Call `make` with torch's random state seeded, and restore that state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


MAKERS: Final[dict[str, Callable[[int], PreTrainedModel]]] = {
    "tiny": make_llama,
    "gemma3": make_gemma3,
    "glm4-moe": make_glm4_moe,
    "eagle": make_eagle,
    "finch": make_finch,
    "goldfinch": make_goldfinch,
    "frame-action": make_frame_action,
}
"""By name (`node.policy.families`): make the policy with random float32 weights, reproducible for a seed and torch
release.
"""
