"""Memory that is used up: how torch says so on each device, and how what it keeps for later is given back.

glibc's malloc is configured here alone; with another allocator, that does nothing.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
from collections.abc import Callable
from typing import Final, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")
_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3
"""mallopt(3)'s names of the most heaps, and of the size from which a block is mapped."""
HEAPS: Final = 2
"""Of a process that holds a policy: one for each of few threads that allocate at the same time."""
MAPPED_BYTES: Final = 2**20
"""Of a process that gathers layers; glibc's own threshold adapts, up to 32 MiB."""


def share_heaps() -> None:
    """Have this process's threads share `HEAPS` heaps; to be called before they start.

    Otherwise each thread has a heap of its own, up to eight for each core, and keeps what it freed there: threads that
    fetch, check and load policies one after another held what none of them used any more.
    """
    _mallopt(_M_ARENA_MAX, HEAPS)


def map_large_blocks() -> None:
    """Have each block of `MAPPED_BYTES` or more mapped by itself, so that it goes back when it is freed.

    Otherwise tensors of up to 32 MiB come from heaps, one of each thread, which keep the holes: four processes' steps
    took as much for those of gathered layers as for all that a step itself needs beside its state.
    """
    _mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def _mallopt(name: int, value: int) -> None:
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(name, value)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is used up; torch has a class for that on a GPU alone."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and os.strerror(errno.ENOMEM) in str(error)
    )


def unless_out_of_memory(load: Callable[[], T]) -> T | None:
    """Return what `load` returns; None, with nothing left of what it had made, where memory is used up.

    A value and no exception, which would hold the frames of `load`, and so weights, in every thread that it crosses.
    """
    try:
        return load()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        log.info("memory is used up: %s", str(error))
    free_memory()
    return None


def free_memory() -> None:
    """Give back what nothing refers to any more; not for a block that handles an error, whose frames still refer.

    On the CPU glibc keeps freed weights in its heaps, of which this returns whole pages.
    """
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
