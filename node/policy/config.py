"""Configuration of a policy file, to and from JSON; it decides which models are built (docs/protocol.md, section 11).

A configuration comes from a stranger and names no kernel, repository or class. Only what transformers and vLLM read
alike is accepted, and only where decoding and a prefill compute the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from transformers import CONFIG_MAPPING, PreTrainedConfig

from node.policy.errors import MalformedPolicy
from node.policy.models import RECURRENT
from node.policy.weights import MAX_CONFIG_BYTES

ATTENTION = frozenset({"llama", "mistral", "olmo2", "qwen2", "qwen3"})
"""Model types with full attention and rotary positions."""
FAMILIES = ATTENTION | RECURRENT.keys()
"""Model types that are built; for each, logits = output embedding of the final norm."""

MAX_NUMBER = 2**24
"""Upper bound of every integer in a configuration: sizes, counts and token ids, which decide what is allocated.

A rotary base decides nothing of the kind, and is 5e8 in Llama 3: `render_config` writes it as a float.
"""
MAX_LAYERS = 1024

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""dtypes of a policy's tensors: safetensors' name to torch's."""

_ROPE_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
"""Required parameters of each kind of rotary positions, besides its base.

No others are accepted, because engines interpret more: vLLM changes positions for `use_fope` or `rope_dim`, where
transformers only warns of an unknown field. Two engines would then hold two models.
"""
_YARN_FIELDS = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})
"""Optional parameters of `yarn`."""
_ACTIVATION = "silu"
"""Activation of every family with attention: for another, transformers may look up a kernel, and vLLM knows no
other.
"""

# Declared by every configuration, but for other tasks or for selecting outputs.
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


def render_config(config: PreTrainedConfig, *, dtype: str) -> str:
    """Render `config` as JSON with sorted keys, for weights in `dtype`; a rotary base becomes a float."""
    values = config.to_dict() | {"dtype": dtype}
    rendered = {name: values[name] for name in config_fields(type(config)) if name in values}
    rope = rendered.get("rope_parameters")
    if isinstance(rope, dict) and type(rope.get("rope_theta")) is int:
        rendered["rope_parameters"] = rope | {"rope_theta": float(rope["rope_theta"])}
    return json.dumps(rendered | {"model_type": config.model_type}, sort_keys=True)


def parse_config(text: str, *, tensors: int) -> PreTrainedConfig:
    """Parse and validate the configuration `text` of a file with `tensors` tensors. Raises MalformedPolicy."""
    values = _decode_config(text)
    family = values.pop("model_type", None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise MalformedPolicy(
            f"model family {str(family)[:100]!r} is not supported; these are: {', '.join(sorted(FAMILIES))}",
            code="unsupported_model",
        )
    config_class: type[PreTrainedConfig] = CONFIG_MAPPING[family]
    unknown = sorted(values.keys() - config_fields(config_class))
    if unknown:
        raise MalformedPolicy(f"its configuration sets {unknown[0][:100]!r}", code="bad_config")
    if values.get("dtype") not in DTYPES.values():
        raise MalformedPolicy("its configuration does not name a supported dtype", code="bad_config")
    layers = values.get("num_hidden_layers")
    if not isinstance(layers, int) or not 1 <= layers <= min(MAX_LAYERS, tensors):
        raise MalformedPolicy(f"{tensors} tensors cannot form {layers} layers", code="bad_config")
    try:
        config = config_class(**values)
    except Exception as error:
        raise MalformedPolicy(f"its configuration is refused: {error}", code="bad_config") from error
    if family in ATTENTION:
        _check_attention(config)
    return config


def config_fields(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Return the fields a configuration may set: declared ones, so not `auto_map`, a kernel's or a quantizer's name."""
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
    """Raise MalformedPolicy for integers out of bounds, and for containers nested more than twice
    (`rope_parameters`).
    """
    if isinstance(value, dict | list):
        if depth == 0:
            raise MalformedPolicy("its configuration nests too deep", code="bad_config")
        for item in value.values() if isinstance(value, dict) else value:
            _check_values(item, depth=depth - 1)
    elif isinstance(value, int) and not 0 <= value <= MAX_NUMBER:
        raise MalformedPolicy(
            f"its configuration has {str(value)[:30]}, and integers are 0 .. {MAX_NUMBER}", code="bad_config"
        )


def _check_attention(config: PreTrainedConfig) -> None:
    """Refuse configurations under which a hidden state depends on more or fewer than all earlier tokens.

    Frequencies that change with the batch's length would make decoding and prefill differ, and so honest workers and
    the verifier; windows are not what the engines' masks describe.
    """
    _check_positions(getattr(config, "rope_parameters", None) or {})
    kinds: list[str] = getattr(config, "layer_types", None) or []
    for layer, kind in enumerate(kinds):
        if kind != "full_attention":
            raise MalformedPolicy(
                f"its layer {layer} has {str(kind)[:50]!r}, not full attention", code="unsupported_model"
            )
    window = getattr(config, "sliding_window", None)
    if window is not None:
        raise MalformedPolicy(
            f"its attention is not full: it has a window of {window} tokens", code="unsupported_model"
        )
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
