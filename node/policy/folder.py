"""Validate a model's folder in Hugging Face's layout as the first policy of a run, without loading a weight.

Whoever downloads a policy builds it by `node.policy.file`. So what a folder says is brought into the form that a policy
file has, and judged by the same rules; besides, nothing may get lost on the way: no setting, no tensor, no end mark.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    CONFIG_MAPPING,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    __version__,
)

from node.policy.config import (
    ATTENTION,
    DTYPES,
    FAMILIES,
    config_fields,
    longest_sequence,
    parse_config,
    render_config,
    text_model,
)
from node.policy.errors import MalformedPolicy
from node.policy.families import ATTENTION_FAMILIES, RECURRENT_BLOCK, Family
from node.policy.file import PolicySource
from node.policy.inspection import FirstPolicy
from node.policy.layout import EXACT, shapes_of, stored_aliases, stored_layout
from node.policy.model_files import GENERATION, bad_file, check_sizes, read_object
from node.policy.parts import of_text, without_drafts
from node.policy.skeleton import build_skeleton, probe_shapes, projection_widths, unique_tensors
from node.policy.streaming import read_numbers
from node.policy.tokenizer import eos_ids_of, normalized_tokens, vocabulary_digest
from node.policy.tokenizer_files import check_tokenizer
from node.policy.weights import CONFIG, ITEM_BYTES, StoredTensor, check_tensors, read_weights

MAX_END_MARKS: Final = 64

_FORMER_FIELDS: Final = frozenset(
    {
        *(field.name for field in dataclasses.fields(PreTrainedConfig)),
        *vars(GenerationConfig()),  # type: ignore[no-untyped-call]
        "_attn_implementation_autoset",
        "_name_or_path",
        "add_cross_attention",
        "cross_attention_hidden_size",
        "finetuning_task",
        "is_llama_config",  # of SmolLM
        "is_decoder",
        "model_type",
        "prefix",
        "pruned_heads",
        "rope_scaling",  # rope_parameters of earlier releases, as is
        "rope_theta",
        "sep_token_id",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
    }
)
"""Fields that transformers wrote into every configuration, or reads as others, and that change no weight's use."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder that was found to hold a policy: `skeleton` is the model on the meta device, `tensors` its weights."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerFast
    skeleton: PreTrainedModel
    tensors: Mapping[str, StoredTensor]
    eos_ids: frozenset[int]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all weights; float32 where they have several, but for the few that are often kept in float32."""
        apart = (EXACT, *(f".{RECURRENT_BLOCK}.{name}" for name in ("A_log", "dt_bias", "norm.weight")))
        names = {DTYPES[tensor.dtype] for name, tensor in self.tensors.items() if not name.endswith(apart)}
        found: torch.dtype = getattr(torch, names.pop() if len(names) == 1 else "float32")
        return found

    def first_policy(self) -> FirstPolicy:
        """Return what the rules of a run are compared with."""
        layers = _layer_sizes(self.skeleton)
        return FirstPolicy(
            family=self.config.model_type,
            hidden=self.config.hidden_size,
            positions=longest_sequence(self.config),
            parameters=layers.total(),
            largest_layer=max(layers.values()),
            weight_bytes=sum(tensor.count * ITEM_BYTES[tensor.dtype] for tensor in self.tensors.values()),
            vocabulary=self.config.vocab_size,
            end_marks=tuple(sorted(self.eos_ids)),
            has_chat_template=bool(self.tokenizer.chat_template),
            normalized_tokens=normalized_tokens(self.tokenizer),
            vocabulary_digest=vocabulary_digest(self.tokenizer),
            projections=projection_widths(self.skeleton) if self.config.model_type in ATTENTION else {},
        )

    def source(self) -> PolicySource:
        """Return what the policy file is made of, weights read as they are written."""
        shapes = shapes_of(stored_layout(self.skeleton))
        numbers = itertools.chain.from_iterable(read_numbers(self.tensors[name]) for name in shapes)
        return PolicySource(self.config, self.tokenizer, shapes, numbers)


def validate_folder(folder: Path) -> FirstPolicy:
    """Return what `folder` holds; raises as `open_folder`."""
    return open_folder(folder).first_policy()


def open_folder(folder: Path) -> ModelFolder:
    """Validate `folder`; raises MalformedPolicy, whose message names the file and says what to do."""
    check_sizes(folder)
    values = text_model(read_object(folder / CONFIG))
    _check_fields(folder / CONFIG, values)
    tensors = read_weights(folder)
    config = _parse_config(folder, values, tensors=len(tensors))
    tensors = of_text(without_drafts(tensors, config))
    tokenizer = check_tokenizer(folder, vocabulary=config.vocab_size)
    config.eos_token_id = end_marks(folder, config, tokenizer)
    try:
        ends = eos_ids_of(config, tokenizer)
    except MalformedPolicy as error:
        raise bad_file(
            folder / CONFIG, f"cannot become a policy: {error}; correct eos_token_id", code=error.code
        ) from error
    skeleton = _build(folder, config)
    shapes = shapes_of(stored_layout(skeleton))
    check_tensors(folder, tensors, family=config.model_type, shapes=shapes, aliases=stored_aliases(skeleton))
    return ModelFolder(config, tokenizer, skeleton, tensors, ends)


def end_marks(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> int | list[int] | None:
    """Return the configuration's `eos_token_id`, and behind it those that only generation_config.json names.

    Whoever generates with the folder ends at those, too; Qwen's second one stands there alone. The tokenizer's own is
    an end mark in any case. Raises MalformedPolicy for ids outside the vocabulary.
    """
    path, declared = folder / GENERATION, config.eos_token_id
    more = _ids(read_object(path).get("eos_token_id")) if path.is_file() else []
    if more is None or len(more) > MAX_END_MARKS or any(not 0 <= token < config.vocab_size for token in more):
        raise bad_file(
            path,
            f"has an eos_token_id outside the vocabulary of {config.vocab_size}: give this model's end marks",
            code="bad_config",
        )
    known = _ids(declared) or []
    added = [token for token in dict.fromkeys(more) if token not in known and token != tokenizer.eos_token_id]
    return [*known, *added] if added else declared


def _check_fields(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse families and fields that this version does not know, since it would leave them out of the policy."""
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise bad_file(
            path,
            f"has the model_type {str(family)[:100]!r}, and these are supported: {', '.join(sorted(FAMILIES))}; "
            "take a model of one of them",
            code="unsupported_model",
        )
    for name, consequence in (("quantization_config", "is of quantised weights"), ("auto_map", "brings its own code")):
        if values.get(name):
            raise bad_file(
                path,
                f"{consequence} ({name}): take the original weights of a supported family",
                code="unsupported_model",
            )
    row, config_class = ATTENTION_FAMILIES.get(family, Family()), CONFIG_MAPPING[family]
    known = config_fields(config_class) | set(config_class.attribute_map.values()) | _FORMER_FIELDS | row.former
    # What is null or false is switched off, as it is where nobody knows it.
    unknown = sorted(
        name
        for name, value in values.items()
        if name not in known and value not in (None, False) and value not in row.fixed.get(name, ())
    )
    if unknown:
        raise bad_file(
            path,
            f"sets {unknown[0][:100]!r}, which {family} models of transformers {__version__} do not have (it was "
            f"written by {str(values.get('transformers_version', 'another version'))[:30]}): the run would train "
            "another model; remove it if it has no effect, or take another model",
            code="bad_config",
        )


def _parse_config(folder: Path, values: Mapping[str, Any], *, tensors: int) -> PreTrainedConfig:
    """Return the configuration as those will read it who download the policy."""
    path = folder / CONFIG
    try:
        config = CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))
        text = render_config(config, dtype="float32")
    except Exception as error:
        raise bad_file(path, f"is refused by transformers ({error}): correct it", code="bad_config") from error
    try:
        return parse_config(text, tensors=tensors)
    except MalformedPolicy as error:
        raise bad_file(
            path, f"cannot become a policy: {error}; take another model, or change it", code=error.code
        ) from error


def _build(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model without memory for its weights."""
    try:
        skeleton = build_skeleton(config, dtype=torch.float32)
        probe_shapes(skeleton)
    except MalformedPolicy as error:
        raise bad_file(folder / CONFIG, f"makes no model: {error}; correct it", code=error.code) from error
    return skeleton


def _layer_sizes(skeleton: PreTrainedModel) -> Counter[str]:
    """Return the parameters by layer, and of each tensor outside the layers by its name."""
    sizes: Counter[str] = Counter()
    for name, tensor in unique_tensors(skeleton).items():
        layer = re.match(r".*?\.\d+\.", name)
        sizes[layer[0] if layer else name] += tensor.numel()
    return sizes


def _ids(value: object) -> list[int] | None:
    """Return `eos_token_id` as a list; None if it is something else."""
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    return ids if all(type(token) is int for token in ids) else None
