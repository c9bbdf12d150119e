"""A model's sizes, counted on the modules that its config.json builds on the meta device: no weight is read.

A config that this release can run is judged as a policy file's is. One with experts of another family is counted as
well, though no run can begin with it (`ModelShape.runs_here`); any other is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import torch
from msgspec import Meta
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from coordinator.errors import UnfitModel
from coordinator.training.optimizers import is_layer_matrix
from node.policy.config import ATTENTION, longest_sequence, parse_config, render_config, text_model
from node.policy.errors import MalformedPolicy
from node.policy.families import LAYER_KINDS, LINEAR
from node.policy.skeleton import build_skeleton, probe_shapes, projection_widths, projections, unique_tensors
from node.policy.weights import MAX_CONFIG_BYTES
from shardcast.errors import Malformed
from shardcast.files import read_bounded

CONFIG: Final = "config.json"
Dtype = Literal["float32", "bfloat16", "float16"]
"""Of a run's policies, by torch's names."""
_EXPERTS: Final = ".experts."
"""Part of the names of routed experts' parameters in transformers' models."""

_Size = Annotated[int, Meta(ge=1, le=2**24)]
_Few = Annotated[int, Meta(ge=1, le=1024)]


class _Config(msgspec.Struct, frozen=True):
    """The fields that decide what is built, bounded: a config may be a stranger's."""

    model_type: Annotated[str, Meta(max_length=100)]
    hidden_size: _Size
    num_hidden_layers: _Few
    num_attention_heads: _Few
    vocab_size: _Size
    intermediate_size: _Size
    num_key_value_heads: _Few | None = None
    head_dim: _Size | None = None
    max_position_embeddings: _Size = 2**24
    dtype: Dtype | None = None
    torch_dtype: Dtype | None = None
    num_experts_per_tok: _Few | None = None
    moe_intermediate_size: _Size | None = None
    n_routed_experts: _Few | None = None
    num_experts: _Few | None = None
    num_local_experts: _Few | None = None
    shared_expert_intermediate_size: _Size | None = None
    n_shared_experts: Annotated[int, Meta(ge=0, le=64)] | None = None

    @property
    def experts(self) -> int:
        """Routed experts of a layer, 0 without any."""
        return self.n_routed_experts or self.num_experts or self.num_local_experts or 0


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of parameters, and the widths that memory and work follow from.

    `active` are the parameters that one token meets, `matrices` those that Muon would train. FSDP gathers each layer as
    one (`largest_layer`), and embeddings, head and last norm together (`outside_layers`). `projections` are the layers
    that can have adapters, with the inputs and outputs of all of one name. `feed_forward` is the width that one token
    meets, of all its experts. A cache has something of each token for the `attending` layers: `latent` numbers where
    the heads share it; keys and values of each where that is 0. `routed` are the parameters of all layers' experts, of
    which each of `routed_layers` has `experts`, and a token meets `chosen`: 0 without any. `largest_dense` is the
    largest layer without its routed experts.
    """

    name: str
    family: str
    runs_here: bool
    dtype: Dtype
    parameters: int
    active: int
    matrices: int
    largest_layer: int
    outside_layers: int
    largest_tensor: int
    projections: dict[str, int]
    largest_projection: int
    layers: int
    attending: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: int
    has_head_norms: bool
    vocabulary: int
    positions: int
    is_tied: bool
    experts: int
    chosen: int
    routed: int
    routed_layers: int
    largest_dense: int

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding, and of an output embedding of its own."""
        return self.vocabulary * self.hidden


def read_shape(path: Path) -> ModelShape:
    """Count the model of `path`, a config.json or a folder with one; raises UnfitModel."""
    file = path / CONFIG if path.is_dir() else path
    try:
        data = read_bounded(file, max_bytes=MAX_CONFIG_BYTES)
        values = text_model(msgspec.json.decode(data, type=dict[str, Any]))
        sizes = msgspec.convert(values, type=_Config)
    except OSError as error:
        raise UnfitModel(f"{file} cannot be read: {error.strerror}") from error
    except (Malformed, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnfitModel(f"{file} is not the configuration of a language model: {error}") from error
    family = sizes.model_type
    if family not in ATTENTION and not (sizes.experts and family in CONFIG_MAPPING):
        raise UnfitModel(
            f"{file} has the model_type {family!r}, which cannot be planned: supported are "
            f"{', '.join(sorted(ATTENTION))}, and on paper alone models with experts that transformers has"
        )
    try:
        runs_here = family in ATTENTION
        config = CONFIG_MAPPING[family].from_dict(_without_code(values))
        if runs_here:
            config = parse_config(render_config(config, dtype="float32"), tensors=2**20)
        skeleton = build_skeleton(config, dtype=torch.float32)
        if runs_here:
            probe_shapes(skeleton)
    except Exception as error:
        code = f" ({error.code})" if isinstance(error, MalformedPolicy) else ""
        raise UnfitModel(f"{file} makes no model that can be planned{code}: {error}") from error
    name = file.absolute().parent.name if file.name == CONFIG else file.stem
    return _count(skeleton, config, sizes, name=name, runs_here=runs_here)


def _without_code(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what names a model's own code or how it was quantised: sizes depend on neither."""
    return {name: value for name, value in values.items() if name not in ("auto_map", "quantization_config")}


def _count(
    skeleton: PreTrainedModel, config: PreTrainedConfig, sizes: _Config, *, name: str, runs_here: bool
) -> ModelShape:
    tensors = unique_tensors(skeleton)
    total = sum(tensor.numel() for tensor in tensors.values())
    base: Any = skeleton.base_model
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in base.layers]
    unrouted = [
        sum(parameter.numel() for key, parameter in layer.named_parameters() if _EXPERTS not in f".{key}")
        for layer in base.layers
    ]
    routed = sum(tensor.numel() for key, tensor in tensors.items() if _EXPERTS in key)
    each = sizes.num_experts_per_tok or 1
    latent = getattr(config, "kv_lora_rank", None)
    if latent is None:
        head_dim = getattr(config, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    else:
        head_dim, latent = config.qk_nope_head_dim + config.qk_rope_head_dim, latent + config.qk_rope_head_dim
    if sizes.experts:
        feed_forward = (sizes.moe_intermediate_size or sizes.intermediate_size) * (each + (sizes.n_shared_experts or 0))
        feed_forward += sizes.shared_expert_intermediate_size or 0
    else:
        feed_forward = sizes.intermediate_size
    return ModelShape(
        name=name,
        family=sizes.model_type,
        runs_here=runs_here,
        dtype=sizes.dtype or sizes.torch_dtype or "float32",
        parameters=total,
        active=total - (routed - routed * each // sizes.experts if sizes.experts else 0),
        matrices=sum(tensor.numel() for key, tensor in tensors.items() if is_layer_matrix(key, tensor)),
        largest_layer=max(layers),
        outside_layers=total - sum(layers),
        largest_tensor=max(tensor.numel() for tensor in tensors.values()),
        projections=projection_widths(skeleton),
        largest_projection=max((each.weight.numel() for each in projections(skeleton).values()), default=0),
        layers=sizes.num_hidden_layers,
        attending=sizes.num_hidden_layers - (getattr(config, LAYER_KINDS, None) or []).count(LINEAR),
        hidden=sizes.hidden_size,
        feed_forward=feed_forward,
        heads=sizes.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or sizes.num_attention_heads,
        head_dim=head_dim,
        latent=latent or 0,
        has_head_norms=any(key.endswith("q_norm.weight") for key in tensors),
        vocabulary=sizes.vocab_size,
        positions=longest_sequence(config) or sizes.max_position_embeddings,
        is_tied=bool(config.tie_word_embeddings),
        experts=sizes.experts if routed else 0,
        chosen=each if routed else 0,
        routed=routed,
        routed_layers=sum(1 for count, dense in zip(layers, unrouted, strict=True) if count != dense),
        largest_dense=max(unrouted),
    )
