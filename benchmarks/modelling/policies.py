"""Recurrent policies whose every weight is a random number, so that each layer, gate and decay has its part."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from node.policy.file import save_policy
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer


def random_model(name: str, *, seed: int = 1, spread: float = 0.05) -> PreTrainedModel:
    """Make a tiny policy of a family, evaluating, with normal numbers of deviation `spread` added."""
    model = MAKERS[name](seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * spread)
    return model


def random_policy(name: str, path: Path, *, seed: int = 1) -> Path:
    """Save such a policy in `path`, and return that."""
    save_policy(random_model(name, seed=seed), make_tokenizer(), path)
    return path
