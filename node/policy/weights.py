"""Weights of a model's folder by the headers of its safetensors files: names, dtypes, shapes, and whether it is whole.

Nothing is unpickled, and no weight is read but by `same_numbers`. Every header meets a limit before it is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from node.policy.errors import MalformedPolicy

CONFIG: Final = "config.json"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MAX_CONFIG_BYTES: Final = 64 * 1024
MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the safetensors format; mostly needed for tokenizer.json (tens of MB for large vocabularies)."""
MAX_INDEX_BYTES: Final = 64 * 1024 * 1024
MAX_SHARDS: Final = 4096
ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of a number, by safetensors' name of the dtype: those that a policy may have."""
AGAIN: Final = "copy or download it again"

_PIECE_BYTES: Final = 2**20
_OTHER_CONFIG: Final = f"take the {CONFIG} of these weights"
_EXPORTED: Final = "export the model again with save_pretrained"

_Size = Annotated[int, Meta(ge=0, le=2**40)]
_ShardName = Annotated[str, Meta(pattern=r"^[^/\\\x00]{1,200}\.safetensors\Z")]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=8)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, _ShardName]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file's header declares it; `start` is the offset of its first byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


def same_numbers(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare two stored tensors byte by byte, a piece of each in memory at a time."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left = one.count * ITEM_BYTES[one.dtype]
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        while left > 0:
            piece = first.read(min(left, _PIECE_BYTES))
            if not piece or piece != second.read(len(piece)):
                return False
            left -= len(piece)
    return True


def read_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of `folder` by name; raises MalformedPolicy (`bad_weights`), whose message names the file."""
    if (folder / SINGLE).is_file():
        return read_shard(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise _bad(folder, f"has neither {SINGLE} nor {INDEX}", advice=_advice_without_weights(folder))
    weight_map = _read_index(folder / INDEX)
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        raise _bad(folder / INDEX, f"names {len(shards)} files, more than {MAX_SHARDS}", advice=_EXPORTED)
    for stray in sorted({path.name for path in folder.glob("model-*-of-*.safetensors")} - set(shards)):
        raise _bad(folder / stray, f"is not named in {INDEX}", advice=f"remove it, or bring the {INDEX} of these files")
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        named = {name for name, file in weight_map.items() if file == shard}
        found |= _read_indexed_shard(folder / shard, named)
    return found


def _read_indexed_shard(path: Path, named: set[str]) -> dict[str, StoredTensor]:
    """Read a shard that must hold exactly the tensors `named` by the index."""
    if not path.is_file():
        raise _bad(path, f"is missing, though {INDEX} names it", advice="copy or download it into the folder")
    found = read_shard(path)
    for name in sorted(found.keys() ^ named):
        fault = "lacks tensor {!r}, though {} places it there" if name in named else "has tensor {!r}, unlike {}"
        raise _bad(path, fault.format(name[:200], INDEX), advice=f"{AGAIN}, together with {INDEX}")
    return found


def _read_index(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise _bad(path, f"has more than {MAX_INDEX_BYTES} bytes", advice=_EXPORTED)
    try:
        weight_map: dict[str, str] = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(path, f"is not an index of weights ({error})", advice=AGAIN) from error
    if not weight_map:
        raise _bad(path, "names no tensor", advice=AGAIN)
    return weight_map


def read_shard(path: Path) -> dict[str, StoredTensor]:
    """Read one file's header, and compare what it declares with the file's length."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise _bad(path, "is not a safetensors file", advice=AGAIN)
        if length + 8 > size:
            raise _bad(path, f"is cut off in its header, after {size} bytes", advice=AGAIN)
        raw = file.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(path, f"is not a safetensors file ({error})", advice=AGAIN) from error
    _check_layout(path, entries, data_bytes=size - 8 - length)
    return {
        name: StoredTensor(path, entry.dtype, entry.shape, start=8 + length + entry.data_offsets[0])
        for name, entry in entries.items()
    }


def _check_layout(path: Path, entries: dict[str, _Entry], *, data_bytes: int) -> None:
    """Require tensors that lie one after the other, are as long as their shapes say, and fill the file."""
    for name, entry in entries.items():
        if entry.dtype not in ITEM_BYTES:
            raise _bad(
                path,
                f"has tensor {name[:200]!r} as {entry.dtype[:30]}, where a policy has one of {', '.join(ITEM_BYTES)}",
                advice="bring the weights that are not quantised",
            )
        begin, end = entry.data_offsets
        if end - begin != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
            raise _bad(path, f"gives tensor {name[:200]!r} another length than its shape has", advice=AGAIN)
    spans = [(0, 0), *sorted(entry.data_offsets for entry in entries.values())]
    if any(begin != before for (_, before), (begin, _) in pairwise(spans)):
        raise _bad(path, "has tensors that overlap, or gaps between them", advice=AGAIN)
    missing = spans[-1][1] - data_bytes
    if missing > 0:
        raise _bad(path, f"is cut off: {missing} bytes of its tensors are missing", advice=AGAIN)
    if missing < 0:
        raise _bad(path, f"has {-missing} bytes after its last tensor", advice=AGAIN)


def _advice_without_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return "convert the weights to safetensors, since pickled ones are never loaded"
    return "copy or download the model's safetensors files into the folder"


def check_tensors(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    *,
    family: str,
    shapes: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
) -> None:
    """Compare the stored tensors with a model's `shapes`; `aliases` are further names of some of these.

    A shared one may be stored under each of its names. Raises MalformedPolicy (`wrong_tensors`).
    """
    expected = {**shapes, **{name: shapes[known] for name, known in aliases.items()}}
    for name in sorted(shapes.keys() - tensors.keys()):
        raise _wrong(folder, f"lacks tensor {name!r} of a {family} model", advice="bring all of its weights")
    for name, stored in sorted(tensors.items()):
        if name not in expected and _is_derived(name):
            continue
        fault = f"has tensor {name[:200]!r}"
        if name not in expected:
            raise _wrong(stored.file, f"{fault}, which no {family} model of this {CONFIG} has", advice=_OTHER_CONFIG)
        if stored.shape != expected[name]:
            fault += f" of shape {list(stored.shape)}, where {CONFIG} says {list(expected[name])}"
            raise _wrong(stored.file, fault, advice=_OTHER_CONFIG)
    _check_shared(folder, aliases, tensors)


def _check_shared(folder: Path, aliases: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse two different tensors where the model has one: transformers would untie them, and no reader does."""
    for name, known in aliases.items():
        if name in tensors and not same_numbers(tensors[known], tensors[name]):
            fault = f"ties {name!r} to {known!r}, and the weights have two different ones"
            raise _wrong(folder / CONFIG, fault, advice="set tie_word_embeddings to false")


def _is_derived(name: str) -> bool:
    """Tell whether a tensor follows from the configuration; early Llama checkpoints have rotary frequencies."""
    return name.endswith(".rotary_emb.inv_freq")


def _bad(path: Path, fault: str, *, advice: str) -> MalformedPolicy:
    return MalformedPolicy(f"{path} {fault}: {advice}", code="bad_weights")


def _wrong(path: Path, fault: str, *, advice: str) -> MalformedPolicy:
    return MalformedPolicy(f"{path} {fault}: {advice}", code="wrong_tensors")
