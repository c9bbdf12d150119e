"""Memory of policies that are dropped goes back to the machine."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from node.policy.memory import free_memory, map_large_blocks, share_heaps

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


@pytest.mark.parametrize(("configure", "expected"), [(share_heaps, (-8, 2)), (map_large_blocks, (-3, 2**20))])
def test_malloc_is_configured_by_glibcs_numbers_and_left_alone_elsewhere(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[], None], expected: tuple[int, int]
) -> None:
    """M_ARENA_MAX and M_MMAP_THRESHOLD of malloc.h: a wrong number is ignored without a word."""
    calls: list[tuple[int, int]] = []
    glibc = SimpleNamespace(mallopt=lambda name, value: calls.append((name, value)))
    for libc in (glibc, SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", lambda _, libc=libc: libc)
        configure()
    assert calls == [expected]
