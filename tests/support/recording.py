"""An engine's steps, without a model: states and logits at random, and what a recorder has to make of them."""

from __future__ import annotations

import zlib

import pytest
import torch

from node.engines.recorder import DecodeRow, Recorded, Recorder
from node.protocol.run import ProofSpec
from node.protocol.sampling import gumbel_noise
from toploc import build_chunk_proofs, build_chunk_sketches

HIDDEN, SPAN, VOCABULARY = 48, 4, 33
PROOFS = ProofSpec(scheme="toploc/1+sketch/1", chunk_tokens=SPAN, top_k=8)
CPU = torch.device("cpu")


class Model:
    """States and logits of each completion's positions under each version, drawn once."""

    def __init__(self) -> None:
        self._drawn: dict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, name: str, position: int, version: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = name, position, version
        if key not in self._drawn:
            generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
            self._drawn[key] = torch.randn(HIDDEN, generator=generator), torch.randn(VOCABULARY, generator=generator)
        return self._drawn[key]


def seed_of(name: str) -> bytes:
    return name.encode().ljust(16, b"\0")


def step(recorder: Recorder, model: Model, rows: list[tuple[str, int] | None]) -> list[int]:
    """One step of an engine; None is a prompt that is not read to its end. The tokens that its argmax chooses."""
    places = [row and DecodeRow(row[0], seed_of(row[0]), row[1]) for row in rows]
    drawn = [model.at(*(row or ("nobody", 0)), recorder.version) for row in rows]
    recorder.begin(places, torch.stack([hidden for hidden, _ in drawn]))
    logits = recorder.sample(torch.stack([logits for _, logits in drawn]).clone())
    recorder.end()
    return logits.argmax(-1).tolist()


def expected(model: Model, name: str, versions: list[int]) -> Recorded:
    """The record of a completion whose position p was drawn under `versions[p]`, computed without a recorder."""
    tokens, logprobs, chunks, start = [], [], [], 0
    for position, version in enumerate(versions):
        scaled = model.at(name, position, version)[1] / 0.7
        noise = torch.from_numpy(gumbel_noise([seed_of(name)], [position], vocabulary=VOCABULARY))[0]
        tokens.append(int((scaled + noise).argmax()))
        logprobs.append(float(scaled.log_softmax(-1)[tokens[-1]]))
    for position in range(1, len(versions) + 1):
        cut = position == len(versions) or versions[position] != versions[start] or position - start == SPAN
        if cut:
            states = [model.at(name, at, versions[at])[0] for at in range(start, position)]
            chunks.append(torch.stack(states).bfloat16())
            start = position
    distinct = list(dict.fromkeys(versions))
    sketches = build_chunk_sketches(chunks, [seed_of(name)] * len(chunks), step=PROOFS.sketch_step)
    return Recorded(
        tokens=tokens,
        logprobs=logprobs,
        segment_versions=distinct,
        segment_tokens=[versions.count(version) for version in distinct],
        proofs=[a + b for a, b in zip(build_chunk_proofs(chunks, PROOFS.top_k), sketches, strict=True)],
    )


def assert_same(ours: Recorded, theirs: Recorded) -> None:
    assert ours.fault is None
    assert ours.tokens == theirs.tokens
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert (ours.segment_versions, ours.segment_tokens) == (theirs.segment_versions, theirs.segment_tokens)
    assert ours.proofs == theirs.proofs
