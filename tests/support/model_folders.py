"""Folders in Hugging Face's layout, as an operator names one in `model.initial`: small, of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from node.policy.models.tiny_llama import EOS, PAD, make_tokenizer

SHARD_BYTES = 20_000
SECOND_END = 7
TEMPLATE = "{% for m in messages %}<think>{{ m.content }}</think>{% endfor %}"
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def make_folder(folder: Path, *, family: str = "qwen3", seed: int = 0, **fields: Any) -> Path:
    """Write a whole folder: bfloat16 weights in several shards, tokenizer, chat template, and two end marks."""
    config = CONFIG_MAPPING[family](**SIZES | {"sliding_window": None} | fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=[EOS, SECOND_END], do_sample=True, temperature=0.6, top_k=20, top_p=0.95
    )
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], object] | Mapping[str, Any]) -> None:
    """Change the JSON object in `path`, by a function of it or by setting keys."""
    values = json.loads(path.read_bytes())
    if isinstance(change, Mapping):
        values |= change
    else:
        change(values)
    path.write_text(json.dumps(values))


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file, and nothing behind it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def shard_of(folder: Path, tensor: str) -> Path:
    """Return the file in which the index places `tensor`."""
    found: str = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"][tensor]
    return folder / found
