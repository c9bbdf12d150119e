"""Deltas that an origin makes, read by the client that was written from section 10.1 of docs/protocol.md alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from independent.delta import apply_delta
from independent.values import Refused

from shardcast.codec.delta import encode

CHUNK = 64 * 1024
MIB = 2**20


def delta_of(folder: Path, base: bytes, result: bytes) -> bytes:
    (folder / "base").write_bytes(base)
    (folder / "result").write_bytes(result)
    size = encode(folder / "base", folder / "result", folder / "delta", chunk_bytes=CHUNK, max_bytes=2**40)
    assert size is not None
    return (folder / "delta").read_bytes()


def weights(kind: str, rng: np.random.Generator) -> tuple[bytes, bytes]:
    """A file, and the one that follows it."""
    words = np.dtype("<u2" if kind.startswith("bf16") else "<u8" if kind == "wide" else "<u4")
    values = rng.normal(0, 0.02, 700_000).astype(np.float32)
    base = (values.view(np.uint32) >> 16).astype("<u2") if words.itemsize == 2 else values.view("<u4")
    if kind == "wide":
        base = rng.integers(0, 2**64, 50_000, dtype=np.uint64)
    share = {"bf16 rare": 0.02, "bf16 dense": 0.6, "f32": 1.0, "wide": 0.3, "large steps": 0.1}[kind]
    at = np.flatnonzero(rng.random(len(base)) < share)
    steps = rng.choice([-1, 1], len(at)) * rng.geometric(0.4, len(at))
    if kind in ("wide", "large steps"):
        steps = rng.integers(-(2**31), 2**31, len(at)) * (2**31 if kind == "wide" else 1)
    result = base.copy()
    result[at] += steps.astype(np.int64).astype(words)
    return base.tobytes(), result.tobytes()


@pytest.mark.parametrize("kind", ["bf16 rare", "bf16 dense", "f32", "wide", "large steps"])
def test_what_an_origin_makes_is_what_the_page_says(tmp_path: Path, kind: str) -> None:
    base, result = weights(kind, np.random.default_rng(21))
    delta = delta_of(tmp_path, base, result)
    assert apply_delta(delta, base, {"chunk_bytes": CHUNK, "payload_bytes": len(base)}) == result


def test_any_bytes_and_unchanged_windows(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    base = rng.bytes(5 * MIB + 3)
    for result in (base, base[: 4 * MIB] + rng.bytes(MIB + 3), base[:-1] + b"!"):
        delta = delta_of(tmp_path, base, result)
        assert apply_delta(delta, base, {"chunk_bytes": CHUNK, "payload_bytes": len(base)}) == result


def test_a_delta_that_was_altered_ends_as_a_refusal_or_in_other_bytes(tmp_path: Path) -> None:
    """Whatever a relay sends: no crash, and no allocation beyond the window."""
    rng = np.random.default_rng(3)
    base, result = (data[:60_000] for data in weights("bf16 rare", rng))
    delta = delta_of(tmp_path, base, result)
    full = {"chunk_bytes": CHUNK, "payload_bytes": len(base)}
    for cut in range(0, len(delta), 7):
        with pytest.raises(Refused):
            apply_delta(delta[:cut], base, full)
    for _ in range(300):
        at = int(rng.integers(len(delta)))
        broken = delta[:at] + bytes([delta[at] ^ int(rng.integers(1, 256))]) + delta[at + 1 :]
        try:
            assert len(apply_delta(broken, base, full)) == len(base)
        except Refused as refused:
            assert refused.code == "bad_delta"
