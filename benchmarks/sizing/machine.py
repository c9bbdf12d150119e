"""What this machine can do at most: bytes of memory and disk, and operations of matrix products, per second.

Of a device's memory and products where one is named.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

COPY_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
DISK_BYTES = 512 * 2**20
ROUNDS = 5
SHAPES = {
    "cpu": ((512, 1024, 3072), (512, 3072, 1024), (2048, 2048, 2048)),
    "cuda": ((8192, 1024, 3072), (8192, 3072, 1024), (8192, 8192, 8192)),
}
"""Rows, inputs and outputs of products: two of the policy's own over a row of the trainer's, and a square one."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second: of memory, read and written alike, and of a file, written durably and read anew."""

    memory: float
    disk_write: float
    disk_read: float


def bandwidth(folder: Path, *, device: str = "cpu") -> Bandwidth:
    """Measure the memory of `device`, and the disk of `folder`."""
    return Bandwidth(memory_rate(device), *_disk(folder / "bandwidth.bin"))


def matmul_rate(dtype: torch.dtype, *, device: str = "cpu") -> float:
    """Return the operations per second of the fastest of SHAPES, each the median of ROUNDS, with torch's threads.

    In float32 where that is faster, as on a CPU without instructions for 16 bits: converting is next to nothing.
    """
    return max(_product_rate(shape, each, device) for shape in SHAPES[device] for each in {dtype, torch.float32})


def memory_rate(device: str) -> float:
    """Return the bytes per second of a copy within a device's memory, those read and those written."""
    size = COPY_BYTES[device]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _median_seconds(lambda: target.copy_(source), device)


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


def _product_rate(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> float:
    rows, inputs, outputs = shape
    left, right = torch.randn(rows, inputs).to(device, dtype), torch.randn(outputs, inputs).to(device, dtype)
    return 2 * rows * inputs * outputs / _median_seconds(lambda: torch.nn.functional.linear(left, right), device)


def _median_seconds(call: Callable[[], object], device: str) -> float:
    call()
    taken = []
    for _ in range(ROUNDS):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def synchronize(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
