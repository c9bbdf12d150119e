"""What a GPU would do to the recorder, on a machine that has none.

A GPU's tensors are computed after the calls that ask for them. Whoever reads one too early proves what the memory held
before, an honest worker is rejected and nobody knows why; whoever waits for one in each step makes every step slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from recording import CPU, HIDDEN, PROOFS, SPAN, VOCABULARY, Model, assert_same, expected, seed_of, step
from torch import Tensor

from node.engines import recorder as recorder_module
from node.engines.recorder import DecodeRow, Recorder
from node.engines.streams import Taken
from node.sampling import transfers
from node.sampling.types import Choice

META = torch.device("meta")


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


def test_a_step_on_a_device_waits_for_no_copy(no_waiting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that join, that nobody wants, that leave, whose chunk is full, and whose policy changes."""
    proved: list[int] = []
    monkeypatch.setattr(recorder_module, "_complete_chunks", lambda chunks, _taken, **_: proved.append(len(chunks)))
    recorder = Recorder(
        hidden=HIDDEN, proofs=PROOFS, temperature=0.7, version=7, device=META, choose=choose_anything, streams=Late()
    )
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


def test_the_gpus_sampling_waits_for_no_copy(no_waiting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("node.sampling.cuda", exc_type=ImportError)
    monkeypatch.setattr(cuda, "_blocks", {(2, 1): lambda *_, **__: None})
    monkeypatch.setattr(cuda, "_table", lambda _: None)
    seeds, positions = np.zeros((2, 4), np.uint32), np.zeros(2, np.uint32)
    peaks = cuda.peaks(torch.empty(2, VOCABULARY, device=META), seeds, positions, 1.0)
    assert peaks.tokens.device == META


def choose_anything(
    logits: Tensor, _seeds: Sequence[bytes], _positions: Sequence[int], *, temperature: float
) -> Choice:
    assert temperature == 0.7
    return Choice(logits.argmax(-1), logits.amax(-1))


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every operation fail that waits for a device, for which "meta" stands, as reading a tensor of its does.

    A meta tensor has no values: `item`, `tolist`, `nonzero`, `cpu` and whatever is built on them raise by themselves.
    """
    pinned = set[int]()

    def pin(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        pinned.add(copy.data_ptr())
        return copy

    def to(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def checked(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
            moved = original(tensor, *arguments, **options)
            if moved.device == META and tensor.device == CPU:
                assert options.get("non_blocking"), "a copy that waits for the device"
                assert tensor.data_ptr() in pinned, "a copy from memory that is not pinned waits for the device"
            return moved

        return checked

    def tensor(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def checked(*arguments: Any, **options: Any) -> Tensor:
            made = original(*arguments, **options)
            assert made.device == CPU, "a copy from memory that is not pinned waits for the device"
            return made

        return checked

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to(Tensor.to))
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, tensor(getattr(torch, name)))


def test_the_check_finds_what_waits(no_waiting: None) -> None:
    """Otherwise the tests above could not fail."""
    states = torch.empty(3, device=META)
    waits: list[Callable[[], object]] = [
        states.tolist,
        states.cpu,
        states.nonzero,
        states[0].item,
        lambda: bool(states.isfinite().all()),
        lambda: torch.tensor([1], device=META),
        lambda: torch.zeros(1).to(META),
        lambda: torch.zeros(1).to(META, non_blocking=True),
    ]
    for wait in waits:
        with pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
            wait()
    assert transfers.to_device(np.zeros(3), META).device == META
