"""Find the tensors in a file of torch.save, without torch.load: a zip whose records are stored, not compressed.

`data.pkl` says which numbers of which record each tensor has (`coordinator.importing.state_pickle`); the records
`data/0`, `data/1`, ... are numbers. Nothing is unpacked: tensors are read where they lie.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final

from coordinator.importing.errors import UnreadableCheckpoint
from coordinator.importing.state_pickle import MAX_PICKLE_BYTES, MAX_TENSORS, PickledTensor, Storage, read_state
from node.policy.weights import ITEM_BYTES, StoredTensor

MAX_DIRECTORY_BYTES: Final = 2**22
MAX_RECORDS: Final = MAX_TENSORS + 16

_PICKLE: Final = "data.pkl"
_END: Final = struct.Struct("<4s4H2LH")
_END_64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64: Final = struct.Struct("<4sLQL")
_LOCAL: Final = struct.Struct("<4s5H3L2H")


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of `path` by name, whose numbers lie in the file one after the other, and nowhere twice.

    Reads the whole file once, for its checksums. Raises UnreadableCheckpoint, and OSError.
    """
    try:
        with path.open("rb") as file:
            records, pickled = _read_records(file)
        tensors = read_state(pickled)
        found = {name: _stored(path, name, tensor, records) for name, tensor in tensors.items()}
        _require_apart(
            "tensors", [(each.start, each.start + each.count * ITEM_BYTES[each.dtype]) for each in found.values()]
        )
        _check_sums(path)
        return found
    except UnreadableCheckpoint as error:
        raise UnreadableCheckpoint(f"{path}: {error}") from error
    except (zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        raise UnreadableCheckpoint(f"{path}: it is a damaged zip ({error})") from error


def _read_records(file: BinaryIO) -> tuple[dict[str, tuple[int, int]], bytes]:
    """Return where the records of storages lie, as (first byte, length) by key, and the pickle."""
    directory = _check_directory(file)
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        spans = [(info.header_offset, _data_start(file, info) + info.file_size) for info in infos.values()]
        _require_apart("records", [*spans, (directory, directory)])
        folders = [name.removesuffix(_PICKLE) for name in infos if re.fullmatch(rf"[^/]+/{re.escape(_PICKLE)}", name)]
        if len(folders) != 1 or len(infos) != len(archive.infolist()):
            raise UnreadableCheckpoint("it is a zip, but none that torch.save wrote")
        (folder,) = folders
        order = infos.get(f"{folder}byteorder")
        if order is not None and _read_small(archive, order, most=16) != b"little":
            raise UnreadableCheckpoint("its numbers are not little-endian")
        pickled = _read_small(archive, infos[folder + _PICKLE], most=MAX_PICKLE_BYTES)
        prefix = f"{folder}data/"
        return {
            name.removeprefix(prefix): (_data_start(file, info), info.file_size)
            for name, info in infos.items()
            if name.startswith(prefix)
        }, pickled


def _check_directory(file: BinaryIO) -> int:
    """Return where the zip's directory begins, which zipfile reads as a whole; check its size before."""
    size = os.fstat(file.fileno()).st_size
    tail_bytes = min(size, _END.size + _LOCATOR_64.size + _END_64.size)
    file.seek(size - tail_bytes)
    tail = file.read(tail_bytes)
    if len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\x05\x06":
        raise UnreadableCheckpoint(
            "it is no zip, or is cut off: torch.save writes one since PyTorch 1.6; load an older file there, and save "
            "it again"
        )
    *_, count, length, start, comment = _END.unpack(tail[-_END.size :])
    end = size - _END.size
    locator = tail[-_END.size - _LOCATOR_64.size : -_END.size]
    if locator[:4] == b"PK\x06\x07":
        end -= _LOCATOR_64.size + _END_64.size
        signature, *_, count, length, start = _END_64.unpack(tail[: _END_64.size])
        # Other readers follow the locator: it must lead to the same record.
        if signature != b"PK\x06\x06" or _LOCATOR_64.unpack(locator)[2] != end:
            raise UnreadableCheckpoint("it is a damaged zip (two ends)")
    if count > MAX_RECORDS or length > MAX_DIRECTORY_BYTES:
        raise UnreadableCheckpoint(
            f"its zip has {count} records, listed in {length} bytes: at most {MAX_RECORDS} and {MAX_DIRECTORY_BYTES} "
            "are read"
        )
    if comment or start + length != end:
        raise UnreadableCheckpoint("it is a damaged zip (its directory is elsewhere)")
    return int(start)


def _data_start(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a record begin, which is stored as it is."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
        raise UnreadableCheckpoint(f"{info.filename[:100]!r} is compressed or encrypted, which torch.save never does")
    file.seek(info.header_offset)
    signature, *_, name_bytes, extra_bytes = _LOCAL.unpack(file.read(_LOCAL.size))
    if signature != b"PK\x03\x04" or file.read(name_bytes).decode() != info.filename:
        raise UnreadableCheckpoint(f"it is a damaged zip ({info.filename[:100]!r} is not where its directory says)")
    return int(info.header_offset + _LOCAL.size + name_bytes + extra_bytes)


def _read_small(archive: zipfile.ZipFile, info: zipfile.ZipInfo, *, most: int) -> bytes:
    if info.file_size > most:
        raise UnreadableCheckpoint(f"{info.filename[:100]!r} has {info.file_size} bytes, and at most {most} are read")
    return archive.read(info)


def _stored(path: Path, name: str, tensor: PickledTensor, records: dict[str, tuple[int, int]]) -> StoredTensor:
    storage, item = tensor.storage, ITEM_BYTES[tensor.storage.dtype]
    if storage.key not in records:
        raise UnreadableCheckpoint(f"tensor {name!r} has its numbers in {storage.key[:100]!r}, which the zip lacks")
    start, length = records[storage.key]
    if length != storage.numbers * item:
        raise UnreadableCheckpoint(_other_length(storage, length))
    count = math.prod(tensor.shape)
    if not count or tensor.offset + count > storage.numbers:
        raise UnreadableCheckpoint(f"tensor {name!r} has no numbers, or more than its storage")
    if not _is_contiguous(tensor):
        raise UnreadableCheckpoint(f"tensor {name!r} is not contiguous: save it after .contiguous()")
    return StoredTensor(path, storage.dtype, tensor.shape, start + tensor.offset * item)


def _other_length(storage: Storage, length: int) -> str:
    return (
        f"storage {storage.key[:100]!r} is to have {storage.numbers} numbers of {storage.dtype}, and has {length} bytes"
    )


def _is_contiguous(tensor: PickledTensor) -> bool:
    if len(tensor.strides) != len(tensor.shape):
        return False
    step = 1
    for width, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if width != 1 and stride != step:
            return False
        step *= width
    return True


def _check_sums(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise UnreadableCheckpoint(f"its record {damaged[:100]!r} is damaged: its checksum is another one")


def _require_apart(what: str, spans: list[tuple[int, int]]) -> None:
    """Require (start, end) spans that do not overlap: else a small file would unpack to a large one."""
    if any(end > start for (_, end), (start, _) in pairwise(sorted(spans))):
        raise UnreadableCheckpoint(f"its {what} overlap")
