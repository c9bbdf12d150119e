"""How a model's weights are stored: under the names that published checkpoints have, which everything else reads.

transformers keeps the experts of a layer in two tensors, where published files have three matrices of each expert. Each
of these is a range of consecutive numbers of the model's tensor, so that both hold the same numbers in another order of
names, and whoever reads or writes a file moves ranges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch
from transformers import PreTrainedModel

from node.policy.errors import MalformedPolicy
from node.policy.families import ATTENTION_FAMILIES, ExpertNames
from node.policy.skeleton import unique_tensors

MAX_TENSORS: Final = 2**18
"""Upper bound of a file's tensors: three matrices of 384 experts in 64 layers are a quarter of it."""

EXACT: Final = ".e_score_correction_bias"
"""How the names of tensors end that have float32 whatever the others have.

A router adds them to scores below 1, and in 16 bits they would choose other experts.
"""


_BLOCK: Final = re.compile(r"(model\.layers\.\d+\.)mlp\.(.+)")


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A stored tensor: the numbers from `first` on of the model's tensor `name`, in the shape `shape`."""

    name: str
    first: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def numbers(self) -> slice:
        """Its numbers, of the model's tensor seen flat."""
        return slice(self.first, self.first + self.count)


def stored_layout(model: PreTrainedModel) -> dict[str, StoredRange]:
    """Return what a policy file has, by sorted name; raises MalformedPolicy for more than MAX_TENSORS tensors."""
    tensors = {name: tuple(tensor.shape) for name, tensor in unique_tensors(model).items()}
    every = (stored for name, shape in tensors.items() for stored in _stored(model, name, shape))
    found = dict(islice(every, MAX_TENSORS + 1))
    if len(found) > MAX_TENSORS:
        raise MalformedPolicy(f"has more than {MAX_TENSORS} tensors", code="bad_config")
    return dict(sorted(found.items()))


def shapes_of(layout: Mapping[str, StoredRange]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of stored tensors, by name."""
    return {name: stored.shape for name, stored in layout.items()}


def stored_aliases(model: PreTrainedModel) -> dict[str, str]:
    """Return the further names of shared weights, with the name that each is stored under."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    known = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
    return {name: stored for name, stored in known.items() if name != stored}


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of tensor `name` in a policy whose dtype is `dtype`."""
    return torch.float32 if name.endswith(EXACT) else dtype


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Make `dtype` that of a model's weights, in place, but for those that always have float32; return the model."""
    for name, tensor in unique_tensors(model).items():
        tensor.data = tensor.data.to(dtype_of(name, dtype))
    return model


def _stored(model: PreTrainedModel, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, StoredRange]]:
    """Yield the stored tensors of one of the model's, by name."""
    family = ATTENTION_FAMILIES.get(model.config.model_type)
    names = family.expert_names if family else None
    block = _BLOCK.fullmatch(name)
    if names is None or block is None:
        yield name, StoredRange(name, 0, shape)
        return
    prefix, rest = f"{block[1]}{names.block}.", block[2]
    matrices = _matrices(names, rest)
    if not matrices:
        yield prefix + rest, StoredRange(name, 0, shape)
        return
    experts, rows, width = shape
    height = rows // len(matrices)
    for expert in range(experts):
        for at, matrix in enumerate(matrices):
            first = (expert * rows + at * height) * width
            yield f"{prefix}experts.{expert}.{matrix}.weight", StoredRange(name, first, (height, width))


def _matrices(names: ExpertNames, tensor: str) -> tuple[str, ...]:
    """Return what one expert has in a fused tensor of its block, in its order; () for any other tensor."""
    return {"experts.gate_up_proj": (names.gate, names.up), "experts.down_proj": (names.down,)}.get(tensor, ())
