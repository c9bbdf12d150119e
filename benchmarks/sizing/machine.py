"""What this machine can do at most: bytes of memory and disk, and operations of matrix products, per second."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

COPY_BYTES = 256 * 2**20
DISK_BYTES = 512 * 2**20
ROUNDS = 5
SHAPES = ((512, 1024, 3072), (512, 3072, 1024), (2048, 2048, 2048))
"""Rows, inputs and outputs of products: two of the policy's own over a row of the trainer's, and a square one."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second: of memory, read and written alike, and of a file, written durably and read anew."""

    memory: float
    disk_write: float
    disk_read: float


def bandwidth(folder: Path) -> Bandwidth:
    """Measure memory, and the disk of `folder`."""
    return Bandwidth(_memory(), *_disk(folder / "bandwidth.bin"))


def matmul_rate(dtype: torch.dtype) -> float:
    """Return the operations per second of the fastest of SHAPES, each the median of ROUNDS, with torch's threads.

    In float32 where that is faster, as on a CPU without instructions for 16 bits: converting is next to nothing.
    """
    return max(_product_rate(shape, each) for shape in SHAPES for each in {dtype, torch.float32})


def _memory() -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * COPY_BYTES / _median_seconds(lambda: target.copy_(source))


def _disk(path: Path) -> tuple[float, float]:
    data = os.urandom(2**20)
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(DISK_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written = time.perf_counter() - started
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            while file.read(len(data)):
                pass
            read = time.perf_counter() - started
    finally:
        path.unlink(missing_ok=True)
    return DISK_BYTES / written, DISK_BYTES / read


def _product_rate(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    rows, inputs, outputs = shape
    left, right = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    return 2 * rows * inputs * outputs / _median_seconds(lambda: torch.nn.functional.linear(left, right))


def _median_seconds(call: Callable[[], object]) -> float:
    call()
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
