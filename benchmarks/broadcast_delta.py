"""The delta codec: how small, how near to the entropy bound, how fast from file to file.

Synthetic weights in bfloat16, normal with a standard deviation of 0.02, in two ways:

uniform    each word changes with the same probability; its step is +1 or -1 unit in the last place times a
           geometric number (0.9 of them 1). The bound counts both: N * H(p) bits for which of N words change,
           and the entropy of the drawn steps for how. No codec can do better on average.
optimiser  every weight moves by lr * clip(normal * 0.5, -1, 1), like Adam, and is rounded: small weights change
           more often. The same bound is not one here, and the codec goes below it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from shardcast.codec.delta import MIB, DeltaFile, encode, window_bytes_of
from shardcast.codec.layout import read_layout
from shardcast.codec.word_codec import WORD_TYPES

CHUNK_BYTES = 4 * MIB
GB = 1e9

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Kind:
    """Conversions of float32 weights, before and after a change, into words of `width` bytes."""

    width: int
    before: Callable[[Words], Words]
    after: Callable[[Words], Words]


def measure(*, size_bytes: int, repeats: int) -> dict[str, Any]:
    """Measure ratios and speeds on one thread; speeds in 10**9 bytes of the full file a second, medians of `repeats`.

    `per_cpu_s` are seconds of this process's processor time, for machines with other work. The reference
    `copy_gb_per_s` reads one file and writes another, window by window.
    """
    main = {share: _case(size_bytes, repeats, _uniform(share)) for share in (0.0066, 0.0185)}
    small = max(size_bytes // 4, 8 * MIB)
    other = {f"uniform_{share}": _case(small, repeats, _uniform(share)) for share in (0.0001, 0.1, 0.5)}
    other |= {f"optimiser_lr_{lr}": _case(small, repeats, _optimiser(lr)) for lr in (3e-7, 1e-6, 1e-5)}
    other["float32_all_change_1e-4"] = _case(small, repeats, _relative(1e-4))
    return {
        "delta_ratio_066": main[0.0066]["ratio"],
        "delta_ratio_185": main[0.0185]["ratio"],
        "delta_over_entropy": max(case["over_entropy"] for case in main.values()),
        "delta_encode_gb_per_s": min(case["encode_gb_per_s"] for case in main.values()),
        "delta_decode_gb_per_s": min(case["decode_gb_per_s"] for case in main.values()),
        "other": {**{f"uniform_{share}": case for share, case in main.items()}, **other},
    }


def trace(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Measure the deltas between consecutive files of a training run."""
    with TemporaryDirectory() as folder:
        rows = []
        for base, result in pairwise(paths):
            size = encode(base, result, Path(folder, "delta"), chunk_bytes=CHUNK_BYTES, max_bytes=2**63)
            if size is None:
                raise ValueError(f"{result} is not as long as {base}")
            _decode(base, Path(folder, "delta"), Path(folder, "again"))
            _require_equal(result, Path(folder, "again"))
            words, changed, bound_bits = _bound(base, result)
            rows.append(
                {
                    "result": result.name,
                    "changed_share": changed / words,
                    "ratio": round(base.stat().st_size / size, 2),
                    "over_entropy": round(8 * size / bound_bits, 4) if changed else None,
                }
            )
        return rows


def _case(size_bytes: int, repeats: int, kind: Kind) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        base, result, delta, again = (Path(folder, name) for name in ("base", "result", "delta", "again"))
        _write_weights(base, result, size_bytes, kind)
        words, changed, bound_bits = _bound(base, result)
        size: int | None = None

        def make() -> None:
            nonlocal size
            size = encode(base, result, delta, chunk_bytes=CHUNK_BYTES, max_bytes=2**63, threads=1)

        encoding = _seconds(make, repeats)
        decoding = _seconds(lambda: _decode(base, delta, again), repeats)
        copying = _seconds(lambda: _copy(base, Path(folder, "copy")), repeats)
        _require_equal(result, again)
        assert size is not None
        full = base.stat().st_size
        return {
            "changed_share": round(changed / words, 6),
            "ratio": round(full / size, 2),
            "over_entropy": round(8 * size / bound_bits, 4),
            "encode_gb_per_s": round(full / encoding[0] / GB, 3),
            "encode_gb_per_cpu_s": round(full / encoding[1] / GB, 3),
            "decode_gb_per_s": round(full / decoding[0] / GB, 3),
            "decode_gb_per_cpu_s": round(full / decoding[1] / GB, 3),
            "copy_gb_per_s": round(full / copying[0] / GB, 3),
        }


def _seconds(work: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Return the median (wall, processor) seconds."""
    walls, processors = [], []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return statistics.median(walls), statistics.median(processors)


def _decode(base: Path, delta: Path, result: Path) -> None:
    with base.open("rb") as source, result.open("wb") as sink:
        size = base.stat().st_size
        with DeltaFile.open(delta, result_bytes=size, chunk_bytes=CHUNK_BYTES) as opened:
            buffer = memoryview(bytearray(opened.window_bytes))
            for window in range(opened.window_count):
                data = buffer[: source.readinto(buffer)]
                if opened.changed(window):
                    opened.apply(window, data)
                sink.write(data)


def _copy(source: Path, sink: Path) -> None:
    with source.open("rb") as reading, sink.open("wb") as writing:
        while data := reading.read(window_bytes_of(CHUNK_BYTES)):
            writing.write(data)


def _require_equal(left: Path, right: Path) -> None:
    for one, other in _windows(left, right):
        if one != other:
            raise AssertionError(f"{right} is not {left}")


def _windows(*paths: Path) -> Iterator[tuple[bytes, ...]]:
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        while any(data := tuple(file.read(window_bytes_of(CHUNK_BYTES)) for file in files)):
            yield data


def _bound(base: Path, result: Path) -> tuple[int, int, float]:
    """Return (words, changed words, bits): N * H(changed / N) for which, and the entropy of all steps for how."""
    words = changed = 0
    steps: list[Words] = []
    with result.open("rb") as file:
        layout = read_layout(file.fileno(), result.stat().st_size)
    start = 0
    for before, after in _windows(base, result):
        at = 0
        for width, count in layout.segments(start, start + len(after)):
            one, other = (np.frombuffer(data, WORD_TYPES[width], count, at) for data in (before, after))
            step = (other - one)[one != other]
            words, changed, at = words + count, changed + len(step), at + width * count
            steps.append(step.astype(np.uint64))
        start += len(after)
    _, counts = np.unique(np.concatenate(steps), return_counts=True)
    return words, changed, words * _entropy([changed, words - changed]) + changed * _entropy(counts)


def _entropy(counts: npt.ArrayLike) -> float:
    shares = np.asarray(counts, dtype=np.float64)
    shares = shares[shares > 0] / shares.sum()
    return float(-(shares * np.log2(shares)).sum())


def _write_weights(base: Path, result: Path, size_bytes: int, kind: Kind) -> None:
    """Write two safetensors files of one tensor, so that the codec learns the width as it does in use."""
    dtype = {2: "BF16", 4: "F32"}[kind.width]
    count = size_bytes // kind.width
    header = f'{{"weights":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[0,{count * kind.width}]}}}}'.encode()
    header += b" " * (-len(header) % 8)
    rng = np.random.default_rng(0)
    with base.open("wb") as one, result.open("wb") as other:
        for file in (one, other):
            file.write(len(header).to_bytes(8, "little") + header)
        for at in range(0, count, 2**22):
            weights = rng.standard_normal(min(2**22, count - at), dtype=np.float32) * np.float32(0.02)
            one.write(kind.before(weights).tobytes())
            other.write(kind.after(weights).tobytes())
    os.sync()  # writing back should not meet the measurement


def _uniform(share: float) -> Kind:
    rng = np.random.default_rng(1)

    def after(weights: Words) -> Words:
        words = _bfloat16(weights)
        at = np.flatnonzero(rng.random(len(words), dtype=np.float32) < share)
        steps = rng.geometric(0.9, len(at)) * rng.choice([-1, 1], len(at))
        words[at] += steps.astype(np.uint16)
        return words

    return Kind(2, _bfloat16, after)


def _optimiser(lr: float) -> Kind:
    rng = np.random.default_rng(1)

    def after(weights: Words) -> Words:
        moves = np.clip(rng.standard_normal(len(weights), dtype=np.float32) * np.float32(0.5), -1, 1)
        return _bfloat16(weights + moves * np.float32(lr))

    return Kind(2, _bfloat16, after)


def _relative(size: float) -> Kind:
    rng = np.random.default_rng(1)

    def after(weights: Words) -> Words:
        moves = rng.standard_normal(len(weights), dtype=np.float32) * np.float32(size)
        words: Words = (weights * (1 + moves)).view(np.uint32)
        return words

    return Kind(4, lambda weights: weights.view(np.uint32), after)


def _bfloat16(weights: Words) -> Words:
    """Round to nearest, ties to even; return words."""
    bits = weights.view(np.uint32)
    words: Words = ((bits + (bits >> 16 & 1) + 0x7FFF) >> 16).astype(np.uint16)
    return words
