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
from node.policy.families import (
    ATTENTION_FAMILIES,
    FULL,
    LAYER_KINDS,
    LINEAR,
    LONGROPE,
    SLIDING,
    WINDOW,
    WITH_EYES,
    Family,
)
from node.policy.models import RECURRENT
from node.policy.weights import MAX_CONFIG_BYTES

ATTENTION = frozenset(ATTENTION_FAMILIES)
"""Model types with attention and rotary positions."""
FAMILIES = ATTENTION | RECURRENT.keys()
"""Model types that are built; for each, logits are a function of the output embedding times the final norm."""

MAX_NUMBER = 2**24
"""Upper bound of every integer in a configuration: sizes, counts and token ids, which decide what is allocated.

A rotary base decides nothing of the kind, and is 5e8 in Llama 3: `render_config` writes it as a float.
"""
MAX_LAYERS = 1024

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""dtypes of a policy's tensors: safetensors' name to torch's."""

_LONG, _SHORT = "long_factor", "short_factor"
_ROPE_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    LONGROPE: frozenset({_LONG, _SHORT, "original_max_position_embeddings"}),
}
"""Required parameters of each kind of rotary positions, besides its base.

No others are accepted, because engines interpret more: vLLM changes positions for `use_fope` or `rope_dim`, where
transformers only warns of an unknown field. Two engines would then hold two models. `dynamic`, whose frequencies depend
on the longest sequence of a batch, is none of these: a worker's batches are not a verifier's. Nor do those of LONGROPE
here, which are the ones of short sequences (`longest_sequence`).
"""
_PARTIAL = "partial_rotary_factor"
"""Field of the part of each head that rotary positions turn, at most 1."""
_YARN_FIELDS = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})
"""Optional parameters of `yarn`."""
MAX_EXPERTS = 1024
"""Of a layer. With the layers they decide how many tensors are built."""

_SHARED = ("auto_map", "quantization_config", "tie_word_embeddings", "transformers_version")
"""Fields that a model with eyes has for all its parts: the first two are refused, as they are of any other model."""
_IMAGES = frozenset({"mrope_interleaved", "mrope_section"})
"""Rotary parameters that tell a picture's rows and columns apart, and mean nothing where there is text alone."""

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
    """Render `config` as JSON with sorted keys, for weights in `dtype`; a rotary base becomes a float.

    Rotary parameters of pictures are left out.
    """
    values = config.to_dict() | {"dtype": dtype}
    # A field with a name of its own and one that all families share is kept, and found, under the latter.
    kept = {name: config.attribute_map.get(name, name) for name in config_fields(type(config))}
    rendered = {name: values[key] for name, key in kept.items() if key in values}
    if isinstance(rope := rendered.get("rope_parameters"), dict):
        # What `rope_type` was called, and LONGROPE before that.
        former = _IMAGES | ({"type"} if rope.get("type") in ("su", rope.get("rope_type")) else set())
        text_alone = {name: value for name, value in rope.items() if name not in former}
        rendered["rope_parameters"] = _with_float_base(text_alone)
    return json.dumps(rendered | {"model_type": config.model_type}, sort_keys=True)


def _with_float_base(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters, or those of each kind of layer, with a base that is a float."""
    found = {name: _with_float_base(value) if isinstance(value, dict) else value for name, value in rope.items()}
    base = found.get("rope_theta")
    return found | {"rope_theta": float(base)} if type(base) is int else found


def text_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config.json says of the model of text, where that is part of one that sees (`WITH_EYES`)."""
    text, family = values.get("text_config"), WITH_EYES.get(str(values.get("model_type")))
    if family is None or not isinstance(text, dict):
        return values
    shared = {name: values[name] for name in _SHARED if name in values}
    return shared | text | {"model_type": family}


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
        _check_attention(config, ATTENTION_FAMILIES[family])
    return config


def config_fields(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Return the fields a configuration may set: declared ones, so not `auto_map`, a kernel's or a quantizer's name."""
    declared = frozenset(field.name for field in dataclasses.fields(config_class))
    family = ATTENTION_FAMILIES.get(config_class.model_type)
    return declared - _NOT_STORED | (family.undeclared if family else frozenset())


def _decode_config(text: str) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise MalformedPolicy(f"its configuration has more than {MAX_CONFIG_BYTES} bytes", code="bad_config")
    try:
        values = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedPolicy(f"its configuration is not JSON: {error}", code="bad_config") from error
    for name, value in values.items():
        _check_values(value, depth=2 if name == "rope_parameters" else 1)  # of each kind of layer, or lists
    return values


def _check_values(value: object, *, depth: int) -> None:
    """Raise MalformedPolicy for integers out of bounds, and for containers nested more than `depth` times."""
    if isinstance(value, dict | list):
        if depth == 0:
            raise MalformedPolicy("its configuration nests too deep", code="bad_config")
        for item in value.values() if isinstance(value, dict) else value:
            _check_values(item, depth=depth - 1)
    elif isinstance(value, int) and not 0 <= value <= MAX_NUMBER:
        raise MalformedPolicy(
            f"its configuration has {str(value)[:30]}, and integers are 0 .. {MAX_NUMBER}", code="bad_config"
        )


def _check_attention(config: PreTrainedConfig, family: Family) -> None:
    """Refuse configurations under which engines would compute different things, or ignore what they say.

    Frequencies that change with the batch's length would make decoding and prefill differ, and so honest workers and
    the verifier.
    """
    _check_ignored(config, family)
    rope = getattr(config, "rope_parameters", None) or {}
    if family.has_rotary_by_kind:
        if not set(getattr(config, LAYER_KINDS)) <= rope.keys() <= {FULL, SLIDING}:
            raise MalformedPolicy("its positions are not those of its kinds of layers", code="unsupported_model")
        for each in rope.values():
            _check_positions(each, family)
    else:
        _check_positions(rope, family)
    _check_kinds(config, family)
    _check_experts(config, family)
    if getattr(config, family.activation_field, None) != family.activation:
        raise MalformedPolicy(f"its activation is not {family.activation}", code="unsupported_model")
    for name in (family.logit_divisor, family.logit_cap, family.score_cap):
        number = None if name is None else getattr(config, name)
        if number is not None and not 0 < number < math.inf:
            raise MalformedPolicy(f"its {name} is {number}, not above 0", code="bad_config")


def _check_ignored(config: PreTrainedConfig, family: Family) -> None:
    """Refuse a field that has an effect nowhere here, or a value that engines do not compute."""
    for declared in dataclasses.fields(config):
        name, value = declared.name, getattr(config, declared.name, declared.default)
        if name in _NOT_STORED or name in family.known_fields:
            continue
        if value != declared.default and value not in family.fixed.get(name, ()):
            raise MalformedPolicy(f"it sets {name!r}, which is not supported", code="unsupported_model")


def _check_kinds(config: PreTrainedConfig, family: Family) -> None:
    kinds, window = getattr(config, LAYER_KINDS, None), getattr(config, WINDOW, None)
    known = (FULL, LINEAR if family.is_hybrid else SLIDING)
    for layer, kind in enumerate(kinds or []):
        if kind not in known:
            raise MalformedPolicy(f"its layer {layer} has {str(kind)[:50]!r}", code="unsupported_model")
    if kinds is not None and len(kinds) != config.num_hidden_layers:
        raise MalformedPolicy(f"it has {len(kinds)} kinds of layers", code="bad_config")
    is_used = window is not None if kinds is None else SLIDING in kinds
    if window is not None and not is_used:
        raise MalformedPolicy("its window is that of none of its layers", code="unsupported_model")
    if is_used and (type(window) is not int or window < 1 or not getattr(config, "use_sliding_window", True)):
        raise MalformedPolicy(f"its layers have a window of {str(window)[:30]} tokens", code="unsupported_model")


def _check_experts(config: PreTrainedConfig, family: Family) -> None:
    """Refuse more experts than MAX_EXPERTS, and more chosen ones than there are."""
    if family.experts is None:
        return
    experts, chosen = getattr(config, family.experts), getattr(config, "num_experts_per_tok", None)
    if type(experts) is not int or type(chosen) is not int or not 1 <= chosen <= experts <= MAX_EXPERTS:
        raise MalformedPolicy(
            f"it chooses {str(chosen)[:30]} of {str(experts)[:30]} experts, where {MAX_EXPERTS} are the most",
            code="bad_config",
        )


def _check_positions(rope: object, family: Family) -> None:
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    if not isinstance(rope, dict) or not isinstance(kind, str) or kind not in family.rotary:
        raise MalformedPolicy(f"its positions are not one of {sorted(family.rotary)}", code="unsupported_model")
    needed = _ROPE_FIELDS[kind] | {"rope_theta"}
    optional = (_YARN_FIELDS if kind == "yarn" else frozenset()) | ({_PARTIAL} if family.is_rotary_partial else set())
    unknown = sorted(rope.keys() - needed - {"rope_type"} - optional)
    if unknown:
        raise MalformedPolicy(f"its {kind} positions set {unknown[0][:100]!r}", code="unsupported_model")
    if not needed <= rope.keys():
        raise MalformedPolicy(f"its {kind} positions lack a number", code="bad_config")
    for name in rope.keys() - {"rope_type", "truncate"}:
        numbers = rope[name] if name in (_LONG, _SHORT) else [rope[name]]
        if not isinstance(numbers, list):
            raise MalformedPolicy(f"its {kind} positions have no list for {name!r}", code="bad_config")
        for number in numbers:
            most = 1.0 if name == _PARTIAL else math.inf
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not 0 < number < math.inf or number > most:
                raise MalformedPolicy(f"its {kind} positions have {str(number)[:30]!r} for {name!r}", code="bad_config")


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """Return the tokens that a model has positions for; None without a limit.

    Of LONGROPE they are those that the short factors are for: with the long ones, which transformers takes once a batch
    has a longer sequence, decoding would be another model than a prefill of all.
    """
    most: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == LONGROPE and most is not None:
        return min(most, int(rope["original_max_position_embeddings"]))
    return most
