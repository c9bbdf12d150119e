"""Memory of policies that are dropped goes back to the machine."""

from __future__ import annotations

import platform
from pathlib import Path
from threading import Thread

import pytest
import torch

from node.policy.memory import free_memory

KIB = 2**10


def resident() -> int:
    """Return this process's VmRSS in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator keeps its memory in another way")
def test_weights_that_another_thread_loaded_are_given_back() -> None:
    """A verifier of one policy kept the bytes of two: what is freed stays in the heap of the thread that made it."""
    kept: list[torch.Tensor] = []

    def load() -> None:
        weights = [torch.ones(KIB * 25) for _ in range(1500)]  # too small for a mapping of each one's own
        kept.extend(weights[::40])  # so that no heap is empty, nor has a free end

    before = resident()
    thread = Thread(target=load)
    thread.start()
    thread.join()
    free_memory()
    assert resident() - before < 50_000 * KIB, "of 150,000 KiB that nothing refers to"
