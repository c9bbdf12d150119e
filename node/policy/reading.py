"""Policy files whose weights are read when they are needed, tensor by tensor."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from node.policy.config import DTYPES
from node.policy.errors import UnreadablePolicy
from node.policy.file import Blueprint, Policy, inspect_policy, load_policy, read_blueprint
from node.policy.header import stored_tensors
from node.policy.streaming import SeenChunks
from node.policy.weights import ITEM_BYTES

PIECE_BYTES: Final = 4 * 2**20
KNOWN_FILES: Final = 32
WITHOUT_LINKS: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})
"""What a file system says that has no hard links, or none from there to here."""

_Identity = tuple[int, int, int, int]
"""Device, inode, size and time of the last change: another name for a file shares them, another file has others."""


@dataclass(slots=True)
class _KnownFile:
    """A file whose header is faultless; `is_finite`: so is every number."""

    blueprint: Blueprint
    is_finite: bool = False
    scanning: threading.Lock = field(default_factory=threading.Lock)


_known: OrderedDict[_Identity, _KnownFile] = OrderedDict()
_reading_headers = threading.Lock()


def blueprint_of(path: Path) -> Blueprint:
    """Read and validate all but the numbers, once for each of the last KNOWN_FILES; raises as `read_blueprint`."""
    return _known_file(path).blueprint


def inspect_once(path: Path, *, seen: SeenChunks | None = None) -> Blueprint:
    """Validate `path` as `inspect_policy` does, unless this process has found this very file faultless before.

    Every number of a file that was not `seen` is read for that, which takes minutes for a large one.
    """
    known = _known_file(path)
    with known.scanning:
        if not known.is_finite:
            inspect_policy(path, seen=seen)
            known.is_finite = True
    return known.blueprint


def load_once(path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Policy:
    """Load as `load_policy`, which looks at every number: `inspect_once` of the same file need not any more."""
    known = _known_file(path)
    policy = load_policy(path, dtype=dtype, device=device)
    known.is_finite = True
    return policy


def _known_file(path: Path) -> _KnownFile:
    try:
        found = path.stat()
    except OSError as error:
        raise UnreadablePolicy(f"cannot read {path}: {error}") from error
    identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    with _reading_headers:
        if identity not in _known:
            _known[identity] = _KnownFile(read_blueprint(path))
        _known.move_to_end(identity)
        while len(_known) > KNOWN_FILES:
            _known.popitem(last=False)
        return _known[identity]


@contextlib.contextmanager
def held_file(path: Path, folder: Path) -> Iterator[Path]:
    """Yield a name in `folder` that the file has as long as the block takes, whoever deletes `path` meanwhile.

    Where there are no hard links it is `path` itself. Raises UnreadablePolicy.
    """
    link = held = folder / f"{path.name}-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.link(path, link)
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise UnreadablePolicy(f"cannot read {path}: {error}") from error
        held = path
    try:
        yield held
    finally:
        link.unlink(missing_ok=True)


class OpenPolicy:
    """A validated policy file, whose weights are read to `device`; open, and so readable, while this is in use.

    Raises as `inspect_policy`.
    """

    def __init__(self, path: Path, *, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UnreadablePolicy(f"cannot read {path}: {error}") from error
        weakref.finalize(self, os.close, self._file)
        self.blueprint = inspect_once(self.path)
        self._stored = stored_tensors(self.path)

    @property
    def path(self) -> Path:
        """A name that the open file has, even after the one it was opened by is deleted."""
        return Path(f"/proc/self/fd/{self._file}")

    def read(self, parts: Mapping[str, slice], *, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Read a tensor [shape], cast to `dtype`, of whose flat numbers each part, by its name in the file, has some.

        A piece of the file is in memory at a time: it is read and not mapped, since mapped pages would count as this
        process's memory. Raises UnreadablePolicy.
        """
        weight = torch.empty(*shape, dtype=dtype, device=self.device)
        for name, numbers in parts.items():
            self._read_into(weight.view(-1)[numbers], name)
        return weight

    def _read_into(self, flat: Tensor, name: str) -> None:
        stored = self._stored[name]
        at, item = 0, ITEM_BYTES[stored.dtype]
        buffer = torch.empty(min(stored.count * item, PIECE_BYTES), dtype=torch.uint8)
        while at < stored.count:
            piece = buffer[: (stored.count - at) * item]
            self._fill(piece, stored.start + at * item)
            numbers = piece.view(getattr(torch, DTYPES[stored.dtype]))
            flat[at : at + len(numbers)].copy_(numbers)
            at += len(numbers)

    def read_rows(self, name: str, rows: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Read these rows of a tensor as [rows, ...], cast to `dtype`.

        Raises UnreadablePolicy, and IndexError for a row that the tensor has not.
        """
        stored = self._stored[name]
        if rows and not 0 <= min(rows) <= max(rows) < stored.shape[0]:
            raise IndexError(f"{name} has {stored.shape[0]} rows")
        found = torch.empty((len(rows), *stored.shape[1:]), dtype=dtype)
        row_bytes = stored.count // stored.shape[0] * ITEM_BYTES[stored.dtype]
        buffer = torch.empty(row_bytes, dtype=torch.uint8)
        for at, row in enumerate(rows):
            self._fill(buffer, stored.start + row * row_bytes)
            found[at].view(-1).copy_(buffer.view(getattr(torch, DTYPES[stored.dtype])))
        return found.to(self.device)

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
