"""Memory that is used up: how torch says so on each device, and how what it keeps for later is given back."""

from __future__ import annotations

import errno
import gc
import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")


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
    """Give back what nothing refers to any more; not for a block that handles an error, whose frames still refer."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
