"""The header of a policy file: its metadata, and where its tensors lie (docs/protocol.md, section 11)."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from node.policy.config import DTYPES
from node.policy.errors import MalformedPolicy, UnreadablePolicy
from node.policy.layout import EXACT, dtype_of
from node.policy.weights import ITEM_BYTES, MAX_HEADER_BYTES, StoredTensor

FORMAT = "policy/1"

_METADATA = frozenset({"format", "swarmproof", "config", "tokenizer", "tokenizer_config"})


@contextlib.contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Convert what reading `path` raises to MalformedPolicy or UnreadablePolicy."""
    try:
        yield
    except SafetensorError as error:
        raise MalformedPolicy(f"is not a safetensors file: {error}", code="not_safetensors") from error
    except OSError as error:
        raise UnreadablePolicy(f"cannot read {path}: {error}") from error


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return where a policy has its tensors; raises MalformedPolicy for a faulty header, and UnreadablePolicy."""
    return read_header(path)[1]


def read_header(path: Path) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return a policy's metadata and its tensors; raises as `stored_tensors`."""
    with reading_errors(path):
        data_start = _check_length(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if set(metadata) != _METADATA or metadata["swarmproof"] != FORMAT:
                raise MalformedPolicy(f"its metadata is not that of {FORMAT}", code="wrong_metadata")
            return metadata, _declared_tensors(file, path, data_start)


def render_header(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, *, config: str, tokenizer: str, tokenizer_config: str
) -> bytes:
    """Return what a policy file begins with."""
    metadata = {
        "config": config,
        "format": "pt",
        "tokenizer": tokenizer,
        "tokenizer_config": tokenizer_config,
        "swarmproof": FORMAT,
    }
    return render_tensors(shapes, dtype, metadata)


def render_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, metadata: Mapping[str, str]) -> bytes:
    """Return what a safetensors file begins with, whose tensors follow in the order of `shapes`.

    safetensors' own metadata order varies between calls.
    """
    stored_as = {torch_name: name for name, torch_name in DTYPES.items()}
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, shape in shapes.items():
        own = dtype_of(name, dtype)
        start, end = end, end + math.prod(shape) * own.itemsize
        entries[name] = {"dtype": stored_as[str(own)[6:]], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_length(path: Path) -> int:
    """Check the length of the header, and return the offset of the first tensor."""
    if not path.is_file():
        raise UnreadablePolicy(f"{path} is not a file")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise MalformedPolicy(
            f"its header declares {size} bytes, the limit is {MAX_HEADER_BYTES}", code="oversized_header"
        )
    return 8 + size


def _declared_tensors(file: Any, path: Path, data_start: int) -> dict[str, StoredTensor]:
    """Return the tensors that the header declares; the parser has refused gaps between them."""
    stored, start = {}, data_start
    for name in file.offset_keys():
        part = file.get_slice(name)
        stored[name] = StoredTensor(path, part.get_dtype(), tuple(part.get_shape()), start)
        start += stored[name].count * ITEM_BYTES.get(stored[name].dtype, 0)
    stored_dtype(stored)
    return stored


def stored_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """Return the dtype of a policy by its tensors; raises MalformedPolicy unless all have theirs of it."""
    dtypes = {tensor.dtype for name, tensor in stored.items() if not name.endswith(EXACT)}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        raise MalformedPolicy(
            f"tensors must have one dtype of {sorted(DTYPES)}, not {sorted(dtypes)}", code="wrong_tensors"
        )
    for name, tensor in stored.items():
        if name.endswith(EXACT) and tensor.dtype != "F32":
            raise MalformedPolicy(f"{name[:200]!r} has {tensor.dtype}, and always F32", code="wrong_tensors")
    found: torch.dtype = getattr(torch, DTYPES[dtypes.pop()])
    return found
