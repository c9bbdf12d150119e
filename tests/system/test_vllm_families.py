"""vLLM's model of each family against transformers', in float32, with weights that changed in place on the way.

What would break for whom: every worker with vLLM of a run of that family, whose honest work would be rejected. vLLM
has code of its own for most families and, for one, runs transformers' inside; positions are its own throughout.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.modelling.families import small_model
from node.engines.base import SampleRequest
from node.engines.vllm import VllmEngine
from node.engines.vllm_settings import VllmSettings
from node.policy.families import ATTENTION_FAMILIES, engines_of
from node.policy.file import load_policy, save_policy
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.admission import worst
from node.protocol.run import EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec
from node.verification.measure import Measurement
from node.verification.prefill import TransformersPrefill

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.usefixtures("forked_vllm")]

SPEC = RunSpec(
    name="families",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=4, max_prompt_tokens=160, max_new_tokens=180, max_version_lead=1),
    proofs=ProofSpec(scheme="toploc/1", chunk_tokens=16),
)
SETTINGS = VllmSettings(cpu_threads=1, max_num_seqs=32, kv_cache_gib=0.05)
ROPE = {"rope_theta": 10000.0, "factor": 4.0}
SERVED = [family for family in sorted(ATTENTION_FAMILIES) if "vllm" in engines_of(family)]


def served(family: str) -> dict[str, Any]:
    """Fields that vLLM serves, which has as much to get right as it can: a window in every layer if in no other way."""
    row = ATTENTION_FAMILIES[family]
    kinds = {"layer_types": ["sliding_attention"] * 2} if row.is_even_in_vllm else {}
    return kinds | {name: allowed[-1] for name, allowed in row.vllm_fixed.items()}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        family: (family, {"tie_word_embeddings": bool(number % 2)} | served(family))
        for number, family in enumerate(SERVED)
    },
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "vocabulary-of-127-and-linear-positions": (
        "llama",
        {"vocab_size": 127, "rope_parameters": ROPE | {"rope_type": "linear"}},
    ),
    "llama3-positions": (
        "llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn-positions": (
        "qwen2",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": ROPE
            | {"rope_type": "yarn", "original_max_position_embeddings": 128, "attention_factor": 1.2},
        },
    ),
}
EVERY_CHANGE = ("gemma3_text", "glm4_moe", "olmo2", "yarn-positions")
"""The cases that are tested with every change: each starts vLLM once, and the others are before a release."""


def make(family: str, *, seed: int, **fields: Any) -> PreTrainedModel:
    """A tiny model with head size 32, whose every weight, norms and biases included, is a random number.

    On a CPU vLLM pads experts whose width is no multiple of 32, and cannot reload them then.
    """
    sizes = {
        "vocab_size": 130,
        "hidden_size": 128,
        "intermediate_size": 384,
        "moe_intermediate_size": 64,
        "head_dim": 32,
    }
    return small_model(family, seed=seed, **sizes | fields)


@pytest.mark.parametrize(
    "case", [case if case in EVERY_CHANGE else pytest.param(case, marks=pytest.mark.nightly) for case in CASES]
)
async def test_vllm_draws_what_transformers_would_of_either_policy(case: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    paths = [tmp_path / f"{version}.safetensors" for version in (0, 1)]
    for version, path in enumerate(paths):
        save_policy(make(family, seed=version, **fields), make_tokenizer(), path)
    generator = torch.Generator().manual_seed(3)
    requests = [
        SampleRequest(tuple(torch.randint(3, 100, (length,), generator=generator).tolist()), bytes([length]) * 16)
        for length in range(2, 162, 16)
    ]
    engine = VllmEngine(SPEC, SETTINGS, state=tmp_path / "engine")
    try:
        await engine.load(paths[0], version=0)
        generating = asyncio.create_task(engine.generate(requests))
        while engine.tokens < 50 and not generating.done():  # noqa: ASYNC110  (another process's work)
            await asyncio.sleep(0.01)
        await engine.load(paths[1], version=1)
        rollouts = await generating
    finally:
        await engine.close()
    assert any(rollout.segment_versions == [0, 1] for rollout in rollouts)
    measuring = Measurement([rollouts], spec=SPEC)
    for version, path in enumerate(paths):
        measuring.measure(TransformersPrefill(load_policy(path, dtype=torch.float32)), version)
    figures = worst([row.figures for row in measuring.result(0).values()])
    assert figures.exponent_mismatches <= 1
    assert figures.mantissa_mean <= 0.02
    assert figures.token_margin <= 1e-4
    assert figures.logprob_error <= 1e-4
