"""The processes that train one policy together: ranks, sharding and collectives.

A single process needs no torch.distributed. Several are started by `torchrun`, which assigns the ranks. Parameters,
gradients and optimizer state are sharded by FSDP2 (arXiv 2304.11277; torch.distributed.fsdp.fully_shard), but for the
embedding and the head (`coordinator.training.vocabulary`), over NCCL on GPUs and gloo on CPUs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from coordinator.training.vocabulary import rows_of_rank, share_vocabulary
from node.policy.config import ATTENTION
from node.policy.layout import StoredRange
from node.policy.memory import map_large_blocks

T = TypeVar("T")
_COLLECTIVE_TIMEOUT = timedelta(days=365)
"""Processes may wait for work indefinitely; a dead one is noticed by its closed connection."""


@dataclass(frozen=True, slots=True)
class World:
    """`size` processes, of which this is number `rank`; `mesh` is None if there is only one.

    `reports` is a group of its own over gloo: what a thread exchanges there never meets a collective of the training.
    `gathered_in` is the dtype in which layers are gathered, None for their weights' own.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    reports: dist.ProcessGroup | None = None
    gathered_in: torch.dtype | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that talks to the rest of the run."""
        return self.rank == 0

    def shard(self, model: PreTrainedModel) -> None:
        """Share out the parameters of a model, on the meta device still, so that no process has to hold them all.

        Gradients are summed over the processes.
        """
        if self.mesh is None:
            return
        vocabulary = share_vocabulary(model, self.mesh)
        for layer in _layers(model):
            fully_shard(layer, mesh=self.mesh, mp_policy=self._precision(model))
        fully_shard(model, mesh=self.mesh, ignored_params=vocabulary)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum

    def _precision(self, model: PreTrainedModel) -> MixedPrecisionPolicy:
        """Gather layers in 16 bits where their matrices are multiplied in 16 bits, and reduce gradients in float32.

        What autocast would make of a gathered matrix is then what FSDP gathers, and drops with the layer; a copy of
        autocast's own is kept until the backward pass, whole in every process. Norms are rounded as well, which
        autocast leaves alone. Activations stay as autocast has them. Not for recurrent families, whose decays are
        parameters that 16 bits are too few for.
        """
        if self.gathered_in is None or model.config.model_type not in ATTENTION:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(self.gathered_in, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def own_part(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Return this process's consecutive numbers of a tensor, flat and in place, and the index of the first."""
        whole = tensor.detach()
        if not isinstance(whole, DTensor):
            return whole.view(-1), 0
        row, _ = rows_of_rank(self.rank, self.size, len(whole))
        return whole.to_local().view(-1), row * math.prod(whole.shape[1:])

    def gather_parts(self, tensor: Tensor, stored: StoredRange, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the numbers of a tensor that `stored` names, in `dtype`: flat parts, each of which one process has.

        A collective that every process must exhaust. Unlike `full_tensor`, none ever holds the whole tensor.
        """
        whole = tensor.detach()
        if not isinstance(whole, DTensor):
            yield whole.reshape(-1)[stored.numbers]
            return
        width = math.prod(whole.shape[1:])
        for rank in range(self.size):
            first, rows = rows_of_rank(rank, self.size, len(whole))
            begin = max(stored.first - first * width, 0)
            end = min(stored.numbers.stop - first * width, rows * width)
            if begin >= end:
                continue
            own = rank == self.rank
            part = whole.to_local().view(-1)[begin:end].to(dtype) if own else self._empty(end - begin, dtype)
            dist.broadcast(part, src=rank)
            yield part

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """Take the maximum of a tensor over all processes."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def broadcast(self, data: bytes | None) -> bytes:
        """Broadcast `data` from the first process; the others pass None and receive it."""
        if self.size == 1:
            return data or b""
        length = torch.tensor([len(data or b"")], device=self.device)
        dist.broadcast(length, src=0)
        if self.is_first:
            content = torch.frombuffer(bytearray(data or b""), dtype=torch.uint8).to(self.device)
        else:
            content = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if content.numel():
            dist.broadcast(content, src=0)
        return content.cpu().numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Return every process's `data`, by rank; may be called in a thread, by one at a time."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.reports)
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(found, padded, group=self.reports)
        return [one[: int(length)].numpy().tobytes() for one, length in zip(found, lengths, strict=True)]

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return `work` for another thread: on a GPU on a stream of its own, after what was launched until now.

        On the default stream its copies would wait for the broadcast in which this process listens for commands, and
        the command for them.
        """
        if self.device.type != "cuda":
            return work
        launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record()

        def on_own_stream() -> T:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream.wait_event(launched)
            with torch.cuda.stream(stream):
                return work()

        return on_own_stream

    def _all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        reduced = values.to(self.device)
        dist.all_reduce(reduced, op=operation)
        return reduced.cpu()


SINGLE_PROCESS = World()


def free_gathered(model: PreTrainedModel) -> None:
    """Free the parameters outside the layers, which FSDP keeps whole after a forward pass without a backward pass."""
    if isinstance(model, FSDPModule):
        model.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a possibly sharded tensor; a collective that every process must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def open_world(*, device: str, gathered_in: torch.dtype | None = None) -> Iterator[World]:
    """Join the world made by `torchrun`, or that of this process alone; `device` is "cpu" or "cuda"."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else torch.device("cpu")
    if size == 1:
        yield World(device=local)
        return
    if device == "cuda":
        torch.cuda.set_device(local)
    else:
        map_large_blocks()  # of each gathered layer, which comes and goes
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_COLLECTIVE_TIMEOUT)
    try:
        reports = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
        yield World(dist.get_rank(), size, local, init_device_mesh(device, (size,)), reports, gathered_in)
    finally:
        dist.destroy_process_group()


def _layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The decoder's layers: each is gathered, used and dropped as one."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module
