"""Hostile deltas: whatever a publisher signed, a client that applies it ends with bytes or with Malformed.

Each attack is refused before what it asks for is allocated, and nothing of numpy or zstd shows.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.codec.bits import encode_set, encode_sizes
from shardcast.codec.delta import MIB, DeltaFile, encode
from shardcast.codec.word_codec import MAX_SEGMENT_WORDS, Mode, decode_words, encode_words
from shardcast.errors import Malformed
from tests.unit.shardcast.test_delta import bfloat16, nudged, safetensors

CHUNK = 4096
SET = struct.Struct("<IIB")


@contextmanager
def refused(*, peak_bytes: int | None = None, reason: str = ".") -> Iterator[None]:
    """Malformed "bad_delta" comes out, and not more than `peak_bytes` is taken meanwhile."""
    if peak_bytes is not None:
        tracemalloc.start()
    try:
        with pytest.raises(Malformed, match=reason) as caught:
            yield
        assert caught.value.code == "bad_delta"
        if peak_bytes is not None:
            assert tracemalloc.get_traced_memory()[1] < peak_bytes
    finally:
        tracemalloc.stop()


def words(count: int, width: int = 2) -> Any:
    return np.frombuffer(np.random.default_rng(0).bytes(count * width), f"<u{width}").copy()


def try_body(mode: int, body: bytes, before: Any) -> bool:
    """Whether the body is accepted; any error but Malformed "bad_delta" fails the test."""
    try:
        decode_words(mode, memoryview(body), before.copy())
    except Malformed as error:
        assert error.code == "bad_delta"
        return False
    return True


def bodies() -> dict[str, tuple[Mode, bytes, Any]]:
    """Bodies of every kind, each with the words it applies to."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(12_000) * 0.02
    before, moved = bfloat16(weights), bfloat16(weights + 1e-5 * rng.standard_normal(12_000))
    afters = {"sparse": nudged(before[:900], 0.03), "classes": moved, "dense": nudged(before[:500], 1.0)}
    afters["fresh"] = np.arange(300, dtype=np.uint16)
    return {name: (*encode_words(before[: len(after)], after), before[: len(after)]) for name, after in afters.items()}


BODIES = bodies()


def test_the_bodies_under_attack_are_of_every_kind() -> None:
    modes = {name: mode for name, (mode, _, _) in BODIES.items()}
    assert modes == {"sparse": Mode.SPARSE, "classes": Mode.SPARSE, "dense": Mode.DENSE, "fresh": Mode.FRESH}
    assert BODIES["classes"][1][0] > 1


@pytest.mark.parametrize("kind", BODIES)
def test_every_flipped_byte(kind: str) -> None:
    mode, body, before = BODIES[kind]
    refusals = 0
    for at in range(len(body)):
        for flip in (0x01, 0x80, 0xFF):
            hostile = bytearray(body)
            hostile[at] ^= flip
            refusals += not try_body(mode, bytes(hostile), before)
    assert refusals > 0, "nothing was checked"


@pytest.mark.parametrize("kind", BODIES)
def test_every_truncation_and_extension(kind: str) -> None:
    mode, body, before = BODIES[kind]
    assert not any(try_body(mode, body[:size], before) for size in range(len(body)))
    assert not try_body(mode, body + b"\0", before)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 255), st.binary(max_size=120), st.sampled_from([1, 2, 4, 8]), st.integers(1, 70))
def test_noise_as_a_body(mode: int, body: bytes, width: int, count: int) -> None:
    try_body(mode, body, words(count, width))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_noise_after_an_honest_beginning(data: st.DataObject) -> None:
    mode, body, before = BODIES[data.draw(st.sampled_from(sorted(BODIES)))]
    kept = data.draw(st.integers(0, min(80, len(body))))
    try_body(mode, body[:kept] + data.draw(st.binary(max_size=200)), before)


# Sparse bodies


def sparse(
    *, thresholds: tuple[int, ...] = (), ranks: bytes, signs: bytes = b"", large: bytes = SET.pack(0, 0, 0)
) -> bytes:
    """A body whose first class is as given, and whose others have no changes."""
    classes = struct.pack(f"<B{len(thresholds)}Q", 1 + len(thresholds), *thresholds)
    return classes + ranks + signs + large + len(thresholds) * 2 * SET.pack(0, 0, 0)


def a_set(*numbers: int) -> bytes:
    return b"".join(encode_set(np.array(numbers, np.int64)))


SPARSE_ATTACKS: dict[str, bytes] = {
    "a position just outside": sparse(ranks=a_set(3, 100), signs=b"\0"),
    "a position far outside": sparse(ranks=a_set(3, 2**40), signs=b"\0"),
    "more positions than words": sparse(ranks=SET.pack(2**32 - 1, 2**32 - 1, 0)),
    "positions for most words": sparse(ranks=a_set(*range(51)), signs=bytes(7)),
    "a unary string of 512 MiB": sparse(ranks=SET.pack(1, 2**32 - 1, 0)),
    "more zeros than words": sparse(ranks=SET.pack(1, 102, 0) + bytes(12) + b"\x20", signs=b"\0"),
    "a shift beyond the word": sparse(ranks=SET.pack(1, 1, 255) + b"\1" + b"\1" * 255, signs=b"\0"),
    "a shift that overflows": sparse(ranks=SET.pack(1, 1, 33) + b"\1" + b"\1" * 33, signs=b"\0"),
    "fewer ones than positions": sparse(ranks=SET.pack(3, 4, 0) + b"\x0a", signs=b"\0"),
    "more ones than positions": sparse(ranks=SET.pack(1, 2, 0) + b"\x03", signs=b"\0"),
    "zeros after the last one": sparse(ranks=SET.pack(1, 5, 0) + b"\x01", signs=b"\0"),
    "a string for no positions": sparse(ranks=SET.pack(0, 3, 0) + b"\0"),
    "a string that is there, for one position": sparse(ranks=SET.pack(1, 2**23, 0) + bytes(2**20 - 1) + b"\x80"),
    "no classes": b"\0",
    "nine classes": sparse(thresholds=tuple(range(80, 0, -10)), ranks=a_set(3), signs=b"\0"),
    "rising thresholds": sparse(thresholds=(5, 6), ranks=a_set(3), signs=b"\0"),
    "equal thresholds": sparse(thresholds=(5, 5), ranks=a_set(3), signs=b"\0"),
    "a threshold of zero": sparse(thresholds=(0,), ranks=a_set(3), signs=b"\0"),
    "a threshold above all words": sparse(thresholds=(2**64 - 1,), ranks=a_set(3), signs=b"\0"),
    "positions for most words, in two classes": sparse(thresholds=(2**14,), ranks=a_set(*range(40)), signs=bytes(5))[
        : -2 * SET.size
    ]
    + a_set(*range(30))
    + bytes(4)
    + SET.pack(0, 0, 0),
    "large steps of words that did not change": sparse(ranks=a_set(3, 4), signs=b"\0", large=a_set(2)),
    "more large steps than changes": sparse(ranks=a_set(3, 4), signs=b"\0", large=SET.pack(3, 3, 0) + b"\x07"),
}


@pytest.mark.parametrize("body", SPARSE_ATTACKS.values(), ids=SPARSE_ATTACKS)
def test_sparse_attacks(body: bytes) -> None:
    before = words(100)
    with refused(peak_bytes=100_000):
        decode_words(Mode.SPARSE, memoryview(body), before)


def test_the_thresholds_are_all_that_is_wrong_with_those_bodies() -> None:
    body = sparse(thresholds=(2**15, 2**14, 1), ranks=a_set(*range(40)), signs=bytes(5))
    assert try_body(Mode.SPARSE, body, words(100))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_step_beyond_its_word(width: int) -> None:
    """Half of the range is the largest step there is."""
    half = 1 << 8 * width - 1
    for size, fits in ((half - 2, True), (half - 1, False), (2**63, False)):
        sizes = b"".join(encode_sizes(np.array([size], np.uint64)))
        body = sparse(ranks=a_set(3), signs=b"\0", large=a_set(0) + sizes)
        assert try_body(Mode.SPARSE, body, words(100, width)) is fits


@pytest.mark.parametrize(
    "sizes",
    [
        struct.pack("<IB", 1, 64) + b"\1" + bytes(64),
        struct.pack("<IB", 2, 63) + b"\2" + bytes(63) + b"\1",
        struct.pack("<IB", 65, 0) + bytes(8) + b"\1" + bytes(64),
        struct.pack("<IB", 2**23, 0) + bytes(2**20 - 1) + b"\x80",
        struct.pack("<IB", 0, 0),
    ],
)
def test_sizes_beyond_64_bits(sizes: bytes) -> None:
    body = sparse(ranks=a_set(3), signs=b"\0", large=a_set(0) + sizes)
    with refused(peak_bytes=100_000):
        decode_words(Mode.SPARSE, memoryview(body), words(100, 8))


# Dense bodies


def frame(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=3, **options).compress(data)


def claiming(data: bytes, size: int) -> bytes:
    """A frame of `data` whose header claims four bytes of content size, and lies."""
    honest = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(data)
    assert honest[4] == 0, "a window descriptor follows, no content size"
    return honest[:4] + bytes([0x80]) + honest[5:6] + struct.pack("<I", size) + honest[6:]


def huge_window(size: int) -> bytes:
    """`size` zeros in a block of run lengths: nothing is wrong but the window."""
    return (
        b"\x28\xb5\x2f\xfd"
        + bytes([0x80, 0xA8])
        + struct.pack("<I", size)
        + (size << 3 | 3).to_bytes(3, "little")
        + b"\0"
    )


def test_the_huge_window_is_all_that_is_wrong_with_that_frame() -> None:
    assert zstandard.ZstdDecompressor(max_window_size=2**31).decompress(huge_window(1000)) == bytes(1000)


FRAME_ATTACKS: dict[str, Callable[[int], bytes]] = {
    "a bomb that tells its size": lambda _: frame(bytes(256 * MIB)),
    "a bomb that tells no size": lambda _: frame(bytes(64 * MIB), write_content_size=False),
    "a bomb that lies about its size": lambda words: claiming(bytes(64 * MIB), words),
    "a frame that is shorter than it says": lambda words: claiming(bytes(10), words),
    "a frame of another size": lambda words: frame(bytes(words - 1)),
    "two frames": lambda words: frame(bytes(words)) + frame(b"more"),
    "a skippable frame": lambda words: struct.pack("<II", 0x184D2A50, 4) + b"skip" + frame(bytes(words)),
    "no frame": lambda _: b"\x28\xb5\x2f\xfd",
    "nothing": lambda _: b"",
    "a window of 2 GiB": huge_window,
    "an unknown dictionary": lambda words: (
        b"\x28\xb5\x2f\xfd" + bytes([0xA1, 7]) + struct.pack("<I", words) + b"\1\0\0"
    ),
}


@pytest.mark.parametrize("mode", [Mode.DENSE, Mode.FRESH])
@pytest.mark.parametrize("attack", FRAME_ATTACKS.values(), ids=FRAME_ATTACKS)
def test_decompression_attacks(attack: Callable[[int], bytes], mode: Mode) -> None:
    """Output is capped by what the segment holds, whatever the frame says of itself."""
    before = words(1000, 1)
    data = attack(len(before))
    body = struct.pack("<I", len(data)) + data
    with refused(peak_bytes=MIB):
        decode_words(mode, memoryview(body), before)


# The container


def make(folder: Path) -> tuple[bytes, bytes]:
    """(base, delta): three windows, the first of several segments, the second unchanged."""
    weights = bfloat16(np.random.default_rng(0).standard_normal(100) * 0.02)
    before, after = (
        bytearray(safetensors({"a": ("BF16", each.tobytes()), "z": ("U8", bytes(9 * MIB))}))
        for each in (weights, nudged(weights, 0.9))
    )
    for at in (1000, 2000, len(after) - 1):
        after[at] ^= 3
    (folder / "base").write_bytes(before)
    (folder / "result").write_bytes(after)
    assert encode(folder / "base", folder / "result", folder / "delta", chunk_bytes=CHUNK, max_bytes=MIB)
    return bytes(before), (folder / "delta").read_bytes()


def try_file(folder: Path, base: bytes, data: bytes) -> bool:
    """Whether every window is accepted; anything but Malformed "bad_delta" fails the test."""
    (folder / "hostile").write_bytes(data)
    try:
        with DeltaFile.open(folder / "hostile", result_bytes=len(base), chunk_bytes=CHUNK) as delta:
            for window in range(delta.window_count):
                if delta.changed(window):
                    size = delta.window_bytes
                    delta.apply(window, memoryview(bytearray(base[window * size : (window + 1) * size])))
    except Malformed as error:
        assert error.code == "bad_delta"
        return False
    return True


def test_every_flipped_byte_of_a_file(tmp_path: Path) -> None:
    base, honest = make(tmp_path)
    assert len(honest) < 1000
    assert try_file(tmp_path, base, honest)
    for at in range(len(honest)):
        hostile = bytearray(honest)
        hostile[at] ^= 0x80 if at % 2 else 0x01
        accepted = try_file(tmp_path, base, bytes(hostile))
        assert not (accepted and at < 36), "the header and the index are all checked"


def test_every_truncation_of_a_file(tmp_path: Path) -> None:
    base, honest = make(tmp_path)
    for size in range(len(honest)):
        (tmp_path / "short").write_bytes(honest[:size])
        with refused():
            DeltaFile.open(tmp_path / "short", result_bytes=len(base), chunk_bytes=CHUNK)


def test_an_index_that_does_not_add_up(tmp_path: Path) -> None:
    """Changes cannot overlap or leave gaps, since only lengths are stored; they must fill the file."""
    base, honest = make(tmp_path)
    first, *rest = struct.unpack_from("<3I", honest, 24)
    for hostile in ((first + 1, *rest), (2**32 - 1, *rest), (first - 1, *rest), (0, 0, 0)):
        (tmp_path / "hostile").write_bytes(honest[:24] + struct.pack("<3I", *hostile) + honest[36:])
        with refused():
            DeltaFile.open(tmp_path / "hostile", result_bytes=len(base), chunk_bytes=CHUNK)
    (tmp_path / "hostile").write_bytes(honest + b"\0")
    with refused():
        DeltaFile.open(tmp_path / "hostile", result_bytes=len(base), chunk_bytes=CHUNK)


def test_a_change_larger_than_any_honest_one(tmp_path: Path) -> None:
    """It would be read whole; so what may be read is capped by the window."""
    size = 10 * MIB
    (tmp_path / "hostile").write_bytes(struct.pack("<8sQQI", b"SCDELTA1", 4096, 4 * MIB, size) + bytes(size))
    with refused(peak_bytes=MIB):
        DeltaFile.open(tmp_path / "hostile", result_bytes=4096, chunk_bytes=CHUNK)


def test_an_index_that_is_not_there(tmp_path: Path) -> None:
    """A GiB of it would be read, were the size of the file not asked first."""
    (tmp_path / "hostile").write_bytes(struct.pack("<8sQQ", b"SCDELTA1", 2**50, 4 * MIB))
    with refused(peak_bytes=MIB):
        DeltaFile.open(tmp_path / "hostile", result_bytes=2**50, chunk_bytes=CHUNK)


@pytest.mark.parametrize(
    ("result_bytes", "chunk_bytes"),
    [(9 * MIB, CHUNK), (2**50, CHUNK), (0, CHUNK), (-1, CHUNK), (9 * MIB, 0), (9 * MIB, -1), (9 * MIB, 2**40), (9, 3)],
)
def test_another_result_than_the_manifests(tmp_path: Path, result_bytes: int, chunk_bytes: int) -> None:
    make(tmp_path)
    with refused(peak_bytes=MIB):
        DeltaFile.open(tmp_path / "delta", result_bytes=result_bytes, chunk_bytes=chunk_bytes)


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    base, honest = make(tmp_path)
    with DeltaFile.open(tmp_path / "delta", result_bytes=len(base), chunk_bytes=CHUNK) as delta:
        (tmp_path / "delta").write_bytes(honest[:-1])
        with refused(reason="truncated"):
            delta.apply(2, base[2 * delta.window_bytes :])


def table(*segments: tuple[int, int, int, int], count: int | None = None) -> bytes:
    packed = b"".join(struct.pack("<BBII", *segment) for segment in segments)
    return struct.pack("<H", len(segments) if count is None else count) + packed


SEGMENT_ATTACKS: dict[str, bytes] = {
    "no table": b"\1",
    "no segments": table(),
    "segments that are not there": table((0, 1, 64, 0), count=2),
    "65535 segments": table((0, 1, 64, 0), count=65535),
    "a width of three": table((0, 3, 21, 0), (0, 1, 1, 0)),
    "a width of zero": table((0, 0, 64, 0), (0, 1, 64, 0)),
    "a segment of no words": table((0, 1, 64, 0), (0, 2, 0, 0)),
    "a segment of too many words": table((0, 1, MAX_SEGMENT_WORDS + 1, 0)),
    "segments longer than the window": table((0, 1, 64, 0), (0, 1, 1, 0)),
    "segments shorter than the window": table((0, 1, 63, 0)),
    "a body beyond the change": table((1, 1, 64, 100)),
    "bytes after the bodies": table((0, 1, 64, 0)) + b"\0",
    "a body where nothing changed": table((0, 1, 64, 3)) + b"abc",
    "an unknown mode": table((4, 1, 64, 0)),
}


@pytest.mark.parametrize("change", SEGMENT_ATTACKS.values(), ids=SEGMENT_ATTACKS)
def test_segment_attacks(tmp_path: Path, change: bytes) -> None:
    data = struct.pack("<8sQQI", b"SCDELTA1", 64, 4 * MIB, len(change)) + change
    (tmp_path / "hostile").write_bytes(data)
    with DeltaFile.open(tmp_path / "hostile", result_bytes=64, chunk_bytes=CHUNK) as delta, refused(peak_bytes=MIB):
        delta.apply(0, bytes(64))


def test_the_most_that_a_body_can_take() -> None:
    """As many changes as are allowed, each with a large step: 60 bytes for each, as documented."""
    rng = np.random.default_rng(0)
    before = words(2**18)
    after = before.copy()
    at = np.sort(rng.permutation(2**18)[: 2**17])
    after[at] += rng.integers(2, 2**7, 2**17).astype(np.uint16)
    ranks, signs, large = a_set(*at), bytes(2**14), a_set(*range(2**17))
    sizes = b"".join(encode_sizes((after - before)[at].astype(np.uint64) - np.uint64(2)))
    tracemalloc.start()
    try:
        decode_words(Mode.SPARSE, memoryview(sparse(ranks=ranks, signs=signs, large=large + sizes)), before)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(before, after)
    assert peak < 60 * 2**17 + MIB
