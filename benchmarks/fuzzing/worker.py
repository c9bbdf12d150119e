"""The process that feeds one target: `python -m benchmarks.fuzzing.worker TARGET SEED FIRST COUNT BEAT`.

It reports on standard output, one JSON object per line; `benchmarks.fuzzing.campaign` reads them. Before each input
it writes the input's number and bytes to the file BEAT, which both map: whoever finds this process dead or stuck
knows at what. Inputs follow from the seed, the target and their number, and from the inputs before them, since what
goes a new way through the parser joins the corpus.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import logging
import mmap
import os
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.fuzzing.mutation import MAX_INPUT_BYTES
from benchmarks.fuzzing.target import AttemptOutcome, Harness, Kind, Target, attempt, code_of, describe

HEADER = struct.Struct("<QI")
BEAT_BYTES = HEADER.size + 16 * MAX_INPUT_BYTES
MAX_CORPUS = 2000
MAX_KEPT_BYTES = 16 * 1024
REPORT_EVERY = 500
WARM_UP = 3
REPEATS = 3
MIB = 2**20


@dataclass
class FuzzTally:
    """Since the last report."""

    inputs: int = 0
    accepted: int = 0
    cpu_seconds: float = 0.0
    slowest_ms: float = 0.0
    peak_mib: float = 0.0
    ways: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class Gauge:
    """Processor time of this process in seconds, and by how much its resident set rose at most meanwhile, in MiB.

    Where there is no /proc only new peaks of the process show. `getrusage` would not do: its peak begins at that of the
    process which started this one.
    """

    def __init__(self) -> None:
        self._files: tuple[int, int] | None = None
        with contextlib.suppress(OSError):
            reset = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            self._files = (reset, os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC))

    def start(self) -> None:
        if self._files is not None:
            os.pwrite(self._files[0], b"5", 0)  # the peak is from now on what is resident now (proc(5))
        self._before = self._peak_mib()
        self._began = time.process_time()

    def stop(self) -> tuple[float, float]:
        used = time.process_time() - self._began
        return used, self._peak_mib() - self._before

    def close(self) -> None:
        for descriptor in self._files or ():
            os.close(descriptor)

    def _peak_mib(self) -> float:
        if self._files is None:
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
        _, _, after = os.pread(self._files[1], 4096, 0).partition(b"VmHWM:")
        return int(after.split(maxsplit=1)[0]) / 1024


class Fuzzer:
    """Feeds one harness."""

    def __init__(self, target: Target, harness: Harness, *, seed: str) -> None:
        self._target, self._harness, self._seed = target, harness, seed
        self._gauge = Gauge()
        self._ways: set[str] = set()
        self._corpus: list[bytes] = []
        self.tally = FuzzTally()

    def close(self) -> None:
        self._gauge.close()

    def begin(self) -> None:
        """Feed what honest peers send. Raises RuntimeError for a target that refuses it."""
        for number, data in enumerate((*self._harness.seeds, *self._harness.hostile)):
            for _ in range(WARM_UP):
                outcome = attempt(self._harness, data)
            if outcome.kind is not Kind.ACCEPTED and number < len(self._harness.seeds):
                raise RuntimeError(f"{self._target.name} does not take its seed {number}: {outcome.error!r}")
            self._ways.add(outcome.signature)
            self._corpus.append(data)

    def make(self, number: int) -> bytes:
        """Make input `number`."""
        rng = Random(f"{self._seed}/{self._target.name}/{number}")
        seeds: Sequence[bytes] = self._harness.seeds
        return self._harness.mutate(rng, seeds if rng.random() < 0.3 else self._corpus)

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Feed one input; what was wrong with that."""
        outcome, seconds, mib = self._measured(data)
        self.tally.inputs += 1
        self.tally.cpu_seconds += seconds
        self.tally.peak_mib = max(self.tally.peak_mib, mib)
        if outcome.kind is Kind.CRASHED and outcome.error is not None:
            yield finding("crash", data, describe(outcome.error))
        elif outcome.kind is Kind.ACCEPTED:
            self.tally.accepted += 1
        else:
            self.tally.refused[code_of(outcome.error)] += 1
        if outcome.signature not in self._ways:
            self._ways.add(outcome.signature)
            self.tally.ways += 1
            if len(self._corpus) < MAX_CORPUS and len(data) <= MAX_KEPT_BYTES:
                self._corpus.append(data)
        yield from self._judge(data, seconds, mib)

    def _measured(self, data: bytes) -> tuple[AttemptOutcome, float, float]:
        self._gauge.start()
        outcome = attempt(self._harness, data)
        return outcome, *self._gauge.stop()

    def _judge(self, data: bytes, seconds: float, mib: float) -> Iterator[dict[str, Any]]:
        """Yield a finding if the input was over a budget each time that it was fed, since this machine may be busy."""
        for _ in range(REPEATS):
            if seconds * 1e3 <= self._target.cpu_ms and mib <= self._target.memory_mib:
                break
            _, again, more = self._measured(data)
            seconds, mib = min(seconds, again), min(mib, more)
        self.tally.slowest_ms = max(self.tally.slowest_ms, seconds * 1e3)
        if seconds > self._target.hang_seconds:
            yield finding("hang", data, f"{seconds:.1f} s of processor time")
        elif seconds * 1e3 > self._target.cpu_ms:
            yield finding("over_budget", data, f"{seconds * 1e3:.0f} ms of processor time")
        if mib > self._target.memory_mib:
            yield finding("over_budget", data, f"{mib:.0f} MiB of memory")


def finding(kind: str, data: bytes, detail: str) -> dict[str, Any]:
    """Make the report of an input that was over a budget, or crashed."""
    return {"finding": kind, "detail": detail, "data": base64.b64encode(data).decode("ascii")}


def run(target: Target, *, seed: str, first: int, count: int, beat: mmap.mmap) -> Iterator[dict[str, Any]]:
    """Feed inputs `first` .. `first` + `count` - 1; everything there is to report."""
    with ExitStack() as stack:
        harness = target.prepare(stack)
        fuzzer = Fuzzer(target, harness, seed=seed)
        stack.callback(fuzzer.close)
        fuzzer.begin()
        gc.collect()
        gc.freeze()  # what is there now will be needed to the end, and need not be looked at again
        for number in range(first, first + count):
            data = fuzzer.make(number)
            beat[HEADER.size : HEADER.size + len(data)] = data
            beat[: HEADER.size] = HEADER.pack(number + 1, len(data))
            yield from fuzzer.feed(data)
            if fuzzer.tally.inputs == REPORT_EVERY or number == first + count - 1:
                yield {"tally": vars(fuzzer.tally)}
                fuzzer.tally = FuzzTally()
        beat[: HEADER.size] = HEADER.pack(first + count + 1, 0)


def main() -> None:
    """Feed a target as told by the command line."""
    from benchmarks.fuzzing.targets import find  # noqa: PLC0415  (imports every parser)

    name, seed, first, count, beat_path = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no report
    with open(beat_path, "r+b") as file, mmap.mmap(file.fileno(), BEAT_BYTES) as beat:  # noqa: PTH123
        for report in run(find(name), seed=seed, first=int(first), count=int(count), beat=beat):
            reports.write(json.dumps(report) + "\n")
            reports.flush()


if __name__ == "__main__":
    main()
