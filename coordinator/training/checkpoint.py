"""Checkpoints: a killed trainer resumes at the same step, bit for bit, with any number of processes.

A checkpoint is a folder that gets its name when it is complete, so no crash leaves half of one:

    checkpoint-00000012/
        shard-00000.safetensors    the rows that process 0 holds (`coordinator.training.shards`) of
                                     model/<name>              each parameter and persistent buffer; shared weights
                                                               once, frozen ones not at all
                                     optimizer/<slot>/<name>   each tensor kept for that parameter
        checkpoint.json            "format", the TrainerState, each file's size, each tensor's dtype, shape and pieces,
                                   and the BLAKE3 of all this

Each process writes what it holds, in a thread while the next step computes gradients, and reads what it will hold. A
digest is of a piece in the writer's memory, and compared in the reader's: it finds a bit that was flipped anywhere
between. The optimizer's settings are the run's and not stored. The files are the operator's own, so they are checked
for damage and for belonging to this model, not for malice.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coordinator.errors import CoordinatorError
from coordinator.training.optimizers import Optimizers
from coordinator.training.shards import Piece, Rows, dtype_named, read_rows, write_rows
from coordinator.training.world import SINGLE_PROCESS, World
from shardcast.files import sync_folder
from shardcast.wire import digest

FORMAT = "checkpoint/4"
INDEX = "checkpoint.json"
_NAME = re.compile(r"checkpoint-(\d{8,})")
_MODEL, _OPTIMIZER = "model/", "optimizer/"

log = logging.getLogger(__name__)


class CheckpointError(CoordinatorError):
    """A checkpoint is of another model or release; model and optimizer are unchanged."""

    code = "bad_checkpoint"


class CheckpointDamaged(CheckpointError):
    """A checkpoint's bytes are not those that were written; model and optimizer are unusable."""

    code = "damaged_checkpoint"


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Finished steps, and the trainer's own counters."""

    step: int
    counters: dict[str, int | str] = {}


class _Format(msgspec.Struct, frozen=True):
    format: str


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor, and the pieces that its rows are in."""

    dtype: str
    shape: list[int]
    pieces: list[Piece] = []


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`files` are sizes in bytes; `checksum` is the BLAKE3 of the index without it."""

    format: str
    state: TrainerState
    files: dict[str, int]
    tensors: dict[str, _Stored]
    checksum: str = ""

    def sealed(self) -> _Index:
        """Return the index with its checksum."""
        unsealed = msgspec.structs.replace(self, checksum="")
        return msgspec.structs.replace(self, checksum=digest(msgspec.json.encode(unsealed)))


class _Failure(msgspec.Struct, frozen=True):
    """What a process raised, for the others to raise too."""

    kind: Literal["damaged", "checkpoint", "disk", "other"]
    errno: int | None
    sentence: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        match error:
            case CheckpointDamaged():
                return cls("damaged", None, str(error))
            case CheckpointError():
                return cls("checkpoint", None, str(error))
            case OSError():
                return cls("disk", error.errno, str(error))
        return cls("other", None, f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        match self.kind:
            case "damaged":
                return CheckpointDamaged(self.sentence)
            case "checkpoint":
                return CheckpointError(self.sentence)
            case "disk":
                return OSError(self.errno, self.sentence) if self.errno else OSError(self.sentence)
        return RuntimeError(self.sentence)


def save_checkpoint(
    folder: Path,
    *,
    model: PreTrainedModel,
    optimizer: Optimizers,
    state: TrainerState,
    keep: int,
    world: World = SINGLE_PROCESS,
) -> Path:
    """Write the checkpoint of `state.step` durably, then delete all but the newest `keep`; return its path.

    Every process of `world` must call it, on a shared file system. Raises OSError, in all of them alike, and then
    leaves the previous checkpoints.
    """
    return write_checkpoint(folder, held_rows(model, optimizer), state=state, keep=keep, world=world)


def held_rows(model: PreTrainedModel, optimizer: Optimizers) -> dict[str, Rows]:
    """Return this process's rows of everything a checkpoint holds, by name, without copying them."""
    return {name: Rows.of(tensor) for name, tensor in sorted(_tensors(model, optimizer).items())}


def write_checkpoint(folder: Path, rows: Mapping[str, Rows], *, state: TrainerState, keep: int, world: World) -> Path:
    """Do as `save_checkpoint`, with `rows` that nothing may change meanwhile; may be called in a thread."""
    path, partial = folder / f"checkpoint-{state.step:08d}", folder / ".checkpoint.partial"
    own = {name: one for name, one in rows.items() if world.is_first or not one.is_shared}

    def prepare() -> bytes:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed trainer
            partial.mkdir(parents=True)
        return b""

    def write() -> bytes:
        return msgspec.json.encode(write_rows(partial / f"shard-{world.rank:05d}.safetensors", own))

    def complete(reports: list[bytes]) -> bytes:
        if world.is_first:
            _complete(partial, path, state, rows, reports)
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old)
        return b""

    try:
        _everywhere(world, prepare)
        reports = _everywhere(world, write)
        _everywhere(world, lambda: complete(reports))
    finally:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)  # frees space on a full disk
    return path


def _complete(partial: Path, path: Path, state: TrainerState, rows: Mapping[str, Rows], reports: list[bytes]) -> None:
    """Write the index of what all processes have reported, and give the folder its name."""
    tensors = {name: _Stored(one.dtype, list(one.shape)) for name, one in rows.items()}
    for report in reports:
        for name, piece in msgspec.json.decode(report, type=dict[str, Piece]).items():
            tensors[name].pieces.append(piece)
    files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    index = _Index(FORMAT, state, files, tensors)
    with (partial / INDEX).open("wb") as file:
        file.write(msgspec.json.encode(index.sealed()))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    shutil.rmtree(path, ignore_errors=True)  # left by a trainer whose newest policy was not announced
    partial.rename(path)
    sync_folder(path.parent)


def _everywhere(world: World, work: Callable[[], bytes]) -> list[bytes]:
    """Do `work` in every process and return what each returned, or raise in all of them what one of them raised."""
    result = b""
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  (the others wait for a report, whatever it says)
        own = error
    failure = None if own is None else _Failure.of(own)
    said = world.gather(msgspec.json.encode((result, failure)))
    if own is not None:
        raise own
    replies = [msgspec.json.decode(each, type=tuple[bytes, _Failure | None]) for each in said]
    for _, theirs in replies:
        if theirs is not None:
            raise theirs.error()
    return [reply for reply, _ in replies]


def checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints in `folder`, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def step_of_oldest(folder: Path) -> int:
    """Return the step of the oldest complete checkpoint in `folder`, 0 without any."""
    return next((int(path.name.partition("-")[2]) for path in checkpoints(folder)), 0)


def load_checkpoint(
    path: Path, *, model: PreTrainedModel, optimizer: Optimizers, world: World = SINGLE_PROCESS
) -> TrainerState:
    """Load a checkpoint into `model` and `optimizer`, however many processes wrote it; return its state.

    Every process of `world` must call it, and raises what all others do. Raises CheckpointError, changing nothing, if
    the checkpoint is of another model or release, CheckpointDamaged, and OSError if it cannot be read now.
    """
    index = msgspec.json.decode(_everywhere(world, lambda: msgspec.json.encode(_read_index(path)))[0], type=_Index)
    if any(name.startswith(_OPTIMIZER) for name in index.tensors) and not optimizer.has_state:
        _initialise_state(optimizer)
    rows = held_rows(model, optimizer)
    stored = {name: (each.dtype, each.shape) for name, each in index.tensors.items()}
    if stored != {name: (one.dtype, list(one.shape)) for name, one in rows.items()}:
        raise CheckpointError(f"{path} is a checkpoint of another model or optimizer")

    def read() -> bytes:
        try:
            return msgspec.json.encode(
                [name for name, one in rows.items() if not read_rows(path, one, index.tensors[name].pieces)]
            )
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EIO):
                raise CheckpointDamaged(f"{path} is damaged: {error}") from error
            raise

    wrong = sorted({name for each in _everywhere(world, read) for name in msgspec.json.decode(each, type=list[str])})
    if wrong:
        raise CheckpointDamaged(f"{path} is damaged: {len(wrong)} tensors are not as written, such as {wrong[0]}")
    return index.state


def read_checkpoint(path: Path) -> tuple[TrainerState, dict[str, Tensor]]:
    """Read a checkpoint's state and its model's tensors, whole, by name; raises as `load_checkpoint`."""
    index, tensors = _read_index(path), dict[str, Tensor]()
    for name, stored in index.tensors.items():
        if name.startswith(_MODEL):
            whole = Rows.of(torch.empty(stored.shape, dtype=dtype_named(stored.dtype)))
            if not read_rows(path, whole, stored.pieces):
                raise CheckpointDamaged(f"{path} is damaged: {name} is not as written")
            tensors[name.removeprefix(_MODEL)] = whole.local
    return index.state, tensors


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is no longer one, and return its new path; raises OSError."""
    target = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(target, ignore_errors=True)
    return path.rename(target)


def _initialise_state(optimizer: Optimizers) -> None:
    """Have the optimizer create its zero state: a step without gradients changes no weight."""
    for part in optimizer.parts:
        before = [(group["lr"], group["weight_decay"]) for group in part.param_groups]
        for group in part.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        part.step()
        part.zero_grad()
        for group, (rate, decay) in zip(part.param_groups, before, strict=True):
            group["lr"], group["weight_decay"] = rate, decay


def _check_format(path: Path, data: bytes) -> None:
    """Raise CheckpointError for an index that another release wrote, which is none of this one with a flipped bit."""
    written_as = msgspec.json.decode(data, type=_Format).format
    if written_as == FORMAT:
        return
    try:
        index = msgspec.json.decode(data, type=_Index)
    except msgspec.ValidationError:
        index = None
    if index is None or index.sealed() == index:
        raise CheckpointError(
            f"{path} is a {written_as[:32]!r} folder, and this release reads {FORMAT} alone: go on with the "
            "release that wrote it"
        )


def _read_index(path: Path) -> _Index:
    try:
        data = (path / INDEX).read_bytes()
        _check_format(path, data)
        index = msgspec.json.decode(data, type=_Index)
        sizes = {name: (path / name).stat().st_size for name in index.files}
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(f"{path} is damaged: {error}") from error
    if index.sealed() != index:
        raise CheckpointDamaged(f"{path} is damaged: {INDEX} is not as written")
    if sizes != index.files:
        raise CheckpointDamaged(f"{path} is damaged: its file sizes do not match its index")
    return index


def _tensors(model: PreTrainedModel, optimizer: Optimizers) -> dict[str, Tensor]:
    """Return everything a checkpoint holds, by name; sharded tensors are this process's parts."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = {_MODEL + name: tensor.detach() for name, tensor in (trained | buffers).items()}
    return weights | {
        f"{_OPTIMIZER}{slot}/{name}": tensor
        for name, parameter in trained.items()
        for slot, tensor in optimizer.state_of(parameter).items()
    }
