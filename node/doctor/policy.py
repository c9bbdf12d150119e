"""A policy's memory footprint from its file's header, without torch or its weights.

Whether the policy can be built is checked by `node.policy.file`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from node.errors import ConfigError
from node.policy.errors import MalformedPolicy
from node.policy.weights import ITEM_BYTES, MAX_CONFIG_BYTES, MAX_HEADER_BYTES, read_weights
from shardcast.errors import Malformed
from shardcast.files import read_bounded

_GOLDFINCH: Final = "goldfinch"
_FRAME_ACTION: Final = "frame_action"
_TOKEN_ID_BYTES: Final = 4

_Size = Annotated[int, Meta(ge=0, le=2**40)]
_Number = Annotated[int, Meta(ge=1, le=2**24)]


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[_Size]


class _Config(msgspec.Struct, frozen=True):
    model_type: str
    num_hidden_layers: _Number
    hidden_size: _Number
    rows: _Number = 1
    columns: _Number = 1
    num_attention_heads: _Number | None = None
    max_position_embeddings: _Number = 2**24
    num_key_value_heads: _Number | None = None
    head_dim: _Number | None = None


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a policy. `token_numbers` is how many keys and values one token leaves in the cache, `token_bytes` what
    it leaves there besides, in any dtype; and `state_bytes` what a sequence takes however long it is: of a policy with
    attention nothing, of a recurrent one all or most.
    """

    file_bytes: int
    parameters: int
    item_bytes: int
    token_numbers: int
    max_tokens: int
    state_bytes: int = 0
    token_bytes: int = 0

    def weight_bytes(self, item_bytes: int | None = None) -> int:
        """Return the weights' bytes in memory, in a dtype of `item_bytes` (default: the file's)."""
        return self.parameters * (item_bytes or self.item_bytes)

    def sequence_bytes(self, tokens: int, item_bytes: int | None = None) -> int:
        """Return the cache bytes of one sequence of `tokens`, capped at the model's maximum."""
        each = self.token_numbers * (item_bytes or self.item_bytes) + self.token_bytes
        return self.state_bytes + min(tokens, self.max_tokens) * each


def read_footprint(path: Path) -> Footprint:
    """Read the sizes of the policy in `path`, a policy file or a model's folder; raises ConfigError, `bad_policy`."""
    if path.is_dir():
        return _read_folder(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ConfigError(f"{path} is not a safetensors file", code="bad_policy")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop("__metadata__"), type=dict[str, str])
        config = msgspec.json.decode(metadata["config"], type=_Config)
        tensors = [msgspec.json.decode(raw, type=_Tensor) for raw in header.values()]
        item_bytes = max(ITEM_BYTES[tensor.dtype] for tensor in tensors)
        file_bytes = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", code="bad_policy") from error
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a policy file", code="bad_policy") from error
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    return _footprint(config, file_bytes=file_bytes, parameters=parameters, item_bytes=item_bytes)


def _read_folder(folder: Path) -> Footprint:
    """Read the sizes from the headers of a model's folder; whether it can be a policy, `check_folder` says."""
    try:
        tensors = read_weights(folder).values()
        config = msgspec.json.decode(read_bounded(folder / "config.json", max_bytes=MAX_CONFIG_BYTES), type=_Config)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be read: {error.strerror}", code="bad_policy") from error
    except (MalformedPolicy, Malformed, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{folder} is no policy: {error}", code="bad_policy") from error
    parameters = sum(tensor.count for tensor in tensors)
    item_bytes = max((ITEM_BYTES[tensor.dtype] for tensor in tensors), default=4)
    file_bytes = sum(tensor.count * ITEM_BYTES[tensor.dtype] for tensor in tensors)
    return _footprint(config, file_bytes=file_bytes, parameters=parameters, item_bytes=item_bytes)


def _footprint(config: _Config, *, file_bytes: int, parameters: int, item_bytes: int) -> Footprint:
    return Footprint(
        file_bytes=file_bytes,
        parameters=parameters,
        item_bytes=item_bytes,
        token_numbers=_token_numbers(config),
        max_tokens=config.max_position_embeddings,
        state_bytes=_state_bytes(config),
        token_bytes=_TOKEN_ID_BYTES if config.model_type == _GOLDFINCH else 0,
    )


def _token_numbers(config: _Config) -> int:
    if config.model_type == _FRAME_ACTION:
        return 0
    if not config.num_attention_heads:
        return config.hidden_size // 16 if config.model_type == _GOLDFINCH else 0
    heads = config.num_key_value_heads or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * (config.head_dim or config.hidden_size // config.num_attention_heads)


def _state_bytes(config: _Config) -> int:
    """In float32: a matrix per head of 64, and two vectors, in each layer; GoldFinch's last third has no matrices. Of a
    frame-based policy two vectors, and a screen of four bytes a cell with its cursor; with attention alone nothing.
    """
    if config.model_type == _FRAME_ACTION:
        return 4 * (2 * config.hidden_size + config.rows * config.columns + 3)
    if config.num_attention_heads:
        return 0
    layers = config.num_hidden_layers
    recurrent = layers - layers // 3 if config.model_type == _GOLDFINCH else layers
    return config.hidden_size * (recurrent * 64 + layers * 2) * 4
