"""What tests of several packages share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.policy import save_policy
from node.tiny import make_model, make_tokenizer

# Tests, and the processes they start, share the machine's cores: more threads in each make all of them slower.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy file: the tiny model with random weights of a fixed seed, in float32."""
    path = tmp_path_factory.mktemp("policy") / "tiny.safetensors"
    save_policy(make_model(seed=20), make_tokenizer(), path)
    return path
