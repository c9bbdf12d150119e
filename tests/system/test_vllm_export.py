"""vLLM loads an exported policy by itself, as anybody would who serves it.

What would break for whom: whoever takes the trained model out of the run, and finds that it answers otherwise. vLLM
runs in a process of its own here, with nothing of this project in it; in float32, which it would round otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from coordinator.training.export import export_file
from node.policy.file import load_policy, save_policy
from node.policy.models.tiny_llama import EOS, PAD, make_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
pytest.importorskip("vllm")

SERVE = """
import json, sys
from vllm import LLM, SamplingParams

answers = {}
for folder in sys.argv[2:]:
    llm = LLM(folder, dtype="float32", max_model_len=128, max_num_seqs=8, enforce_eager=True, seed=0,
              kv_cache_memory_bytes=2**24)
    asked = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[1])]
    done = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    answers[folder] = [list(one.outputs[0].token_ids) for one in done]
    del llm
print(json.dumps(answers))
"""
FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
"""Those that one configuration fits; of every family `test_vllm_families` compares what vLLM computes of its files."""
PROMPTS = [[55, 32, 23, 24, 17, 25], [10, 20], [99, 98, 97, 96, 95, 94, 93, 92, 91, 90]]


def policy_file(path: Path, family: str, *, tied: bool) -> Path:
    config = CONFIG_MAPPING[family](
        vocab_size=130,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=tied,
        sliding_window=None,
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            # Far apart, so that no two logits are within the rounding of two kernels.
            weight.add_(0.3 * torch.randn_like(weight)) if weight.ndim == 1 else weight.mul_(3.0)
    save_policy(model, make_tokenizer(), path)
    return path


def greedy(path: Path) -> list[list[int]]:
    """What transformers' model of the policy file answers, an end mark included."""
    model = load_policy(path, dtype=torch.float32).model
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        done = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        answers.append(done[0, len(prompt) :].tolist())
    return answers


def serve(folders: list[Path]) -> dict[str, list[list[int]]]:
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SERVE, json.dumps(PROMPTS), *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_answers_as_the_policy_does(tmp_path: Path) -> None:
    expected = {}
    for number, family in enumerate(FAMILIES):
        path = policy_file(tmp_path / f"{family}.safetensors", family, tied=number % 2 == 0)
        folder = tmp_path / family
        export_file(path, folder, shard_bytes=300_000)
        expected[str(folder)] = greedy(path)
    assert serve([tmp_path / family for family in FAMILIES]) == expected
