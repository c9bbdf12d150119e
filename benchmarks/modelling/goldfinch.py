"""GoldFinch: bytes of its cache beside attention's, and the cost of a prefill.

`goldfinch_cache_ratio_L_d`: bytes of the keys and values of multi-head attention with L layers of width d in bfloat16,
over the bytes of what grows in a GoldFinch model's state, after the same tokens. Both are counted of the tensors that
the model and transformers' cache hold; these have shapes, but no memory (torch's meta device).

`goldfinch_prefill_flatness`: the tiny policy's prefill for the next token, CPU seconds per token of 4,096 tokens over
those of 512; one thread, best of several. `goldfinch_full_prefill_growth`: the same of a prefill that gives all hidden
states, as a verifier's does.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from benchmarks.modelling.policies import random_model
from node.policy.models.goldfinch import CACHE, GoldFinchConfig, GoldFinchModel
from node.policy.models.wkv import HEAD_SIZE

SIZES = ((24, 2048), (80, 8192))
"""Layers and width of the two ends that the paper's abstract names."""
COUNTED_TOKENS = 64
SHORT, LONG = 512, 4096
REPEATS = 9


def measure(_options: argparse.Namespace) -> dict[str, float]:
    """Measure the cache's ratios and the growth of both prefills."""
    found = {f"goldfinch_cache_ratio_{layers}_{width}": round(cache_ratio(layers, width), 2) for layers, width in SIZES}
    return found | {
        "goldfinch_prefill_flatness": round(growth(last_alone=True), 3),
        "goldfinch_full_prefill_growth": round(growth(last_alone=False), 3),
    }


@torch.inference_mode()
def cache_ratio(layers: int, width: int) -> float:
    """Return the bytes of keys and values over those of the compressed cache."""
    with torch.device("meta"):
        config = GoldFinchConfig(num_hidden_layers=layers, hidden_size=width, intermediate_size=width)
        model = GoldFinchModel(config).to(torch.bfloat16)
        ids = torch.zeros(1, COUNTED_TOKENS, dtype=torch.int64)
        state = model(input_ids=ids, use_cache=True).state
        keys = torch.zeros(1, width // HEAD_SIZE, COUNTED_TOKENS, HEAD_SIZE, dtype=torch.bfloat16)
        attention = DynamicCache(config=LlamaConfig(num_hidden_layers=layers))
        for layer in range(layers):
            attention.update(keys, keys, layer)
    held = sum(each.nbytes for layer in attention.layers for each in (layer.keys, layer.values))
    return held / sum(state[name].nbytes for name in CACHE)


@torch.inference_mode()
def growth(*, last_alone: bool) -> float:
    """Return the CPU seconds per token of LONG tokens over those of SHORT."""
    model: Any = random_model("goldfinch").base_model
    texts = {tokens: torch.randint(3, 128, (1, tokens)) for tokens in (SHORT, LONG)}
    seconds: dict[int, list[float]] = {tokens: [] for tokens in texts}
    for _ in range(REPEATS):
        for tokens, ids in texts.items():
            started = time.process_time()
            model(input_ids=ids, use_cache=True, last_alone=last_alone)
            seconds[tokens].append(time.process_time() - started)
    return min(seconds[LONG]) / LONG / (min(seconds[SHORT]) / SHORT)
