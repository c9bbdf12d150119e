"""Timing of calls in alternation, and the statistics of what was timed."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]


def milliseconds(call: Call) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def rounds_ms(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Time each call in each round, the calls alternating; an extra first round warms up."""
    return alternate({name: lambda call=call: milliseconds(call) for name, call in calls.items()}, rounds)


def alternate(timed: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Do the same with calls that return their own milliseconds."""
    taken: dict[str, list[float]] = {name: [] for name in timed}
    order, shuffler = list(timed), random.Random(0)
    for _ in range(rounds + 1):
        for name in order:
            taken[name].append(timed[name]())
        # Threads spin on for a while after a call, and slow down whatever comes next: each time something else.
        shuffler.shuffle(order)
    return {name: times[1:] for name, times in taken.items()}


def synchronised(call: Call) -> Call:
    """Wrap a call so that it waits for the CUDA device."""

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of pairs."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not below `share` of all."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
