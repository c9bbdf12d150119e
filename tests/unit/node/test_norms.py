"""Norms in fewer kernels: the bits of transformers' own, and none of the trainer's business."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from node.policy.norms import use_short_norms


def pair(kind: Any, *, dtype: torch.dtype) -> tuple[Any, Any, Tensor]:
    """A norm, one that went through `use_short_norms`, and states that they read."""
    torch.manual_seed(0)
    own, short = (kind(64, eps=1e-5).to(dtype) for _ in range(2))
    own.weight.data = short.weight.data = torch.randn(64).to(dtype)
    use_short_norms(short)
    return own, short, torch.randn(2, 5, 3, 64).mul(3).to(dtype)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each norm that torch computes by itself."""
    calls: list[int] = []
    computed = F.rms_norm

    def rms_norm(*arguments: Any) -> Tensor:
        calls.append(1)
        return computed(*arguments)

    monkeypatch.setattr(F, "rms_norm", rms_norm)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_a_short_norm_has_the_bits_of_transformers_own(kind: Any, dtype: torch.dtype, noted: list[int]) -> None:
    """A worker of another engine has these numbers, and a trainer that asks for gradients."""
    own, short, states = pair(kind, dtype=dtype)
    with torch.inference_mode():
        assert torch.equal(short(states), own(states))
    assert noted
    assert type(short).__name__ == kind.__name__


@pytest.mark.parametrize("kind", [GemmaRMSNorm, Olmo2RMSNorm])
def test_a_norm_that_computes_otherwise_is_left_alone(kind: Any) -> None:
    """Gemma adds 1 to its weights, and Olmo multiplies by them before it rounds."""
    _, short, _ = pair(kind, dtype=torch.float32)
    assert type(short) is kind


def test_gradients_and_autocast_are_left_to_transformers(noted: list[int]) -> None:
    own, short, states = pair(LlamaRMSNorm, dtype=torch.float32)
    for norm in (own, short):
        norm(states).square().sum().backward()
    assert torch.equal(own.weight.grad, short.weight.grad)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(own(states.bfloat16()), short(states.bfloat16()))
    with torch.no_grad():
        assert short.to("meta")(states.to("meta")).is_meta
    assert not noted
