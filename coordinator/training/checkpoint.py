"""Checkpoints: a killed trainer resumes at the same step, bit for bit, with any number of processes.

A checkpoint is a folder that gets its name when it is complete, so no crash leaves half of one:

    checkpoint-00000012/
        shard-*.safetensors    each process's parts, as written by torch.distributed.checkpoint, of
                                 model/<name>               each parameter and persistent buffer; shared weights once
                                 optimizer/<slot>/<name>    each tensor kept for that parameter
        checkpoint.json        "format", the TrainerState, each file's size, each tensor's shape and BLAKE3, and the
                               BLAKE3 of all this

Digests are of whole tensors in this process's memory, before they are written and after they were read: they do not
depend on the number of processes, and find a bit that was flipped anywhere between. The optimizer's settings are the
run's and not stored. The files are the operator's own, so they are checked for damage and for belonging to this model,
not for malice.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel

from coordinator.errors import CoordinatorError
from coordinator.training.optimizers import Optimizers
from coordinator.training.world import SINGLE_PROCESS, World, full_tensor
from shardcast.wire import digest

FORMAT = "checkpoint/3"
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


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tensors` are shapes, `digests` the tensors' BLAKE3, and `checksum` that of the index without it."""

    format: str
    state: TrainerState
    files: dict[str, int]
    tensors: dict[str, list[int]]
    digests: dict[str, str]
    checksum: str = ""

    def sealed(self) -> _Index:
        """Return the index with its checksum."""
        unsealed = msgspec.structs.replace(self, checksum="")
        return msgspec.structs.replace(self, checksum=digest(msgspec.json.encode(unsealed)))


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

    Every process of `world` must call it, on a shared file system. Raises OSError, and then leaves the previous
    checkpoints.
    """
    path, partial = folder / f"checkpoint-{state.step:08d}", folder / ".checkpoint.partial"
    if world.is_first:
        # Leftover of a killed trainer. No other process writes before this one has.
        shutil.rmtree(partial, ignore_errors=True)
    tensors = _tensors(model, optimizer)
    digests = _digests(tensors, world)
    try:
        with _quiet(world):
            save(
                tensors,
                storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
                no_dist=world.mesh is None,
            )
        if world.is_first:
            _finalise(partial, path, state, tensors, digests)
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old)
    except CheckpointException as error:
        raise _write_failure(partial, error) from error
    finally:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)  # frees space on a full disk
    return path


def _finalise(
    partial: Path, path: Path, state: TrainerState, tensors: Mapping[str, Tensor], digests: dict[str, str]
) -> None:
    """Sync the files and rename the folder to its final name."""
    files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    for name in files:
        _sync(partial / name)
    index = _Index(FORMAT, state, files, {name: list(tensor.shape) for name, tensor in tensors.items()}, digests)
    (partial / INDEX).write_bytes(msgspec.json.encode(index.sealed()))
    _sync(partial / INDEX)
    _sync(partial)
    shutil.rmtree(path, ignore_errors=True)  # left by a trainer whose newest policy was not announced
    partial.rename(path)
    _sync(path.parent)


def checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints in `folder`, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def load_checkpoint(
    path: Path, *, model: PreTrainedModel, optimizer: Optimizers, world: World = SINGLE_PROCESS
) -> TrainerState:
    """Load a checkpoint into `model` and `optimizer`, however many processes wrote it; return its state.

    Every process of `world` must call it, and raises what all others do. Raises CheckpointError, changing nothing, if
    the checkpoint is of another model or release, CheckpointDamaged, and OSError if it cannot be read now.
    """
    index = _read_index_everywhere(path, world)
    if any(name.startswith(_OPTIMIZER) for name in index.tensors) and not optimizer.has_state:
        _initialise_state(optimizer)
    tensors = _tensors(model, optimizer)
    if index.tensors != {name: list(tensor.shape) for name, tensor in tensors.items()}:
        raise CheckpointError(f"{path} is a checkpoint of another model or optimizer")
    try:
        with _quiet(world):
            load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=world.mesh is None)
    except CheckpointException as error:
        raise _read_failure(path, error) from error
    found = _digests(tensors, world)
    wrong = [name for name, wanted in index.digests.items() if found[name] != wanted] if world.is_first else []
    wrong = msgspec.json.decode(world.broadcast(msgspec.json.encode(wrong)), type=list[str])
    if wrong:
        raise CheckpointDamaged(f"{path} is damaged: {len(wrong)} tensors are not as written, such as {wrong[0]}")
    return index.state


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


def _read_index_everywhere(path: Path, world: World) -> _Index:
    """Read the index in the first process, so that all decide alike; raises as `load_checkpoint`."""
    failure: CheckpointError | OSError | None = None
    data = b""
    if world.is_first:
        try:
            data = msgspec.json.encode(_read_index(path))
        except (CheckpointError, OSError) as error:
            failure = error
            data = msgspec.json.encode([type(error).__name__, str(error)])
    data = world.broadcast(data)
    if failure is not None:
        raise failure
    if data.startswith(b"["):
        kind, sentence = msgspec.json.decode(data, type=tuple[str, str])
        raise next((each for each in (CheckpointDamaged, CheckpointError) if each.__name__ == kind), OSError)(sentence)
    return msgspec.json.decode(data, type=_Index)


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
    weights = {_MODEL + name: tensor.detach() for name, tensor in (dict(model.named_parameters()) | buffers).items()}
    return weights | {
        f"{_OPTIMIZER}{slot}/{name}": tensor
        for name, parameter in model.named_parameters()
        for slot, tensor in optimizer.state_of(parameter).items()
    }


def _digests(tensors: Mapping[str, Tensor], world: World) -> dict[str, str]:
    """Return each whole tensor's BLAKE3 in the first process, {} in the others; a collective, one tensor at a time."""
    found = {}
    for name in sorted(tensors):
        whole = full_tensor(tensors[name])
        if world.is_first:
            data = whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            found[name] = blake3(data.data, max_threads=blake3.AUTO).hexdigest()
    return found


@contextmanager
def _quiet(world: World) -> Iterator[None]:
    with warnings.catch_warnings():
        if world.mesh is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _unwrapped(error: CheckpointException) -> list[BaseException]:
    """Return the causes that torch wraps in a BaseException, one of each process that failed."""
    return [cause for cause, _ in error.failures.values()]


def _write_failure(path: Path, error: CheckpointException) -> OSError | CheckpointError:
    causes = _unwrapped(error)
    faults = [cause for cause in causes if isinstance(cause, OSError)]
    if faults:
        return faults[0]
    if any(isinstance(cause, SafetensorError) for cause in causes):
        return OSError(f"{path}: {causes[0]}")  # disk errors of its Rust part
    return CheckpointError(f"{path}: {causes[0]}")


def _read_failure(path: Path, error: CheckpointException) -> OSError | CheckpointDamaged:
    """Return what may pass as it is; all else is damage, since the index fits the model."""
    causes = _unwrapped(error)
    passing = [cause for cause in causes if isinstance(cause, OSError) and cause.errno not in (errno.ENOENT, errno.EIO)]
    return passing[0] if passing else CheckpointDamaged(f"{path} is damaged: {causes[0]}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
