"""Checkpoints: a killed trainer resumes at the same step, with the same bits.

One safetensors file holds all of it, so that no crash leaves half a checkpoint:

    model/<name>               each parameter and persistent buffer; shared weights once
    optimizer/<slot>/<name>    each tensor the optimizer keeps for that parameter (exp_avg, exp_avg_sq, step)
    __metadata__               "veriswarm": "checkpoint/1", "state": the TrainerState as JSON

The optimizer's settings are not here: they are the run's. A file is the operator's own, so it is checked for
damage and for belonging to this model, not for malice. The newest checkpoint is never passed over for an
older one: the versions after it are published, and training them anew would contradict the log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from coordinator.errors import CoordinatorError

FORMAT = "checkpoint/1"
_NAME = re.compile(r"checkpoint-(\d{8,})\.safetensors")
_MODEL, _OPTIMIZER = "model/", "optimizer/"


class CheckpointError(CoordinatorError):
    """A checkpoint is damaged, or of another model; the model and the optimizer are as they were."""

    code = "bad_checkpoint"


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps finished, and whatever else the trainer must find again; names are the trainer's own."""

    step: int
    counters: dict[str, int | str] = {}


def save_checkpoint(
    folder: Path, *, model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: TrainerState, keep: int
) -> Path:
    """Write the checkpoint of `state.step`, then delete all but the newest `keep`. When it returns, it is on disk.

    Raises OSError, and leaves then what was there before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"checkpoint-{state.step:08d}.safetensors"
    partial = folder / ".checkpoint.partial"
    tensors = {_MODEL + name: tensor for name, tensor in _weights(model).items()} | _moments(model, optimizer)
    metadata = {"veriswarm": FORMAT, "state": msgspec.json.encode(state).decode()}
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)
        _sync(partial)
        partial.replace(path)
    except SafetensorError as error:  # how its Rust part says what the disk said
        raise OSError(f"{partial} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)  # on a full disk, room for others
    _sync(folder)
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def load_checkpoint(path: Path, *, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Put the checkpoint's bits into `model` and `optimizer`; raise CheckpointError and change nothing otherwise."""
    tensors, state = _read(path)
    weights = _weights(model)
    stored = {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items() if name.startswith(_MODEL)}
    if _shapes(stored) != _shapes(weights):
        raise CheckpointError(f"{path} is a checkpoint of another model")
    moments = _optimizer_state(path, tensors, model, optimizer)
    optimizer.load_state_dict(moments)
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(stored[name])
    return state


def _read(path: Path) -> tuple[dict[str, Tensor], TrainerState]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("veriswarm") != FORMAT:
                raise CheckpointError(f"{path} is not a {FORMAT} file")
            state = msgspec.json.decode(metadata.get("state", ""), type=TrainerState)
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118  (not a mapping)
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def _moments(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{_OPTIMIZER}{slot}/{name}": tensor
        for name, parameter in model.named_parameters()
        for slot, tensor in optimizer.state.get(parameter, {}).items()
    }


def _optimizer_state(
    path: Path, tensors: Mapping[str, Tensor], model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> dict[str, object]:
    """What `optimizer.load_state_dict` takes: states by the parameter's place in the parameter groups."""
    places: dict[Tensor, int] = {}
    for group in optimizer.param_groups:
        places |= {parameter: len(places) + place for place, parameter in enumerate(group["params"])}
    parameters = dict(model.named_parameters())
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if not key.startswith(_OPTIMIZER):
            continue
        slot, _, name = key.removeprefix(_OPTIMIZER).partition("/")
        parameter = parameters.get(name)
        if parameter is None or parameter not in places or tensor.shape not in (parameter.shape, torch.Size([])):
            raise CheckpointError(f"{path} holds {key}, which this model's optimizer does not")
        state.setdefault(places[parameter], {})[slot] = tensor
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
