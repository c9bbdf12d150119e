"""The policy a run starts from: `model.initial` in run.toml."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from coordinator.errors import UnfitModel
from coordinator.run.first_policy import require_fit
from coordinator.training.warm_start import WarmStartProgress, warm_start
from node.policy.errors import MalformedPolicy
from node.policy.families import TINY_FAMILIES
from node.policy.folder import end_marks, load_tokenizer, validate_folder
from node.policy.inspection import RANDOM, tiny_policy
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.run import RunSpec


def initial_policy(
    spec: RunSpec, *, progress: WarmStartProgress | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load or make the model, in float32 (the trainer's master weights), and its tokenizer; raises UnfitModel.

    One of `TINY_FAMILIES` is warm-started from `spec.seed`; with the prefix "random-" it is untrained (for tests);
    anything else is a local folder in Hugging Face's layout with safetensors weights. Nothing is ever downloaded.
    """
    initial = spec.model.initial
    tiny = tiny_policy(initial)
    if tiny is None:
        return _from_folder(Path(initial), spec)
    require_fit(tiny, spec)
    if initial in TINY_FAMILIES:
        return warm_start(initial, seed=spec.seed, progress=progress)
    return MAKERS[initial.removeprefix(RANDOM)](spec.seed), make_tokenizer()


def _from_folder(folder: Path, spec: RunSpec) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    try:
        require_fit(validate_folder(folder), spec)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        tokenizer = load_tokenizer(folder)
        model.config.eos_token_id = end_marks(folder, model.config, tokenizer)
    except (MalformedPolicy, OSError, ValueError) as error:
        raise UnfitModel(f"model.initial: {error}") from error
    return model, tokenizer
