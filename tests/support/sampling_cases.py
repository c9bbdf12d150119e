"""What the tests of forced sampling give its kernels."""

from __future__ import annotations

import numpy as np
import torch


def problem(rows, vocabulary, *, scale=3.0, seed=0):
    """Logits, seeds and positions; a fifth of the logits at -inf, never a whole row."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    logits[torch.rand(rows, vocabulary, generator=generator) < 0.2] = -torch.inf
    logits[:, vocabulary // 2] = 0.5
    random = np.random.default_rng(seed)
    return logits, [random.bytes(16) for _ in range(rows)], random.integers(0, 2**32, rows).tolist()


def words_of(seeds):
    return np.frombuffer(b"".join(seeds), "<u4").reshape(-1, 4).astype(np.uint32)


def edge_words():
    """Both ends of every entry of the table, the powers of 2 and their neighbours, and a random sample."""
    index = np.arange(45_056, dtype=np.int64)
    octave = np.maximum((index >> 11) - 1, 0)
    low = (index - (octave << 11)) << octave
    powers = 1 << np.arange(32, dtype=np.int64)
    random = np.random.default_rng(5).integers(0, 2**32, 50_000)
    return np.concatenate([low, low + (1 << octave) - 1, powers - 1, powers, powers + 1, random]).astype(np.uint32)
