"""Exactness of recurrent models in float32: against the authors' package, and of decoding against a prefill.

Logits beside the `rwkv` package's, of the same random weights over 200 tokens; and hidden states of decoding step by
step beside those of one prefill over 509 tokens, a length that is no multiple of the grid's chunk.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks.modelling.policies import random_model
from benchmarks.modelling.rwkv_package import package_logits
from node.policy.families import TINY_RECURRENT

PACKAGE_TOKENS = 200
DECODED_TOKENS = 509
ROWS = 4
SPREAD = 0.1
IN_THE_PACKAGE = ("eagle", "finch")


def measure(_options: argparse.Namespace) -> dict[str, float]:
    """Return the largest differences."""
    ids = _draw(ROWS, DECODED_TOKENS)
    decoded = {name: decode_difference(random_model(name), ids) for name in TINY_RECURRENT}
    found = {f"{name}_logits_vs_rwkv_package": package_difference(name) for name in IN_THE_PACKAGE}
    return found | {f"decode_vs_prefill_fp32_{name.replace('-', '_')}": value for name, value in decoded.items()}


@torch.inference_mode()
def package_difference(name: str) -> float:
    """Return the largest difference of a logit from the authors' package."""
    model, ids = random_model(name, spread=SPREAD), _draw(ROWS, PACKAGE_TOKENS)
    return float((package_logits(model, ids.tolist()) - model(input_ids=ids).logits).abs().max())


@torch.inference_mode()
def decode_difference(model: Any, ids: Tensor) -> float:
    """Return the largest difference of a hidden state between decoding `ids` [rows, tokens] and their prefill."""
    whole = model.base_model(input_ids=ids).last_hidden_state
    state, worst = None, 0.0
    for column, expected in zip(ids.split(1, dim=1), whole.split(1, dim=1), strict=True):
        output = model.base_model(input_ids=column, state=state, use_cache=True)
        state, worst = output.state, max(worst, float((output.last_hidden_state - expected).abs().max()))
    return worst


def _draw(rows: int, tokens: int) -> Tensor:
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(0))
