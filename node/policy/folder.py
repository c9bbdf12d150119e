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

import msgspec
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoTokenizer,
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
from node.policy.parts import of_text, without_drafts
from node.policy.skeleton import build_skeleton, probe_shapes, projection_widths, unique_tensors
from node.policy.streaming import read_numbers
from node.policy.tokenizer import (
    eos_ids_of,
    normalized_tokens,
    parse_tokenizer,
    render_tokenizer,
    tokenizer_errors,
    vocabulary_digest,
)
from node.policy.weights import (
    AGAIN,
    CONFIG,
    ITEM_BYTES,
    MAX_CONFIG_BYTES,
    StoredTensor,
    check_tensors,
    read_weights,
)

GENERATION: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"

MAX_BYTES: Final = {
    CONFIG: MAX_CONFIG_BYTES,
    GENERATION: 64 * 1024,
    TOKENIZER: 90_000_000,  # a policy file's header holds it, and has at most 100 MB
    TOKENIZER_CONFIG: 16 * 1024 * 1024,
    TEMPLATE: 128 * 1024,
    "added_tokens.json": 16 * 1024 * 1024,
    "special_tokens_map.json": 1024 * 1024,
    "vocab.json": 90_000_000,
    "merges.txt": 90_000_000,
}
"""Limits of the files that are parsed, by swarmproof or transformers, checked before."""
MAX_END_MARKS: Final = 64

_OTHER_TOKENIZER: Final = "bring the tokenizer of this model"

_GENERIC_TOKENIZERS = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Tokenizers fully described by tokenizer.json; AutoTokenizer would substitute the model family's for some."""

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


class _AddedToken(msgspec.Struct, frozen=True):
    content: str
    id: int | None = None


class _AddedTokens(msgspec.Struct, frozen=True):
    """Those of tokenizer.json, and those of tokenizer_config.json."""

    added_tokens: tuple[_AddedToken, ...] = ()
    added_tokens_decoder: dict[int, _AddedToken] = {}


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
    _check_sizes(folder)
    values = text_model(_read_object(folder / CONFIG))
    _check_fields(folder / CONFIG, values)
    tensors = read_weights(folder)
    config = _parse_config(folder, values, tensors=len(tensors))
    tensors = of_text(without_drafts(tensors, config))
    tokenizer = _check_tokenizer(folder, vocabulary=config.vocab_size)
    config.eos_token_id = end_marks(folder, config, tokenizer)
    try:
        ends = eos_ids_of(config, tokenizer)
    except MalformedPolicy as error:
        raise _bad(
            folder / CONFIG, f"cannot become a policy: {error}; correct eos_token_id", code=error.code
        ) from error
    skeleton = _build(folder, config)
    shapes = shapes_of(stored_layout(skeleton))
    check_tensors(folder, tensors, family=config.model_type, shapes=shapes, aliases=stored_aliases(skeleton))
    return ModelFolder(config, tokenizer, skeleton, tensors, ends)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of `folder`, and run no code of it; raises MalformedPolicy."""
    path = folder / TOKENIZER_CONFIG
    named = _read_object(path).get("tokenizer_class") if path.is_file() else None
    tokenizer_class = PreTrainedTokenizerFast if named in _GENERIC_TOKENIZERS else AutoTokenizer
    if not (folder / TOKENIZER).is_file():
        raise _bad(folder, f"has no fast tokenizer ({TOKENIZER}): save it again with use_fast", code="bad_tokenizer")
    try:
        with tokenizer_errors():
            tokenizer = tokenizer_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except MalformedPolicy as error:
        raise _bad(folder / TOKENIZER, f"cannot be loaded: {error}; {AGAIN}", code=error.code) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise _bad(path, f"names {type(tokenizer).__name__}, which is no fast tokenizer", code="bad_tokenizer")
    return tokenizer


def end_marks(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> int | list[int] | None:
    """Return the configuration's `eos_token_id`, and behind it those that only generation_config.json names.

    Whoever generates with the folder ends at those, too; Qwen's second one stands there alone. The tokenizer's own is
    an end mark in any case. Raises MalformedPolicy for ids outside the vocabulary.
    """
    path, declared = folder / GENERATION, config.eos_token_id
    more = _ids(_read_object(path).get("eos_token_id")) if path.is_file() else []
    if more is None or len(more) > MAX_END_MARKS or any(not 0 <= token < config.vocab_size for token in more):
        raise _bad(
            path,
            f"has an eos_token_id outside the vocabulary of {config.vocab_size}: give this model's end marks",
            code="bad_config",
        )
    known = _ids(declared) or []
    added = [token for token in dict.fromkeys(more) if token not in known and token != tokenizer.eos_token_id]
    return [*known, *added] if added else declared


def check_chat_template(folder: Path) -> None:
    """Render the chat template for one question; raises MalformedPolicy.

    A template is a program in transformers' sandbox, which has no limits of time and memory: call it in a process that
    has.
    """
    tokenizer: Any = load_tokenizer(folder)
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    try:
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise _bad(
            folder / (TEMPLATE if (folder / TEMPLATE).is_file() else TOKENIZER_CONFIG),
            f"has a chat template that fails for one question ({type(error).__name__}: {str(error)[:300]}): mend "
            "or remove it, since no run needs one",
            code="bad_chat_template",
        ) from error


def _check_sizes(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise _bad(folder, f"has no {CONFIG}: name a folder in Hugging Face's layout", code="bad_config")
    for name, most in MAX_BYTES.items():
        path = folder / name
        if path.is_file() and path.stat().st_size > most:
            code = "bad_chat_template" if name == TEMPLATE else "bad_config"
            raise _bad(path, f"has {path.stat().st_size} bytes, and at most {most} are read: shorten it", code=code)


def _read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON object, whose length was checked."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(path, f"is not a JSON object ({error}): {AGAIN}", code="bad_config") from error


def _check_fields(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse families and fields that this version does not know, since it would leave them out of the policy."""
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise _bad(
            path,
            f"has the model_type {str(family)[:100]!r}, and these are supported: {', '.join(sorted(FAMILIES))}; "
            "take a model of one of them",
            code="unsupported_model",
        )
    for name, consequence in (("quantization_config", "is of quantised weights"), ("auto_map", "brings its own code")):
        if values.get(name):
            raise _bad(
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
        raise _bad(
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
        raise _bad(path, f"is refused by transformers ({error}): correct it", code="bad_config") from error
    try:
        return parse_config(text, tensors=tensors)
    except MalformedPolicy as error:
        raise _bad(
            path, f"cannot become a policy: {error}; take another model, or change it", code=error.code
        ) from error


def _check_tokenizer(folder: Path, *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Return the folder's tokenizer, if a policy file can hold it and its ids are the model's."""
    found = load_tokenizer(folder)
    if found.eos_token is None:
        raise _bad(folder / TOKENIZER_CONFIG, "names no eos_token: name the model's end mark", code="bad_tokenizer")
    templates = found.chat_template if isinstance(found.chat_template, dict) else {"": found.chat_template or ""}
    if sum(len(each.encode()) for each in templates.values()) > MAX_BYTES[TEMPLATE]:
        raise _bad(
            folder / TOKENIZER_CONFIG,
            f"has a chat template of more than {MAX_BYTES[TEMPLATE]} bytes: shorten or remove it",
            code="bad_chat_template",
        )
    _check_added_tokens(folder, found)
    try:
        published = parse_tokenizer(*render_tokenizer(found), vocabulary=vocabulary)
        with tokenizer_errors():
            ids: list[int] = published("What is 2 + 2?")["input_ids"]
    except MalformedPolicy as error:
        raise _bad(folder / TOKENIZER, f"cannot be a policy's: {error}; {_OTHER_TOKENIZER}", code=error.code) from error
    if max(ids, default=0) >= vocabulary:
        raise _bad(
            folder / TOKENIZER,
            f"puts token {max(ids)} into a text, outside the model's vocabulary of {vocabulary}: {_OTHER_TOKENIZER}",
            code="bad_tokenizer",
        )
    return found


def _check_added_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse added tokens that have another id once loaded: ids are given in turn, whatever the files say."""
    declared: list[tuple[str, int | None]] = []
    try:
        for path in (folder / TOKENIZER, folder / TOKENIZER_CONFIG):
            if path.is_file():
                found = msgspec.json.decode(path.read_bytes(), type=_AddedTokens)
                declared += [(token.content, token.id) for token in found.added_tokens]
                declared += [(token.content, number) for number, token in found.added_tokens_decoder.items()]
    except (OSError, msgspec.MsgspecError) as error:
        raise _bad(folder / TOKENIZER, f"lists no added tokens ({error}): {AGAIN}", code="bad_tokenizer") from error
    for content, number in declared:
        loaded = tokenizer.backend_tokenizer.token_to_id(content)
        if loaded != number:
            raise _bad(
                folder / TOKENIZER,
                f"has added token {content[:90]!r} with id {number}, which is {loaded} once loaded: {_OTHER_TOKENIZER}",
                code="bad_tokenizer",
            )


def _build(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model without memory for its weights."""
    try:
        skeleton = build_skeleton(config, dtype=torch.float32)
        probe_shapes(skeleton)
    except MalformedPolicy as error:
        raise _bad(folder / CONFIG, f"makes no model: {error}; correct it", code=error.code) from error
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


def _bad(path: Path, fault: str, *, code: str) -> MalformedPolicy:
    return MalformedPolicy(f"{path} {fault}", code=code)
