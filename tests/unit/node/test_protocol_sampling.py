"""Forced sampling: two machines that disagree on one bit of noise would call each other frauds."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from locations import VECTORS_FOLDER

from node.protocol import sampling
from node.protocol.sampling import TABLE_DIGEST, gumbel_noise, gumbel_table, philox4x32, table_index

VECTORS = json.loads((VECTORS_FOLDER / "protocol" / "sampling.json").read_text())
MASK = 0xFFFFFFFF

# Random123 1.14, tests/kat_vectors.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """Section 4.1 in plain integers, written apart from the code under test."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second & MASK, (first >> 32) ^ c[3] ^ k[1], first & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def scalar_index(word: int) -> int:
    """Section 4.2: the word itself below 2**12, else its octave and its eleven bits below the leading one."""
    octave = max(word.bit_length() - 12, 0)
    return 2048 * octave + (word >> octave)


def scalar_entry(index: int) -> float:
    """Section 4.2: the Gumbel quantile of the middle of a bin, rounded once to float32."""
    octave = max(index // 2048 - 1, 0)
    middle = ((index - 2048 * octave) * 2**octave + 2**octave / 2) / 2**32
    return struct.unpack("<f", struct.pack("<f", -math.log(-math.log1p(-middle))))[0]


def scalar_noise(seed: bytes, position: int, token: int) -> float:
    """Section 4.3."""
    words = struct.unpack("<4I", seed)
    out = scalar_philox([token // 4, position, words[2], words[3]], [words[0], words[1]])
    return float(gumbel_table()[scalar_index(out[token % 4])])


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    out = philox4x32(np.array(counter, dtype=np.uint64), np.array(key, dtype=np.uint64))
    assert out.tolist() == expected == scalar_philox(counter, key)
    assert {"counter": _hex(counter), "key": _hex(key), "output": _hex(expected)} in VECTORS["philox4x32_10"]


def _hex(words: list[int]) -> list[str]:
    return [f"{word:08x}" for word in words]


@given(st.lists(st.integers(0, MASK), min_size=6, max_size=6))
@settings(max_examples=100, deadline=None)
def test_philox_is_the_same_in_plain_integers(words: list[int]) -> None:
    out = philox4x32(np.array(words[:4], dtype=np.uint64), np.array(words[4:], dtype=np.uint64))
    assert out.tolist() == scalar_philox(words[:4], words[4:])


@pytest.mark.parametrize(
    ("word", "index"),
    [
        (0, 0),
        (2047, 2047),
        (2048, 2048),
        (4095, 4095),
        (4096, 4096),
        (4097, 4096),
        (4098, 4097),
        (8191, 6143),
        (8192, 6144),
        (2**31 - 1, 43007),
        (2**31, 43008),
        (2**32 - 1, 45055),
    ],
)
def test_a_word_on_an_octaves_edge_has_its_entry(word: int, index: int) -> None:
    assert table_index(np.array([word], dtype=np.uint64)).tolist() == [index] == [scalar_index(word)]


@given(st.integers(0, MASK))
@settings(max_examples=300, deadline=None)
def test_every_word_has_the_entry_of_plain_integers(word: int) -> None:
    assert table_index(np.array([word], dtype=np.uint64)).tolist() == [scalar_index(word)]


def test_every_entry_of_the_table_is_reached_and_ordered() -> None:
    edges = [word for index in range(45056) for word in [_first_word(index)]]
    assert table_index(np.array(edges, dtype=np.uint64)).tolist() == list(range(45056))
    assert (np.diff(gumbel_table()) < 0).all(), "a smaller word must never give less noise"


def _first_word(index: int) -> int:
    octave = max(index // 2048 - 1, 0)
    return (index - 2048 * octave) << octave


def test_the_table_is_bit_for_bit_the_documents() -> None:
    table = gumbel_table()
    assert VECTORS["table"]["entries"] == len(table) == 45056
    assert VECTORS["table"]["digest"] == TABLE_DIGEST
    # math.log is the platform's, numpy's may be vectorised: the pinned digest holds both to the same float32 values.
    assert [scalar_entry(index) for index in range(45056)] == table.tolist()
    for lookup in VECTORS["table"]["lookups"]:
        assert table[scalar_index(lookup["word"])].tobytes().hex() == lookup["float32_le_hex"]


def test_the_table_cannot_be_changed_by_a_caller() -> None:
    with pytest.raises(ValueError, match="read-only"):
        gumbel_table()[0] = 0.0


def test_a_machine_with_another_logarithm_refuses_to_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """An honest worker on such a machine would be rejected as a fraud: better that it never starts."""
    monkeypatch.setattr(sampling, "TABLE_DIGEST", "0" * 64)
    with pytest.raises(ArithmeticError, match="noise table"):
        gumbel_table.__wrapped__()


@pytest.mark.parametrize("vector", VECTORS["noise"], ids=lambda v: f"{v['seed'][:8]}-{v['position']}")
def test_noise_is_bit_for_bit_the_published(vector: dict) -> None:
    seed = bytes.fromhex(vector["seed"])
    noise = gumbel_noise([seed], [vector["position"]], vocabulary=10)[0]
    assert noise.dtype == np.float32
    assert noise.astype("<f4").tobytes().hex() == vector["float32_le_hex"]
    assert [scalar_noise(seed, vector["position"], token) for token in range(10)] == noise.tolist()


@pytest.mark.parametrize("vector", VECTORS["choices"], ids=lambda v: str(v["temperature"]))
def test_choices_are_the_published(vector: dict) -> None:
    seed = bytes.fromhex(vector["seed"])
    for position, token in enumerate(vector["tokens"]):
        scores = [
            np.float32(np.float32(logit) / np.float32(vector["temperature"]))
            + np.float32(scalar_noise(seed, position, at))
            for at, logit in enumerate(vector["logits"])
        ]
        assert scores.index(max(scores)) == token


def test_noise_is_made_in_bounded_memory_and_the_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, the 128 rows of an engine would take gigabytes over a vocabulary of 262,144."""
    seeds, positions = [bytes([row]) * 16 for row in range(3)], [0, 5, 2**32 - 1]
    tracemalloc.start()
    wide = gumbel_noise(seeds, positions, vocabulary=262_144)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - wide.nbytes < 8 * 2**20
    for block in (4, 64, 3 * 131, 2**40):
        monkeypatch.setattr("node.protocol.sampling.BLOCK_VALUES", block - block % 4)
        assert gumbel_noise(seeds, positions, vocabulary=131).tobytes() == wide[:, :131].tobytes()


def test_noise_does_not_depend_on_the_batch_or_the_vocabulary() -> None:
    """A worker batches, a verifier prefills, an auditor looks at one rollout: all must see the same noise."""
    seeds = [bytes([row]) * 16 for row in range(5)]
    positions = [0, 1, 7, 7, 2047]
    together = gumbel_noise(seeds, positions, vocabulary=131)
    assert together.shape == (5, 131)
    for row in range(5):
        alone = gumbel_noise([seeds[row]], [positions[row]], vocabulary=128)[0]
        assert alone.tolist() == together[row, :128].tolist()


def test_every_bit_of_the_seed_and_the_position_change_the_noise() -> None:
    base = bytes(16)
    seen = {gumbel_noise([base], [position], vocabulary=8).tobytes() for position in range(64)}
    for bit in range(128):
        seed = (1 << bit).to_bytes(16, "little")
        seen.add(gumbel_noise([seed], [0], vocabulary=8).tobytes())
    assert len(seen) == 64 + 128


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_a_seed_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        gumbel_noise([bytes(length)], [0], vocabulary=4)


def test_seeds_without_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="one position per seed"):
        gumbel_noise([bytes(16), bytes(16)], [0], vocabulary=4)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_choices_have_the_policys_distribution() -> None:
    """A bias in the noise would train the policy on another distribution than its own."""
    draws, logits = 40_000, np.array([1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.25], dtype=np.float32)
    seed = bytes(range(16))
    noise = gumbel_noise([seed] * draws, list(range(draws)), vocabulary=8)
    counts = np.bincount(np.argmax(logits + noise, axis=1), minlength=8)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    # Seven degrees of freedom: 40 has probability 1e-6; temperature 0.95 in its place must be seen.
    assert chi_square(counts, probabilities) < 40
    sharper = np.exp(logits / 0.95) / np.exp(logits / 0.95).sum()
    assert chi_square(counts, sharper) > 60


def test_noise_itself_is_gumbel_distributed() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)); 2.23 / sqrt(n) has probability 1e-4."""
    noise = np.sort(gumbel_noise([bytes(range(16))] * 400, list(range(400)), vocabulary=128).ravel())
    exact = np.exp(-np.exp(-noise.astype(np.float64)))
    steps = np.arange(len(noise)) / len(noise)
    assert max(np.abs(exact - steps).max(), np.abs(exact - steps - 1 / len(noise)).max()) < 2.23 / len(noise) ** 0.5


def test_no_library_rounds_the_noise_table_another_way():
    """Every value is thousands of units in the last double place away from where it would round to another float."""
    first = np.arange(45_056, dtype=np.int64)
    octave = np.maximum((first >> 11) - 1, 0)
    middle = (((first - (octave << 11)) << octave) + (1 << octave) / 2.0) * 2.0**-32
    exact = -np.log(-np.log1p(-middle))
    dropped_bits = exact.view(np.int64) & ((1 << 29) - 1)
    assert int(np.abs(dropped_bits - (1 << 28)).min()) == 2924
