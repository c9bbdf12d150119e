"""Tiny policies, one per family, for `model.initial` = "tiny", "finch", ...

All use the tokenizer of `node.policy.models.tiny_llama`, 128 hidden units and about 0.4 million parameters. Their
architectures are fixed: changing one changes every file that a run of it ever published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from node.policy.families import TINY_HIDDEN
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
"""Common to the recurrent ones."""


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
    "eagle": make_eagle,
    "finch": make_finch,
    "goldfinch": make_goldfinch,
    "frame-action": make_frame_action,
}
"""By name (`node.policy.families`): make the policy with random float32 weights, reproducible for a seed and torch
release.
"""
