"""Policy files whose weights are read when they are needed, tensor by tensor."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from node.policy.config import DTYPES
from node.policy.errors import UnreadablePolicy
from node.policy.file import Blueprint, inspect_policy
from node.policy.weights import ITEM_BYTES, StoredTensor, read_shard

PIECE_BYTES: Final = 4 * 2**20
INSPECTED_FILES: Final = 32

_Identity = tuple[int, int, int, int]
"""Device, inode, size and time of the last change: another name for a file shares them, another file has others."""

_inspected: OrderedDict[_Identity, Blueprint] = OrderedDict()
_inspecting = threading.Lock()


def inspect_once(path: Path) -> Blueprint:
    """Validate `path` as `inspect_policy` does, unless this process has found this very file faultless before.

    Every number of a file is read for that, which takes minutes for a large one. The last INSPECTED_FILES are known.
    """
    try:
        identity = _identity(path.stat())
    except OSError as error:
        raise UnreadablePolicy(f"cannot read {path}: {error}") from error
    with _inspecting:
        if identity not in _inspected:
            _inspected[identity] = inspect_policy(path)
        _inspected.move_to_end(identity)
        while len(_inspected) > INSPECTED_FILES:
            _inspected.popitem(last=False)
        return _inspected[identity]


def _identity(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class OpenPolicy:
    """A validated policy file, whose weights are read to `device`; open, and so readable, while this is in use.

    Raises as `inspect_policy`.
    """

    def __init__(self, path: Path, *, device: torch.device | str = "cpu") -> None:
        self.blueprint, self.path = inspect_once(path), path
        self.device = torch.device(device)
        try:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._stored: dict[str, StoredTensor] = read_shard(path)
        except OSError as error:
            raise UnreadablePolicy(f"cannot read {path}: {error}") from error

    def read(self, name: str, *, dtype: torch.dtype) -> Tensor:
        """Read a tensor, cast to `dtype`, a piece of the file in memory at a time; raises UnreadablePolicy.

        The file is read and not mapped: mapped pages would count as this process's memory.
        """
        stored = self._stored[name]
        weight = torch.empty(stored.shape, dtype=dtype, device=self.device)
        flat, at, item = weight.view(-1), 0, ITEM_BYTES[stored.dtype]
        buffer = torch.empty(min(stored.count * item, PIECE_BYTES), dtype=torch.uint8)
        while at < stored.count:
            piece = buffer[: (stored.count - at) * item]
            self._fill(piece, stored.start + at * item)
            numbers = piece.view(getattr(torch, DTYPES[stored.dtype]))
            flat[at : at + len(numbers)].copy_(numbers)
            at += len(numbers)
        return weight

    def _fill(self, piece: Tensor, start: int) -> None:
        data, done = piece.numpy().data, 0
        while done < len(data):
            try:
                count = os.preadv(self._file, [data[done:]], start + done)
            except OSError as error:
                raise UnreadablePolicy(f"cannot read a policy's weights: {error}") from error
            if count == 0:
                raise UnreadablePolicy("a policy's file has become shorter")
            done += count
