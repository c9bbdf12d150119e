"""The policy a run starts from: `model.initial` in run.toml."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from coordinator.errors import BadConfiguration
from coordinator.training.warm_start import WarmStartProgress, warm_start
from node.policy.families import TINY_FAMILIES
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.run import RunSpec

RANDOM = "random-"

_GENERIC_TOKENIZERS = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Tokenizers fully described by tokenizer.json; AutoTokenizer would substitute the model family's for some."""


def initial_policy(
    spec: RunSpec, *, progress: WarmStartProgress | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load or make the model, in float32 (the trainer's master weights), and its tokenizer; raises BadConfiguration.

    One of `TINY_FAMILIES` is warm-started from `spec.seed`; with the prefix "random-" it is untrained (for tests);
    anything else is a local folder in Hugging Face's layout with safetensors weights. Nothing is ever downloaded.
    """
    initial = spec.model.initial
    if initial in TINY_FAMILIES:
        return warm_start(initial, seed=spec.seed, progress=progress)
    if initial.startswith(RANDOM) and initial.removeprefix(RANDOM) in TINY_FAMILIES:
        return MAKERS[initial.removeprefix(RANDOM)](spec.seed), make_tokenizer()
    return _from_folder(Path(initial))


def _from_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    if not (folder / "config.json").is_file():
        raise BadConfiguration(
            f"model.initial: {folder} is neither one of {', '.join(TINY_FAMILIES)} nor a folder with a config.json"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        tokenizer_class = PreTrainedTokenizerFast if _has_generic_tokenizer(folder) else AutoTokenizer
        tokenizer = tokenizer_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise BadConfiguration(f"model.initial: {folder} cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise BadConfiguration(f"model.initial: {folder} has no fast tokenizer (tokenizer.json)")
    return model, tokenizer


def _has_generic_tokenizer(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    return path.is_file() and json.loads(path.read_bytes()).get("tokenizer_class") in _GENERIC_TOKENIZERS
