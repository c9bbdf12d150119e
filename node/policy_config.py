"""The configuration in a policy file, to and from JSON: which models are built (docs/protocol.md, section 11).

A configuration comes from a stranger and names no kernel, no repository and no class. What is taken is what
transformers and vLLM read alike, and under which decoding and a prefill compute the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from node.models import RECURRENT
from node.policy_errors import MalformedPolicy

ATTENTION = frozenset({"llama", "mistral", "olmo2", "qwen2", "qwen3"})
"""Model types with full attention and rotary positions."""
FAMILIES = ATTENTION | RECURRENT.keys()
"""Model types that are built: of each, logits = output embedding of the final norm."""

MAX_CONFIG_BYTES = 64 * 1024
MAX_NUMBER = 2**24
"""No size, count or token id of a configuration is larger."""
MAX_LAYERS = 1024

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Of a policy's tensors: by safetensors' name, torch's."""

_ROPE_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
"""Of each kind of rotary positions, the numbers that it needs besides its base.

No others are taken, because engines look for more: vLLM makes other positions of `use_fope` or `rope_dim`, where
transformers warns of a field that it does not know. Two engines would then hold two models.
"""
_YARN_FIELDS = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})
"""What `yarn` may have besides."""
_ACTIVATION = "silu"
"""Of every family with attention: another may have transformers look for a kernel, and vLLM knows no other here."""

# Declared by every configuration, and either another task's or a caller's way to ask for outputs.
_NOT_STORED = frozenset(
    {
        "architectures",
        "chunk_size_feed_forward",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)


def render_config(model: PreTrainedModel) -> str:
    """The configuration of `model` as JSON, keys sorted; `dtype` in it is the model's own."""
    values = model.config.to_dict() | {"dtype": str(model.dtype)[6:]}
    config = {name: values[name] for name in _config_fields(type(model.config)) if name in values}
    return json.dumps(config | {"model_type": model.config.model_type}, sort_keys=True)


def parse_config(text: str, *, tensors: int) -> PreTrainedConfig:
    """The configuration that `text` says, of a file of so many tensors, checked. Raises MalformedPolicy."""
    values = _decode_config(text)
    family = values.pop("model_type", None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise MalformedPolicy(f"is of a family that is not built here: {str(family)[:100]!r}", code="unsupported_model")
    config_class: type[PreTrainedConfig] = CONFIG_MAPPING[family]
    unknown = sorted(values.keys() - _config_fields(config_class))
    if unknown:
        raise MalformedPolicy(f"its configuration sets {unknown[0][:100]!r}", code="bad_config")
    if values.get("dtype") not in DTYPES.values():
        raise MalformedPolicy("its configuration names no dtype", code="bad_config")
    layers = values.get("num_hidden_layers")
    if not isinstance(layers, int) or not 1 <= layers <= min(MAX_LAYERS, tensors):
        raise MalformedPolicy(f"{tensors} tensors are not {layers} layers", code="bad_config")
    try:
        config = config_class(**values)
    except Exception as error:
        raise MalformedPolicy(f"its configuration is refused: {error}", code="bad_config") from error
    if family in ATTENTION:
        _check_attention(config)
    return config


def _config_fields(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """The fields a configuration may set: declared ones, so not `auto_map`, a kernel's or a quantizer's name."""
    return frozenset(field.name for field in dataclasses.fields(config_class)) - _NOT_STORED


def _decode_config(text: str) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise MalformedPolicy(f"its configuration has more than {MAX_CONFIG_BYTES} bytes", code="bad_config")
    try:
        values = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedPolicy(f"its configuration is not JSON: {error}", code="bad_config") from error
    _check_values(values, depth=2)
    return values


def _check_values(value: object, *, depth: int) -> None:
    """Numbers that are sizes stay sizes that fit; containers nest twice at most (`rope_parameters`)."""
    if isinstance(value, dict | list):
        if depth == 0:
            raise MalformedPolicy("its configuration nests too deep", code="bad_config")
        for item in value.values() if isinstance(value, dict) else value:
            _check_values(item, depth=depth - 1)
    elif isinstance(value, int) and not 0 <= value <= MAX_NUMBER:
        raise MalformedPolicy(f"its configuration has {str(value)[:30]}, at most {MAX_NUMBER} fits", code="bad_config")


def _check_attention(config: PreTrainedConfig) -> None:
    """Refuse what makes a token's hidden state depend on more than the tokens before it, or on fewer.

    Frequencies that change with the length of the batch would tell decoding and prefill apart, and so honest
    workers from the verifier; windows are not what the engines' masks describe.
    """
    _check_positions(getattr(config, "rope_parameters", None) or {})
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None) is not None:
        raise MalformedPolicy("its attention is not full in each layer", code="unsupported_model")
    if getattr(config, "hidden_act", None) != _ACTIVATION:
        raise MalformedPolicy(f"its activation is not {_ACTIVATION}", code="unsupported_model")


def _check_positions(rope: Mapping[str, Any]) -> None:
    kind = rope.get("rope_type")
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        raise MalformedPolicy(f"its positions are not one of {sorted(_ROPE_FIELDS)}", code="unsupported_model")
    needed = _ROPE_FIELDS[kind] | {"rope_theta"}
    unknown = sorted(rope.keys() - needed - {"rope_type"} - (_YARN_FIELDS if kind == "yarn" else frozenset()))
    if unknown:
        raise MalformedPolicy(f"its {kind} positions set {unknown[0][:100]!r}", code="unsupported_model")
    if not needed <= rope.keys():
        raise MalformedPolicy(f"its {kind} positions lack a number", code="bad_config")
    for name in rope.keys() - {"rope_type", "truncate"}:
        number = rope[name]
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise MalformedPolicy(f"its {kind} positions have {str(number)[:30]!r} for {name!r}", code="bad_config")
