"""Tensors that a device is still computing, for another thread.

A device works through a stream of what it is given, and each thread has a current one. Another thread that reads a
tensor at once reads what the memory held before: it has to wait for the event behind the tensor's computation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Taken: TypeAlias = AbstractContextManager[Sequence[Tensor]]
"""To be entered by the thread that was given it: yields the tensors, whole. What it computes of them has to be on the
host by the end of the block."""


class Streams(Protocol):
    """How a device's threads hand tensors to each other."""

    def hand_over(self, tensors: Sequence[Tensor]) -> Taken:
        """Offer tensors of the current stream to one other thread; the caller keeps no reference to them."""


class OneAfterAnother:
    """The `Streams` of a CPU, where a tensor is whole as soon as there is one."""

    def hand_over(self, tensors: Sequence[Tensor]) -> Taken:
        return contextlib.nullcontext(tensors)


class CudaStreams:
    """The `Streams` of a CUDA device, with a stream of its own for the thread that takes tensors over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def hand_over(self, tensors: Sequence[Tensor]) -> Taken:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        return self._take(tensors, ready)

    @contextlib.contextmanager
    def _take(self, tensors: Sequence[Tensor], ready: torch.cuda.Event) -> Iterator[Sequence[Tensor]]:
        with torch.cuda.stream(self._own):
            self._own.wait_event(ready)
            for tensor in tensors:
                tensor.record_stream(self._own)  # else their memory is used again as soon as they are forgotten
            yield tensors


def streams_of(device: torch.device) -> Streams:
    """Return the streams of `device`."""
    return CudaStreams(device) if device.type == "cuda" else OneAfterAnother()
