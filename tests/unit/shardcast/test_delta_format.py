"""The delta format as its documents state it: a second decoder, written from them in plain Python, agrees."""

from __future__ import annotations

import itertools
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.codec.delta import encode
from shardcast.codec.layout import MAX_SEGMENTS, WordLayout, read_layout
from shardcast.codec.word_codec import MAX_SEGMENT_WORDS, WORD_TYPES, Mode, decode_words, encode_words
from tests.unit.shardcast.test_delta import bfloat16, nudged, safetensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawn")


class Plain:
    """Reads a body with nothing but integers."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        assert self.at <= len(self.data)
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def bits(self, count: int) -> list[int]:
        string = self.number((count + 7) // 8)
        assert string >> count == 0, "the last byte is filled up with zeros"
        return [string >> index & 1 for index in range(count)]

    def unary(self, length: int) -> list[int]:
        text = "".join(map(str, self.bits(length)))
        assert text == "" or text.endswith("1")
        return [len(zeros) for zeros in text.split("1")[:-1]]

    def set(self) -> list[int]:
        count, length, k = self.number(4), self.number(4), self.number(1)
        gaps = [quotient << k for quotient in self.unary(length)]
        assert len(gaps) == count
        for bit in range(k):
            gaps = [gap | value << bit for gap, value in zip(gaps, self.bits(count), strict=True)]
        found, previous = [], -1
        for gap in gaps:
            previous += gap + 1
            found.append(previous)
        return found

    def sizes(self, count: int) -> list[int]:
        if count == 0:
            return []
        length, k = self.number(4), self.number(1)
        logarithms = [zeros + k for zeros in self.unary(length)]
        numbers = [1 << logarithm for logarithm in logarithms]
        for bit in range(max(logarithms)):
            inside = [index for index, logarithm in enumerate(logarithms) if logarithm > bit]
            for index, value in zip(inside, self.bits(len(inside)), strict=True):
                numbers[index] |= value << bit
        return [number - (1 << k) for number in numbers]

    def planes(self, words: int, width: int) -> list[int]:
        values = [0] * words
        for plane in range(width):
            data = self.take(self.number(4))
            data = data if len(data) == words else zstandard.decompress(data)
            values = [value | byte << 8 * plane for value, byte in zip(values, data, strict=True)]
        return values


def decode_plainly(mode: int, body: bytes, words: list[int], width: int) -> list[int]:
    read, top, result = Plain(body), 1 << 8 * width - 1, list(words)
    if mode == 1:
        classes = read.number(1)
        bounds = [top + 1, *(read.number(8) for _ in range(classes - 1)), 0]
        for high, low in pairwise(bounds):
            members = [index for index, word in enumerate(words) if low <= word & top - 1 < high]
            ranks = read.set()
            places = ranks if high > top else [members[rank] for rank in ranks]
            signs = [-1 if bit else 1 for bit in read.bits(len(ranks))]
            large = read.set()
            for index, size in zip(large, read.sizes(len(large)), strict=True):
                signs[index] *= size + 2
            for place, step in zip(places, signs, strict=True):
                result[place] = (words[place] + step) % (2 * top)
    elif mode == 2:
        zigzag = read.planes(len(words), width)
        result = [(word + (value >> 1 ^ -(value & 1))) % (2 * top) for word, value in zip(words, zigzag, strict=True)]
    elif mode == 3:
        result = read.planes(len(words), width)
    assert read.at == len(body)
    return result


def decode_file(delta: bytes, base: bytes) -> bytes:
    read = Plain(delta)
    assert read.take(8) == b"SCDELTA1"
    result_bytes, window_bytes = read.number(8), read.number(8)
    windows = -(-result_bytes // window_bytes)
    lengths = [read.number(4) for _ in range(windows)]
    result = b""
    for index, length in enumerate(lengths):
        window = base[index * window_bytes : (index + 1) * window_bytes]
        change = Plain(read.take(length))
        if length == 0:
            result += window
            continue
        segments = [struct.unpack("<BBII", change.take(10)) for _ in range(change.number(2))]
        at = 0
        for mode, width, count, body_bytes in segments:
            words = [int.from_bytes(window[at + i * width : at + (i + 1) * width], "little") for i in range(count)]
            decoded = decode_plainly(mode, change.take(body_bytes), words, width)
            result += b"".join(word.to_bytes(width, "little") for word in decoded)
            at += count * width
        assert at == len(window)
        assert change.at == length
    assert read.at == len(delta)
    return result


def change(width: int, count: int, share: float, kind: str, seed: int) -> tuple[Any, Any]:
    """Words before and after: what weights, counters and noise do."""
    rng = np.random.default_rng(seed)
    dtype = WORD_TYPES[width]
    base = np.frombuffer(rng.bytes(width * count), dtype)
    if kind == "graded":  # as floats are: half of the words in each octave below the last
        base = base >> rng.integers(0, 8 * width, count).astype(dtype)
    at = np.flatnonzero(rng.random(count) < share)
    if kind == "graded":
        at = at[np.argsort(base[at])[: len(at) // 2 + 1]]
        at.sort()
    steps = np.frombuffer(rng.bytes(width * len(at)), dtype)
    if kind == "small":
        steps = (steps % 5 - 2).astype(dtype)
    elif kind == "graded":
        steps = steps >> rng.integers(0, 8 * width, len(at)).astype(dtype)
    result = base.copy()
    result[at] += steps
    return base, result


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3000),
    st.sampled_from([0.001, 0.03, 0.3, 0.6, 1.0]),
    st.sampled_from(["small", "any", "graded"]),
    st.integers(0, 2**32),
)
def test_words_survive_both_decoders(width: int, count: int, share: float, kind: str, seed: int) -> None:
    base, result = change(width, count, share, kind, seed)
    mode, body = encode_words(base, result)
    assert len(body) <= result.nbytes + 4 * width
    words = base.copy()
    decode_words(mode, memoryview(body), words)
    assert np.array_equal(words, result)
    assert decode_plainly(mode, body, base.tolist(), width) == result.tolist()


def test_every_mode_and_the_classes_occur() -> None:
    """What the test above draws is not all of one mode."""
    weights = np.random.default_rng(0).standard_normal(2**16) * 0.02
    moved = bfloat16(weights + 1e-5 * np.random.default_rng(1).standard_normal(2**16))
    words = bfloat16(weights)
    noise = np.random.default_rng(2).integers(0, 2**16, 2**16, np.uint16)
    cases = {
        (Mode.UNCHANGED, None): words,
        (Mode.SPARSE, 1): nudged(words, 0.01),
        (Mode.DENSE, None): nudged(words, 1.0),
        (Mode.FRESH, None): np.where(noise > 9, words[0], words),
    }
    for (expected, classes), result in cases.items():
        mode, body = encode_words(words, result)
        assert mode is expected
        assert classes is None or body[0] == classes
        assert decode_plainly(mode, body, words.tolist(), 2) == result.tolist()
    mode, body = encode_words(words, moved)
    assert mode is Mode.SPARSE
    assert body[0] > 2, "too few classes for an optimiser's step"
    assert decode_plainly(mode, body, words.tolist(), 2) == moved.tolist()


def test_the_largest_steps_of_every_width() -> None:
    """Half of the range has no counterpart of the other sign; it must not lose its sign or its bits."""
    for width, dtype in WORD_TYPES.items():
        half = 1 << 8 * width - 1
        base = np.zeros(200, dtype)
        result = base.copy()
        result[[3, 50, 120, 199]] = [half, half - 1, half + 1, 2 * half - 1]
        mode, body = encode_words(base, result)
        assert mode is Mode.SPARSE
        words = base.copy()
        decode_words(mode, memoryview(body), words)
        assert np.array_equal(words, result)
        assert decode_plainly(mode, body, base.tolist(), width) == result.tolist()


def test_a_file_by_the_second_decoder(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    norms, weights = rng.standard_normal(300).astype(np.float32), rng.standard_normal(5000) * 0.02
    tensors = [
        {"a": ("F32", data.tobytes()), "b": ("BF16", words.tobytes()), "c": ("U8", bytes(13))}
        for data, words in (
            (norms, bfloat16(weights)),
            (norms * np.float32(1.0001), nudged(bfloat16(weights), 0.02)),
        )
    ]
    base, result = (safetensors(each, pad=1) for each in tensors)
    (tmp_path / "base").write_bytes(base)
    (tmp_path / "result").write_bytes(result)
    encode(tmp_path / "base", tmp_path / "result", tmp_path / "delta", chunk_bytes=4096, max_bytes=2**30)
    assert decode_file((tmp_path / "delta").read_bytes(), base) == result


GOLDEN = bytes.fromhex(
    "534344454c544131 4000000000000000 0000400000000000"  # magic, 64 bytes in windows of 4 MiB
    "2c000000"  # one change of 44 bytes
    "0100 01 01 40000000 20000000"  # one segment: sparse, 64 words of one byte, 32 bytes of body
    "01"  # one class
    "03000000 08000000 00 92"  # words 1, 4 and 7: gaps of 1, 2 and 2 in unary
    "04"  # the last step is down
    "01000000 02000000 00 02"  # the second is not +-1
    "01000000 04 01 00 00 01 01"  # it is 2 + 12; 12 + 2**4 = 28 is 1, then 1 1 0 0
)


def test_golden_delta(tmp_path: Path) -> None:
    """Files that others have stored stay readable."""
    base = bytes(range(64))
    result = bytearray(base)
    result[1], result[4], result[7] = 2, 18, 6
    (tmp_path / "base").write_bytes(base)
    (tmp_path / "result").write_bytes(result)
    encode(tmp_path / "base", tmp_path / "result", tmp_path / "delta", chunk_bytes=4096, max_bytes=2**30)
    made = (tmp_path / "delta").read_bytes()
    assert made == GOLDEN
    assert decode_file(made, base) == result


# The layout


HOSTILE_HEADERS = {
    "length beyond the file": (2**63).to_bytes(8, "little") + bytes(100),
    "length of all the file": (100).to_bytes(8, "little") + bytes(100),
    "no json": (50).to_bytes(8, "little") + b"\xff" * 100,
    "nothing": bytes(100),
    "deep json": (5000).to_bytes(8, "little") + b'{"a":' * 1000 + bytes(100),
    "list": (2).to_bytes(8, "little") + b"[]" + bytes(100),
    "surrogates": (12).to_bytes(8, "little") + b'{"\\ud800":1}' + bytes(100),
}
HOSTILE_OFFSETS = [
    [-8, 8], [8, -8], [0, 10**30], [90, 10], [0, 2**63], [1, 2], [3, 9], [0, 5], [64, 128], [0, 0], [-(2**70), 2**70],
]  # fmt: skip


def check_layout(layout: WordLayout, size: int, window: int) -> None:
    for start in range(0, size, window):
        stop = min(start + window, size)
        segments = layout.segments(start, stop)
        assert sum(width * words for width, words in segments) == stop - start
        assert len(segments) <= MAX_SEGMENTS
        assert all(width in WORD_TYPES and 0 < words <= MAX_SEGMENT_WORDS for width, words in segments)


def layout_of(tmp_path: Path, data: bytes) -> WordLayout:
    path = tmp_path / "weights"
    path.write_bytes(data)
    with path.open("rb") as file:
        return read_layout(file.fileno(), len(data))


@pytest.mark.parametrize("data", HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS)
def test_a_strange_file_is_bytes(tmp_path: Path, data: bytes) -> None:
    layout = layout_of(tmp_path, data)
    assert layout.segments(0, len(data)) == [(1, len(data))]


def test_lying_offsets_cost_no_byte(tmp_path: Path) -> None:
    """Tensors that overlap, or lie outside of the file or in its header, are not believed."""
    tensor = '{"dtype":"F64","shape":[],"data_offsets":%s}'
    for first, second in itertools.product(HOSTILE_OFFSETS, repeat=2):
        text = f'{{"a":{tensor % first},"b":{tensor % second},"c":{tensor % [64, 80]}}}'.replace("'", "").encode()
        data = len(text).to_bytes(8, "little") + text + bytes(123)
        for window in (1, 7, 64, len(data)):
            check_layout(layout_of(tmp_path, data), len(data), window)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["BF16", "F32", "F64", "U8"]), st.integers(0, 60))), st.integers(1, 200))
def test_words_keep_their_phase_across_windows(folder: Path, tensors: list[tuple[str, int]], window: int) -> None:
    """A window may cut a word; the words after the cut must be whole again."""
    width_of = {"BF16": 2, "F32": 4, "F64": 8, "U8": 1}
    named = {f"t{index}": (dtype, bytes(width_of[dtype] * count)) for index, (dtype, count) in enumerate(tensors)}
    data = safetensors(named, pad=1)
    layout = layout_of(folder, data)
    check_layout(layout, len(data), window)
    begins: dict[int, int] = {}
    at = len(data) - sum(len(each) for _, each in named.values())
    for dtype, each in named.values():
        begins |= dict.fromkeys(range(at, at + len(each), width_of[dtype]), width_of[dtype])
        at += len(each)
    for start in range(0, len(data), window):
        at, stop = start, min(start + window, len(data))
        for width, words in layout.segments(start, stop):
            places = range(at, at + width * words, width)
            assert width == 1 or all(begins[place] == width for place in places)
            at = places.stop
    whole = layout.segments(0, len(data))
    assert sum(words for width, words in whole if width > 1) == sum(1 for width in begins.values() if width > 1)


def test_more_tensors_than_segments(tmp_path: Path) -> None:
    """Thousands of tiny tensors of alternating types: a window's table stays bounded."""
    tensors = {f"t{index}": ("BF16" if index % 2 else "F32", bytes(8)) for index in range(5000)}
    data = safetensors(tensors)
    layout = layout_of(tmp_path, data)
    check_layout(layout, len(data), 2**26)
    check_layout(layout, len(data), 4096)
