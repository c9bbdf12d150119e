"""What is settled about a policy before vLLM starts: that it fits, and that its file stays."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedConfig

from benchmarks.modelling.families import small_config
from node.engines import vllm_host
from node.engines.base import DoesNotFit, WrongEngine
from node.engines.vllm import VllmEngine
from node.engines.vllm_host import WEIGHTS, VllmHost
from node.engines.vllm_settings import GIB, VllmSettings, check_family, make_plan, positions_bytes
from node.policy.errors import UnreadablePolicy
from node.policy.file import Blueprint, inspect_policy, save_policy
from node.policy.models.tiny import make_glm4_moe
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.profiles import Hardware
from node.protocol.run import EnvironmentSpec, RunSpec

SPEC = RunSpec(name="plans", environments=(EnvironmentSpec(name="arithmetic"),))
FACTOR = {"rope_theta": 10000.0, "factor": 2.0**20}
LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
}


@pytest.fixture(scope="module")
def blueprint(tiny_policy_path: Path) -> Blueprint:
    return inspect_policy(tiny_policy_path)


def with_fields(blueprint: Blueprint, **fields: Any) -> Blueprint:
    values = blueprint.config.to_dict() | fields
    return dataclasses.replace(blueprint, config=type(blueprint.config)(**values))


def plan(blueprint: Blueprint, *, gib: int) -> None:
    make_plan(blueprint, spec=SPEC, settings=VllmSettings(), memory_bytes=gib * GIB, on_cpu=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_position_embeddings": 2**24},
        {"rope_parameters": FACTOR | {"rope_type": "linear"}},
        {"rope_parameters": FACTOR | {"rope_type": "yarn", "original_max_position_embeddings": 512}},
        {"rope_parameters": FACTOR | {"rope_type": "yarn", "original_max_position_embeddings": 512, "factor": 1e308}},
    ],
    ids=["positions", "linear", "yarn", "absurd"],
)
def test_a_table_of_positions_larger_than_the_machine_is_refused_in_a_sentence(
    blueprint: Blueprint, fields: dict[str, Any]
) -> None:
    plan(blueprint, gib=3)
    with pytest.raises(DoesNotFit, match="a table of the policy's positions") as caught:
        plan(with_fields(blueprint, **fields), gib=3)
    assert len(str(caught.value)) < 300


def test_positions_of_each_kind_of_layer_have_a_table_of_their_own() -> None:
    config = small_config("gemma3_text", max_position_embeddings=1000)
    tables = 1000 * 2.0 + 1000  # the full layers' are stretched twofold
    assert positions_bytes(Blueprint(config, None, frozenset(), 0)) == tables * config.head_dim * 10


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (small_config("qwen3"), "vLLM serves no qwen3 policy whose attention_bias is True"),
        (small_config("qwen2"), "vLLM serves no qwen2 policy with a window in some layers alone"),
        (small_config("phi3", **LONG), "vLLM serves no phi3 policy whose positions are longrope"),
        (small_config("phi3"), None),
        (small_config("qwen2", layer_types=["sliding_attention"] * 2), None),
        (small_config("qwen2", layer_types=["full_attention"] * 2, sliding_window=None), None),
    ],
)
def test_a_policy_that_vllm_would_compute_otherwise_is_refused(config: PreTrainedConfig, said: str | None) -> None:
    """vLLM ignores windows in some layers of a Qwen, and biases: the node's work would be rejected."""
    expected = pytest.raises(WrongEngine, match=said) if said else contextlib.nullcontext()
    with expected:
        check_family(Blueprint(config, None, frozenset(), 0))


def test_a_feed_that_deletes_a_policy_before_vllm_has_read_it(tiny_policy_path: Path, tmp_path: Path) -> None:
    brought = tmp_path / "brought"
    brought.write_bytes(tiny_policy_path.read_bytes())
    host = VllmHost(SPEC, VllmSettings(), state=tmp_path / "engine", busy=bool, on_end=print)
    folder = host._stage_policy(brought, 3)
    brought.unlink()
    assert inspect_policy(folder / WEIGHTS).hidden == 128
    with pytest.raises(UnreadablePolicy):
        inspect_policy(host._stage_policy(brought, 4) / WEIGHTS)


def test_the_gpus_of_vllm_are_told_by_its_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker's process must not begin to use the GPU itself: vLLM would find less of it free."""
    platform = SimpleNamespace(is_cpu=lambda: False, get_device_name=lambda: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setattr(vllm_host, "_set_environment", lambda _: None)
    for gpus, device in ((1, "NVIDIA H200"), (2, "2 x NVIDIA H200")):
        engine = VllmEngine(SPEC, VllmSettings(tensor_parallel_size=gpus), state=tmp_path)
        told = Hardware(device=device, engine="vllm 0.32.0", dtype=SPEC.model.dtype)
        assert asyncio.run(engine.hardware()) == told


def test_vllm_is_told_the_size_of_a_head_that_a_configuration_leaves_out(tmp_path: Path) -> None:
    """Its GLM reads that field, which transformers' configuration does not declare: no such policy would start."""
    save_policy(make_glm4_moe(1), make_tokenizer(), tmp_path / "policy.safetensors")
    blueprint = inspect_policy(tmp_path / "policy.safetensors")
    assert not hasattr(blueprint.config, "head_dim")
    host = VllmHost(SPEC, VllmSettings(), state=tmp_path / "engine", busy=bool, on_end=print)
    host._write_config(tmp_path, blueprint)
    assert json.loads((tmp_path / "config.json").read_text())["head_dim"] == 32
