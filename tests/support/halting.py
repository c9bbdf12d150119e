"""An engine that stands still at a step of the test's choice, so that what arrives meanwhile arrives in flight."""

from __future__ import annotations

import asyncio
import threading
from itertools import count

import pytest

from node.engines.torch import Batch

SECONDS = 60.0


class Halt:
    """Holds the engine's thread before its step number `at`, until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
        self.reached, self.go, steps, step = threading.Event(), threading.Event(), count(), Batch.step

        def halting(batch: Batch, *arguments: object) -> None:
            if next(steps) == at:
                self.reached.set()
                assert self.go.wait(SECONDS)
            step(batch, *arguments)

        monkeypatch.setattr(Batch, "step", halting)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, SECONDS)
