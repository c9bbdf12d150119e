"""Import published RWKV weights: Eagle (RWKV-5.2) and Finch (RWKV-6), as a folder in Hugging Face's layout.

Numbers go from file to file a few MiB at a time, in the file's dtype. Eagle's shares are one minus the published ones,
and rounded to that dtype; all other numbers stay as they are, bit for bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from coordinator.importing.errors import UnsupportedWeights
from coordinator.importing.rwkv_names import Published, published_names
from coordinator.importing.torch_file import read_tensors
from coordinator.importing.world import ENDING_ID, read_vocabulary, world_tokenizer
from coordinator.training.export import written_folder
from node.policy.config import DTYPES, MAX_LAYERS
from node.policy.errors import MalformedPolicy
from node.policy.folder import open_folder
from node.policy.header import render_tensors
from node.policy.models import RECURRENT
from node.policy.models.finch import INPUTS
from node.policy.models.wkv import HEAD_SIZE
from node.policy.skeleton import build_skeleton, unique_tensors
from node.policy.streaming import read_numbers, write_numbers
from node.policy.weights import SINGLE, StoredTensor

VERSIONS: Final = {"eagle": "5.2", "finch": "6"}

Stored = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class Imported:
    """What was written."""

    family: str
    layers: int
    hidden: int
    parameters: int
    dtype: torch.dtype


def import_rwkv(checkpoint: Path, vocabulary: Path, folder: Path) -> Imported:
    """Write `folder` with the weights of a .pth file and the World tokenizer of the file `vocabulary`.

    Raises ImportFault, ExportError if `folder` is not empty, and OSError.
    """
    stored = read_tensors(checkpoint)
    try:
        config = describe(stored)
        names = published_names(config.model_type, config.num_hidden_layers)
        shapes = _checked_shapes(config, names, stored)
    except (UnsupportedWeights, MalformedPolicy) as error:
        raise UnsupportedWeights(f"{checkpoint}: {error}") from error
    tokenizer = world_tokenizer(read_vocabulary(vocabulary, size=config.vocab_size))
    dtypes = {DTYPES[each.dtype] for each in stored.values()}
    dtype: torch.dtype = getattr(torch, dtypes.pop() if len(dtypes) == 1 else "float32")
    config.dtype = dtype
    with written_folder(folder) as partial:
        config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        with (partial / SINGLE).open("wb") as file:
            file.write(render_tensors(shapes, dtype, {"format": "pt"}))
            pieces = (piece for name in shapes for piece in _numbers(names[name], stored))
            write_numbers(file, pieces, tensors=((math.prod(shape), dtype) for shape in shapes.values()))
        open_folder(partial)
    parameters = sum(map(math.prod, shapes.values()))
    return Imported(config.model_type, config.num_hidden_layers, config.hidden_size, parameters, dtype)


def describe(stored: Stored) -> PreTrainedConfig:
    """Return the configuration that the tensors' names and shapes tell; raises UnsupportedWeights."""
    family = _family(stored)
    indices = (int(index) for name in stored for index in re.findall(r"\Ablocks\.(\d{1,4})\.", name))
    layers = 1 + max(indices, default=0)
    if layers > MAX_LAYERS:
        raise UnsupportedWeights(f"it has {layers} layers, and a policy has at most {MAX_LAYERS}")
    vocabulary, hidden = _matrix_shape(stored, "emb.weight")
    _, head_size = _matrix_shape(stored, "blocks.0.att.time_faaaa")
    if head_size != HEAD_SIZE:
        raise UnsupportedWeights(f"it has heads of {head_size}, and a policy has heads of {HEAD_SIZE}")
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _matrix_shape(stored, "blocks.0.ffn.key.weight")[0],
        "eos_token_id": ENDING_ID,
    }
    if family == "finch":
        sizes["shift_rank"] = _matrix_shape(stored, "blocks.0.att.time_maa_w1")[1] // INPUTS
        sizes["decay_rank"] = _matrix_shape(stored, "blocks.0.att.time_decay_w1")[1]
    build: Any = RECURRENT[family].config_class
    try:
        config: PreTrainedConfig = build(**sizes)
        return config
    except Exception as error:  # a validator's, of a class of its own
        raise UnsupportedWeights(f"no policy has its sizes: {error}") from error


def _family(stored: Stored) -> str:
    """Return which family the tensors are of, by what each version of RWKV began to have."""
    parts = {re.sub(r"\Ablocks\.\d+\.", "", name) for name in stored}
    decay = stored.get("blocks.0.att.time_decay")
    if "att.r_k" in parts or "att.x_r" in parts:
        version = "7"
    elif any("time_maa" in part for part in parts):
        return "finch"
    elif "att.gate.weight" in parts:
        if decay is not None and len(decay.shape) > 1 and decay.shape[1] > 1:
            return "eagle"
        version = "5.1"
    elif "att.ln_x.weight" in parts:
        version = "5.0"
    elif "att.time_decay" in parts:
        version = "4"
    else:
        some = ", ".join(sorted(stored)[:3])
        raise UnsupportedWeights(f"its tensors ({some[:300]}, ...) are not those of an RWKV model")
    supported = " and ".join(f"RWKV-{each} ({name})" for name, each in VERSIONS.items())
    raise UnsupportedWeights(f"it is an RWKV-{version} model, and {supported} are supported")


def _checked_shapes(
    config: PreTrainedConfig, names: Mapping[str, Published], stored: Stored
) -> dict[str, tuple[int, ...]]:
    """Return our tensors' shapes by sorted name, each of which the checkpoint has, and nothing else.

    Raises UnsupportedWeights, and MalformedPolicy for a configuration that makes no model.
    """
    wanted = {name for published in names.values() for name in published.names}
    for name in sorted(wanted ^ stored.keys()):
        fault = "lacks" if name in wanted else "has"
        raise UnsupportedWeights(f"it {fault} tensor {name!r}, unlike any {config.model_type} that is supported")
    skeleton = build_skeleton(config, dtype=torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in sorted(unique_tensors(skeleton).items())}
    for ours, published in names.items():
        shape = shapes[ours] if len(published.names) == 1 else shapes[ours][1:]
        for name in published.names:
            if not _is_shaped(stored[name].shape, shape):
                raise UnsupportedWeights(
                    f"its tensor {name!r} has the shape {list(stored[name].shape)}, where {list(shape)} fits the others"
                )
    return shapes


def _is_shaped(found: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    """Return whether a published tensor has our shape, but for dimensions of one; a vector may be split into heads."""
    wide = tuple(width for width in found if width != 1)
    return wide == tuple(width for width in ours if width != 1) or (
        len(ours) == 1 and wide == (ours[0] // HEAD_SIZE, HEAD_SIZE)
    )


def _matrix_shape(stored: Stored, name: str) -> tuple[int, ...]:
    if name not in stored or len(stored[name].shape) != 2:
        raise UnsupportedWeights(f"it lacks a tensor {name!r} of 2 dimensions")
    return stored[name].shape


def _numbers(published: Published, stored: Stored) -> Iterator[Tensor]:
    """Yield the numbers of one of our tensors in pieces."""
    for name in published.names:
        for piece in read_numbers(stored[name]):
            yield 1 - piece.float() if published.is_complement else piece
