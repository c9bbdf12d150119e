"""Honest workers of a calibration: every available engine and attention kernel, with few and many slots in flight."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coordinator.calibration.measure import draw
from coordinator.calibration.slots import SyntheticSlots
from node.commands.engine_options import engine_maker
from node.engines.base import Engine
from node.engines.device import find_device
from node.engines.torch import TorchEngine
from node.engines.vllm import VllmEngine
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout

log = logging.getLogger(__name__)

IN_FLIGHT = (1, 8, 32)
"""Slots a worker has in flight; groups are spread evenly over these."""


class EagerEngine(TorchEngine):
    """Torch engine with attention as plain matrix products, in place of torch's fused kernel."""

    async def load(self, path: Path, *, version: int) -> None:
        await super().load(path, version=version)
        model: Any = self.policy.model
        model.set_attn_implementation("eager")


class NoOneDnnEngine(TorchEngine):
    """Torch engine without oneDNN, whose convolution and LSTM kernels round differently.

    oneDNN is off in the whole process until `close`.
    """

    def __init__(self, spec: RunSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self._flags = contextlib.ExitStack()
        self._flags.enter_context(without_onednn())

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self._flags.close()


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN in this process within the context."""
    flags: Any = torch.backends.mkldnn  # its `flags` context would also change matmul precision
    before = flags.enabled
    flags.enabled = False
    try:
        yield
    finally:
        flags.enabled = before


@dataclass(frozen=True, slots=True)
class HonestWorker:
    """An honest worker: its name, and a factory of its engine, given a private folder."""

    name: str
    make: Callable[[RunSpec, Path], Engine]

    @contextlib.asynccontextmanager
    async def running(self, spec: RunSpec, policy: Path) -> AsyncIterator[Engine]:
        """Yield the engine with the policy loaded as version 0."""
        with tempfile.TemporaryDirectory() as folder:
            engine = self.make(spec, Path(folder))
            try:
                await engine.load(policy, version=0)
                yield engine
            finally:
                await engine.close()

    async def draw(
        self, spec: RunSpec, policy: Path, slots: SyntheticSlots, *, groups: int, in_flight: Sequence[int] = IN_FLIGHT
    ) -> list[list[Rollout]]:
        """Draw `groups` groups, in equal parts with each number of slots in flight."""
        async with self.running(spec, policy) as engine:
            return await _draw_slots(engine, slots, slots.allocate(groups), in_flight=in_flight)


class PolicyWorker:
    """A worker that draws one policy several times: vLLM, which takes minutes to start, stays until `close`."""

    def __init__(self, worker: HonestWorker, policy: Path) -> None:
        self.name = worker.name
        self._worker, self._policy = worker, policy
        self._running = contextlib.AsyncExitStack()
        self._kept: VllmEngine | None = None

    async def draw(
        self, spec: RunSpec, slots: SyntheticSlots, numbers: Sequence[int], *, in_flight: Sequence[int] = IN_FLIGHT
    ) -> list[list[Rollout]]:
        """Draw the slots `numbers` as `HonestWorker.draw`; `spec` may differ from the last draw's in its proofs."""
        if self._kept is not None:
            await self._kept.prove(spec.proofs)
            return await _draw_slots(self._kept, slots, numbers, in_flight=in_flight)
        engine = await self._running.enter_async_context(self._worker.running(spec, self._policy))
        if isinstance(engine, VllmEngine):
            self._kept = engine
        try:
            return await _draw_slots(engine, slots, numbers, in_flight=in_flight)
        finally:
            if self._kept is None:
                await self.close()

    async def close(self) -> None:
        """End what stays; idempotent."""
        self._kept = None
        await self._running.aclose()


async def _draw_slots(
    engine: Engine, slots: SyntheticSlots, numbers: Sequence[int], *, in_flight: Sequence[int]
) -> list[list[Rollout]]:
    drawn: list[list[Rollout]] = []
    for index, at_once in enumerate(in_flight):
        first, last = (len(numbers) * bound // len(in_flight) for bound in (index, index + 1))
        drawn += await draw(engine, [slots.requests(slot) for slot in numbers[first:last]], at_once=at_once)
        if last < len(numbers):
            log.info("%d of %d groups are drawn", last, len(numbers))
    return drawn


_KERNELS: Mapping[str, type[TorchEngine]] = {"torch sdpa": TorchEngine, "torch eager": EagerEngine}
_RECURRENT_KERNELS: Mapping[str, type[TorchEngine]] = {"torch": TorchEngine, "torch without oneDNN": NoOneDnnEngine}


def make_workers(
    engines: Sequence[str],
    *,
    device: str = "auto",
    threads: int | None = None,
    recurrent: bool = False,
    **settings: Any,
) -> list[HonestWorker]:
    """Make the workers of each of `engines` ("torch", "vllm"), for a policy with attention or a recurrent one.

    The other arguments are those of `node.commands.engine_options.engine_maker`.
    """
    workers: list[HonestWorker] = []
    for engine in dict.fromkeys(engines):
        if engine == "torch":
            kernels = _RECURRENT_KERNELS if recurrent else _KERNELS
            own = {"device": find_device(device), "threads": threads or 1}
            workers += [HonestWorker(name, _torch_maker(made, own)) for name, made in kernels.items()]
        else:
            options = {**settings, "device": device, "threads": threads}
            workers.append(HonestWorker(engine, _engine_maker(engine, options)))
    return workers


def _torch_maker(made: type[TorchEngine], options: Mapping[str, Any]) -> Callable[[RunSpec, Path], Engine]:
    return lambda spec, _: made(spec, **options)


def _engine_maker(engine: str, options: Mapping[str, Any]) -> Callable[[RunSpec, Path], Engine]:
    return lambda spec, folder: engine_maker(engine, state=folder, **options)(spec)
