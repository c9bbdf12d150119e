"""Checkpoints: a killed trainer resumes at the same step, bit for bit, with any number of processes.

A checkpoint is a folder that gets its name when it is complete, so no crash leaves half of one:

    checkpoint-00000012/
        shard-*.safetensors    each process's parts, as written by torch.distributed.checkpoint, of
                                 model/<name>               each parameter and persistent buffer; shared weights once
                                 optimizer/<slot>/<name>    each tensor kept for that parameter
        checkpoint.json        "format", the TrainerState, and each file's size

The optimizer's settings are the run's and not stored. The files are the operator's own, so they are checked for damage
and for belonging to this model, not for malice. The newest checkpoint is never skipped for an older one: later versions
are published, and training them again would contradict the log.
"""

from __future__ import annotations

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
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel

from coordinator.errors import CoordinatorError
from coordinator.training.optimizers import Optimizers
from coordinator.training.world import SINGLE_PROCESS, World

FORMAT = "checkpoint/2"
INDEX = "checkpoint.json"
_NAME = re.compile(r"checkpoint-(\d{8,})")
_MODEL, _OPTIMIZER = "model/", "optimizer/"

log = logging.getLogger(__name__)


class CheckpointError(CoordinatorError):
    """A checkpoint is damaged, or of another model; model and optimizer are unchanged."""

    code = "bad_checkpoint"


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Finished steps, and the trainer's own counters."""

    step: int
    counters: dict[str, int | str] = {}


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    state: TrainerState
    files: dict[str, int]
    tensors: dict[str, list[int]]


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
    try:
        with _typed_errors(partial, world):
            save(
                tensors,
                storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
                no_dist=world.mesh is None,
            )
        if world.is_first:
            _finalise(partial, path, state, tensors)
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old)
    finally:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)  # frees space on a full disk
    return path


def _finalise(partial: Path, path: Path, state: TrainerState, tensors: Mapping[str, Tensor]) -> None:
    """Sync the files and rename the folder to its final name."""
    files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    for name in files:
        _sync(partial / name)
    index = _Index(FORMAT, state, files, {name: list(tensor.shape) for name, tensor in tensors.items()})
    (partial / INDEX).write_bytes(msgspec.json.encode(index))
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

    Every process of `world` must call it. Raises CheckpointError, changing nothing, if the checkpoint is incomplete or
    of another model; after a read error both are unusable.
    """
    index = _read_index(path)
    if any(name.startswith(_OPTIMIZER) for name in index.tensors) and not optimizer.has_state:
        _initialise_state(optimizer)
    tensors = _tensors(model, optimizer)
    if index.tensors != {name: list(tensor.shape) for name, tensor in tensors.items()}:
        raise CheckpointError(f"{path} is a checkpoint of another model or optimizer")
    try:
        with _typed_errors(path, world):
            load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=world.mesh is None)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return index.state


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


def _read_index(path: Path) -> _Index:
    try:
        index = msgspec.json.decode((path / INDEX).read_bytes(), type=_Index)
        sizes = {name: (path / name).stat().st_size for name in index.files}
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if index.format != FORMAT:
        raise CheckpointError(f"{path} is not a {FORMAT} folder")
    if sizes != index.files:
        raise CheckpointError(f"{path} is damaged: its file sizes do not match its index")
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


@contextmanager
def _typed_errors(path: Path, world: World) -> Iterator[None]:
    """Raise OSError or CheckpointError for the causes torch wraps in a BaseException."""
    with warnings.catch_warnings():
        if world.mesh is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            faults = [cause for cause in causes if isinstance(cause, OSError)]
            if faults:
                raise faults[0] from error
            if any(isinstance(cause, SafetensorError) for cause in causes):
                raise OSError(f"{path}: {causes[0]}") from error  # disk errors of its Rust part
            raise CheckpointError(f"{path}: {causes[0]}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
