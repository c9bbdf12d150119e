"""What a GPU would do to the recorder, on a machine that has none.

A GPU's tensors are computed after the calls that ask for them. Whoever reads one too early proves what the memory held
before, an honest worker is rejected and nobody knows why; whoever waits for one in each step makes every step slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller

import numpy as np
import pytest
import torch
from recording import CPU, HIDDEN, PROOFS, SPAN, VOCABULARY, Model, assert_same, expected, seed_of, step
from torch import Tensor

from benchmarks.lagging import META, counted_waits, cuda_sampling_on_meta
from node.engines import recorder as recorder_module
from node.engines.recorder import DecodeRow, Recorder
from node.engines.streams import Taken
from node.sampling import forced, transfers
from node.sampling.types import Choice


class Late:
    """Streams of a device that lags: what is handed over is garbage until whoever takes it has waited."""

    def __init__(self) -> None:
        self.handed_over = 0

    def hand_over(self, tensors: Sequence[Tensor]) -> Taken:
        self.handed_over += 1
        computed = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        return self._take(tensors, computed)

    @contextlib.contextmanager
    def _take(self, tensors: Sequence[Tensor], computed: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        for tensor, right in zip(tensors, computed, strict=True):
            tensor.copy_(right)
        yield tensors
        for tensor in tensors:
            tensor.zero_()


def test_what_a_lagging_device_computes_is_waited_for_on_every_way_to_a_proof() -> None:
    """Full chunks, a chunk cut by another policy, and a completion's last one, with tokens and log-probabilities."""
    streams, model = Late(), Model()
    recorder = Recorder(hidden=HIDDEN, proofs=PROOFS, temperature=0.7, version=7, device=CPU, streams=streams)
    versions = [7] * (SPAN + 2) + [8] * (SPAN + 1)
    for position, version in enumerate(versions):
        recorder.version = version
        step(recorder, model, [("a", position), None, ("b", position)])
    records = recorder.collect([("a", len(versions)), ("b", len(versions))])
    for name, record in zip("ab", records, strict=True):
        assert_same(record, expected(model, name, versions))
    assert streams.handed_over == 4


@pytest.mark.parametrize("sampling", ["none", "cuda"])
def test_a_step_on_a_device_waits_for_no_copy(sampling: str, no_waiting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that join, that nobody wants, that leave, whose chunk is full, and whose policy changes."""
    if sampling == "cuda":
        pytest.importorskip("node.sampling.cuda", exc_type=ImportError)
    proved: list[int] = []
    monkeypatch.setattr(recorder_module, "_complete_chunks", lambda chunks, _taken, **_: proved.append(len(chunks)))
    chooses = forced.choose if sampling == "cuda" else choose_anything
    recorder = Recorder(
        hidden=HIDDEN, proofs=PROOFS, temperature=0.7, version=7, device=META, choose=chooses, streams=Late()
    )
    with cuda_sampling_on_meta() if sampling == "cuda" else contextlib.nullcontext():
        for position in range(2 * SPAN + 1):
            recorder.version = 7 if position < SPAN + 2 else 8
            names = ["a", "b", None, "c"] if position % 2 else ["a", "b", "c"]
            rows = [name and DecodeRow(name, seed_of(name), position) for name in names]
            recorder.begin(rows, torch.empty(len(rows), HIDDEN, device=META))
            recorder.sample(torch.empty(len(rows), VOCABULARY, device=META))
            recorder.end()
    recorder.drop(["a", "b", "c"])
    recorder.collect([])
    assert proved == [3, 3], "one full chunk each, and one that the other policy cut"


def choose_anything(
    logits: Tensor, _seeds: Sequence[bytes], _positions: Sequence[int], *, temperature: float
) -> Choice:
    assert temperature == 0.7
    return Choice(logits.argmax(-1), logits.amax(-1))


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Fail a test of which an operation waits for the device, for which "meta" stands."""
    with counted_waits() as waits:
        yield
    assert not waits, "a step waits for the device"


def test_the_check_finds_what_waits() -> None:
    """Otherwise the tests above could not fail."""
    states = torch.empty(3, device=META)
    waits: list[Callable[[Tensor], object]] = [
        methodcaller("tolist"),
        methodcaller("cpu"),
        lambda tensor: tensor[0].item(),
        lambda tensor: bool(tensor.isfinite().all()),
        lambda _: torch.tensor([1], device=META),
        lambda _: torch.zeros(1).to(META),
        lambda _: torch.zeros(1).to(META, non_blocking=True),
    ]
    for wait in waits:
        with counted_waits() as found:
            wait(states)
        assert len(found) == 1
    with counted_waits() as found, pytest.raises((NotImplementedError, RuntimeError)):
        states.nonzero()
    with counted_waits() as found:
        assert transfers.to_device(np.zeros(3), META).device == META
    assert not found
