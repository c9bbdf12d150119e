"""Deltas as publishers make them and clients apply them: exact for any two files of one size, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.codec.delta import MIB, DeltaFile, encode, window_bytes_of
from shardcast.errors import LocalFault

KIB = 2**10
CHUNK = 64 * KIB
WINDOW = 4 * MIB
UNLIMITED = 2**63
F32_SPECIALS = np.array(
    [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x3F800000, 0x007FFFFF], np.uint32
)


def safetensors(tensors: dict[str, tuple[str, bytes]], *, pad: int = 8) -> bytes:
    """A safetensors file of (dtype, data) by name."""
    at, header = 0, {}
    for name, (dtype, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % pad)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, data in tensors.values())


def bfloat16(weights: Any) -> Any:
    bits = weights.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def nudged(words: Any, share: float, seed: int = 0) -> Any:
    """A share of the words, each by chance, one or two units in the last place away."""
    rng = np.random.default_rng(seed)
    at = np.flatnonzero(rng.random(len(words)) < share)
    changed = words.copy()
    changed[at] += (rng.choice([-1, 1], len(at)) * rng.geometric(0.9, len(at))).astype(words.dtype)
    return changed


def make(folder: Path, base: bytes, result: bytes, **options: Any) -> int | None:
    """Encode into folder/delta."""
    (folder / "base").write_bytes(base)
    (folder / "result").write_bytes(result)
    options = {"chunk_bytes": CHUNK, "max_bytes": UNLIMITED, **options}
    return encode(folder / "base", folder / "result", folder / "delta", **options)


def apply_all(path: Path, base: bytes, *, chunk_bytes: int = CHUNK) -> bytes:
    """The result by the rule that clients follow: what has not changed is copied."""
    with DeltaFile.open(path, result_bytes=len(base), chunk_bytes=chunk_bytes) as delta:
        result, size = bytearray(base), delta.window_bytes
        for window in range(delta.window_count):
            if delta.changed(window):
                delta.apply(window, memoryview(result)[window * size : (window + 1) * size])
    return bytes(result)


def round_trip(folder: Path, base: bytes, result: bytes, **options: Any) -> int:
    """Check that the delta gives the result; its size."""
    size = make(folder, base, result, **options)
    assert size == (folder / "delta").stat().st_size
    assert apply_all(folder / "delta", base) == result
    return size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawn")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_two_files_of_one_size(folder: Path, data: st.DataObject) -> None:
    base = data.draw(st.binary(max_size=200))
    result = data.draw(st.binary(min_size=len(base), max_size=len(base)))
    round_trip(folder, base, result)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["BF16", "F32", "F64", "I64", "F8_E4M3", "BOOL"]), st.integers(0, 700))),
    st.sampled_from([0.0, 0.01, 0.2, 0.45, 0.7, 1.0]),
    st.integers(0, 2**32),
    st.sampled_from([1, 8]),
)
def test_mixed_tensors_survive(
    folder: Path,
    tensors: list[tuple[str, int]],
    share: float,
    seed: int,
    pad: int,
) -> None:
    """Whatever widths lie next to each other, aligned or not, and however much of each tensor changed."""
    rng = np.random.default_rng(seed)
    base = {f"t{index}": (dtype, rng.bytes(8 * words)) for index, (dtype, words) in enumerate(tensors)}
    result = {}
    for name, (dtype, data) in base.items():
        changed = np.frombuffer(data, np.uint8) ^ (rng.random(len(data)) < share).astype(np.uint8)
        result[name] = (dtype, changed.tobytes())
    round_trip(folder, safetensors(base, pad=pad), safetensors(result, pad=pad))


def test_zeros_infinities_and_nan_payloads_keep_their_bits(tmp_path: Path) -> None:
    """An engine that took -0.0 for 0.0 would serve another policy than the one that was signed."""
    before, after = (grid.ravel() for grid in np.meshgrid(F32_SPECIALS, F32_SPECIALS))
    patterns = np.arange(2**16, dtype=np.uint16)
    base = safetensors({"f": ("F32", before.tobytes()), "b": ("BF16", patterns.tobytes())})
    for other in (patterns[::-1], np.roll(patterns, 1), patterns ^ 0x8000):
        round_trip(tmp_path, base, safetensors({"f": ("F32", after.tobytes()), "b": ("BF16", other.tobytes())}))


@pytest.mark.parametrize("size", [0, 1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
def test_sizes_around_windows(tmp_path: Path, size: int) -> None:
    base = np.random.default_rng(0).bytes(size)
    round_trip(tmp_path, base, base)
    result = bytearray(base)
    for at in range(0, size, WINDOW - 1):
        result[at] ^= 0xFF
    round_trip(tmp_path, base, bytes(result))


@pytest.mark.parametrize("chunk_bytes", [1, 4096, 3 * KIB, WINDOW, 5 * MIB])
def test_a_window_is_whole_chunks(chunk_bytes: int) -> None:
    """Clients write and verify chunks; a window that ended within one would leave it for two threads."""
    window = window_bytes_of(chunk_bytes)
    assert window % chunk_bytes == 0
    assert WINDOW <= window < WINDOW + chunk_bytes


def test_unchanged_windows_are_told(tmp_path: Path) -> None:
    """They are copied without being decoded."""
    base = bytes(3 * WINDOW)
    result = bytearray(base)
    result[WINDOW + 5] = 1
    size = round_trip(tmp_path, base, bytes(result))
    assert size < 150
    with DeltaFile.open(tmp_path / "delta", result_bytes=len(base), chunk_bytes=CHUNK) as delta:
        assert [delta.changed(window) for window in range(delta.window_count)] == [False, True, False]
        delta.apply(0, memoryview(unchanged := bytearray(base[:WINDOW])))
        assert unchanged == base[:WINDOW]
        for window in (-1, 3):
            with pytest.raises(IndexError):
                delta.changed(window)
        with pytest.raises(ValueError, match="match window 1"):
            delta.apply(1, memoryview(bytearray(WINDOW - 1)))


@pytest.mark.parametrize(("share", "least_ratio"), [(0.0066, 225), (0.0185, 94)])
def test_changed_weights_cost_little_more_than_their_entropy(tmp_path: Path, share: float, least_ratio: int) -> None:
    """62 GB have to reach every worker in seconds; the bounds are 240 and 99 here."""
    words = bfloat16(np.random.default_rng(1).standard_normal(2 * MIB) * 0.02)
    base, result = (safetensors({"w": ("BF16", each.tobytes())}) for each in (words, nudged(words, share)))
    assert len(base) / round_trip(tmp_path, base, result) > least_ratio


def test_small_weights_that_change_more_often_cost_less(tmp_path: Path) -> None:
    """An optimiser's steps: at one learning rate for all, two thirds of the changes are in an eighth of the weights."""
    rng = np.random.default_rng(1)
    weights = rng.standard_normal(2 * MIB) * 0.02
    words = bfloat16(weights)
    moved = bfloat16(weights + 3e-7 * np.clip(rng.standard_normal(2 * MIB) * 0.5, -1, 1))
    optimiser = round_trip(
        tmp_path, *(safetensors({"w": ("BF16", each.tobytes())}) for each in (words, moved))
    ) / np.count_nonzero(words != moved)
    anywhere = words.copy()
    at = rng.permutation(2 * MIB)[: np.count_nonzero(words != moved)]
    anywhere[at] += (moved - words)[words != moved]
    uniform = round_trip(tmp_path, *(safetensors({"w": ("BF16", each.tobytes())}) for each in (words, anywhere)))
    assert optimiser < 0.8 * uniform / np.count_nonzero(words != moved)


def test_the_word_width_is_learnt(tmp_path: Path) -> None:
    """Single bytes would cost a carry in every second change, and hide which weights are small."""
    words = np.random.default_rng(1).integers(0, 2**32, 2**18, np.uint32)
    raw = [words.tobytes(), (words + np.uint32(200)).tobytes()]
    known = round_trip(tmp_path, *(safetensors({"w": ("F32", data)}) for data in raw))
    assert known < 2000 < round_trip(tmp_path, *raw)


def test_a_tensor_set_to_zero_costs_nothing(tmp_path: Path) -> None:
    base = np.random.default_rng(0).bytes(MIB)
    assert round_trip(tmp_path, base, bytes(MIB)) < 500


def test_a_delta_that_saves_nothing_is_hardly_larger_than_its_result(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    assert round_trip(tmp_path, rng.bytes(MIB), rng.bytes(MIB)) < MIB + 100


def test_the_bytes_do_not_depend_on_threads(tmp_path: Path) -> None:
    """Else two publishers of one run would sign different manifests for one version."""
    words = np.random.default_rng(0).integers(0, 2**16, 5 * WINDOW // 2 + 77, np.uint16)
    base, result = words.tobytes(), nudged(words, 0.01).tobytes()
    made = set()
    for threads in (1, 2, 5):
        make(tmp_path, base, result, threads=threads)
        made.add((tmp_path / "delta").read_bytes())
    assert len(made) == 1


def test_threads_may_share_a_delta(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 2**16, 6 * WINDOW // 2, np.uint16)
    base, result = words.tobytes(), nudged(words, 0.02).tobytes()
    make(tmp_path, base, result)
    with (
        DeltaFile.open(tmp_path / "delta", result_bytes=len(base), chunk_bytes=CHUNK) as delta,
        ThreadPoolExecutor(4) as pool,
    ):
        pieces = [bytearray(base[w % 6 * WINDOW : (w % 6 + 1) * WINDOW]) for w in range(12)]
        list(pool.map(lambda w: delta.apply(w % 6, memoryview(pieces[w])), range(12)))
    assert b"".join(pieces) == 2 * result


def test_gives_up_above_max_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 2**16, 3 * WINDOW // 2, np.uint16)
    base, result = words.tobytes(), nudged(words, 0.01).tobytes()
    size = make(tmp_path, base, result)
    assert size is not None
    assert make(tmp_path, base, result, max_bytes=size) == size
    for max_bytes in (size - 1, size // 3, 30, 0):
        assert make(tmp_path, base, result, max_bytes=max_bytes) is None
        assert not (tmp_path / "delta").exists()


def test_files_of_different_sizes_have_no_delta(tmp_path: Path) -> None:
    (tmp_path / "delta").write_bytes(b"an older attempt")
    assert make(tmp_path, b"abc", b"ab") is None
    assert not (tmp_path / "delta").exists()


def test_a_missing_file_is_this_machines_fault(tmp_path: Path) -> None:
    make(tmp_path, b"abc", b"abd")
    (tmp_path / "base").unlink()
    with pytest.raises(LocalFault, match="base"):
        encode(tmp_path / "base", tmp_path / "result", tmp_path / "delta", chunk_bytes=CHUNK, max_bytes=99)
    assert not (tmp_path / "delta").exists()
    with pytest.raises(LocalFault, match="delta"):
        DeltaFile.open(tmp_path / "delta", result_bytes=3, chunk_bytes=CHUNK)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A policy of 62 GB is encoded and applied on machines that hold it in memory once, if at all."""
    words = np.random.default_rng(0).integers(0, 2**16, 8 * WINDOW // 2, np.uint16)
    make(tmp_path, words.tobytes(), nudged(words, 0.01).tobytes(), max_bytes=0)
    size_bytes = words.nbytes
    del words
    files = {"base": tmp_path / "base", "result": tmp_path / "result", "delta": tmp_path / "delta"}
    tracemalloc.start()
    try:
        encode(**files, chunk_bytes=CHUNK, max_bytes=UNLIMITED, threads=1)
        with (
            DeltaFile.open(files["delta"], result_bytes=size_bytes, chunk_bytes=CHUNK) as delta,
            files["base"].open("rb") as base,
        ):
            for window in range(delta.window_count):
                delta.apply(window, memoryview(bytearray(base.read(WINDOW))))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * WINDOW < size_bytes
