"""Reference prefill through vLLM, for verifying policies that only vLLM can hold.

The engine holds one policy at a time, and reads each span once, without a prefix cache, in one step or several. Final
hidden states stay in vLLM's worker process, where the measurements are made (`node.verification.spans`); only
they come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from node.engines.base import EngineDied, EngineError
from node.engines.vllm_host import VllmHost, link_file
from node.engines.vllm_settings import VllmSettings, check_family
from node.errors import EngineFailed
from node.policy.file import Blueprint
from node.policy.reading import inspect_once
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec
from node.verification.deviations import SpanMeasured
from node.verification.spans import Span

MAX_BATCH_TOKENS = 32 * 1024
"""Tokens whose hidden states are held at once, unless one span has more."""


class VllmVerifier:
    """Makes `Prefill`s of policies that share one vLLM engine on the running event loop.

    `state` is a private folder for the policies vLLM reads and the files of the `Prefill`s in use. Second looks are
    computed on `device`, beside vLLM, which has most of a GPU's memory: on the CPU.
    """

    device = torch.device("cpu")

    def __init__(self, spec: RunSpec, settings: VllmSettings, *, state: Path) -> None:
        self.spec = spec
        self._files = state / "in-use"
        shutil.rmtree(self._files, ignore_errors=True)  # left by a process that was killed
        self._busy = False
        self._engine_lock = asyncio.Lock()
        self._names = itertools.count()
        self._held: Path | None = None
        self._host = VllmHost(
            spec, settings, state=state, busy=lambda: self._busy, on_end=lambda _: None, prefix_caching=False
        )

    def memory_of(self, blueprint: Blueprint) -> int:  # noqa: ARG002  (vLLM's processes have it)
        return 0

    async def prefill(self, path: Path, *, version: int, streamed: bool = False) -> VllmPrefill:  # noqa: ARG002
        """Make a `Prefill` of the policy in `path`, which is loaded on use; raises PolicyError and EngineFailed."""
        blueprint = await asyncio.to_thread(inspect_once, path)
        with _as_engine_failed():
            check_family(blueprint)
        # The supplier of policies deletes old ones while their work is still to be measured.
        self._files.mkdir(parents=True, exist_ok=True)
        kept = self._files / f"{version}-{next(self._names)}"
        link_file(path, kept)
        prefill = VllmPrefill(self, kept, version=version, blueprint=blueprint, loop=asyncio.get_running_loop())
        weakref.finalize(prefill, kept.unlink, missing_ok=True)
        return prefill

    async def measure(
        self, path: Path, version: int, spans: Sequence[Span], *, spec: RunSpec
    ) -> list[SpanMeasured | Refusal]:
        """Load the policy in `path` if need be, and measure each span; raises PolicyError and EngineFailed."""
        async with self._engine_lock:
            with _as_engine_failed():
                await self._hold(path, version)
            self._busy = True
            try:
                self._host.progressed()
                return [result for batch in _batches(spans) for result in await self._measure(batch, spec)]
            finally:
                self._busy = False

    async def _hold(self, path: Path, version: int) -> None:
        """Have the engine hold the policy in `path`: by its file, as an auditor may meet two of one version."""
        # A measurement is retried at once but only a few times: it must not meet the engine that just died.
        await self._host.check_alive()
        if self._host.version is None or self._held != path:
            await self._host.load(path, version=version)
            self._held = path

    async def _measure(self, spans: Sequence[Span], spec: RunSpec) -> list[SpanMeasured | Refusal]:
        names = [f"m{next(self._names)}" for _ in spans]
        named_spans = list(zip(names, spans, strict=True))
        try:
            async with asyncio.TaskGroup() as group:
                for name, span in named_spans:
                    group.create_task(self._read(name, span))
            asked = named_spans, spec.sampling.temperature, spec.proofs
            results = await self._host.call("swarmproof_measure", msgspec.msgpack.encode(asked))
        except BaseException:
            # A failure here means the engine is gone, and its captures with it.
            with contextlib.suppress(Exception):
                await self._host.call("swarmproof_drop", names)
            raise
        measurements = msgspec.msgpack.decode(results[0], type=list[SpanMeasured | tuple[Reason, str]])
        return [Refusal(*measured) if isinstance(measured, tuple) else measured for measured in measurements]

    async def _read(self, name: str, span: Span) -> None:
        """Have vLLM read a span; its worker process keeps the rows from which tokens were drawn."""
        vllm = importlib.import_module("vllm")
        parameters: Any = vllm.SamplingParams(
            temperature=0,
            max_tokens=1,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            extra_args={"swarmproof": {"name": name, "first_row": len(span.context_ids) - 1}},
        )
        if self._host.llm is None:
            raise EngineDied("vLLM is not running")
        async for _ in self._host.llm.generate({"prompt_token_ids": span.input_ids}, parameters, name):
            self._host.progressed()

    async def close(self) -> None:
        """End vLLM's processes."""
        await self._host.close()


class VllmPrefill:
    """A `Prefill` of one policy; call `measure` in any thread but the event loop's."""

    def __init__(
        self,
        verifier: VllmVerifier,
        path: Path,
        *,
        version: int,
        blueprint: Blueprint,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._verifier = verifier
        self._path = path
        self._version = version
        self._blueprint = blueprint
        self._loop = loop

    @property
    def blueprint(self) -> Blueprint:
        return self._blueprint

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        """Measure like `Prefill.measure`; raises ValueError for another model or longer sequences than the engine's."""
        started_for = self._verifier.spec
        if (spec.model, spec.sampling.most_tokens) != (started_for.model, started_for.sampling.most_tokens):
            raise ValueError("engine was started for another run")
        measuring = self._verifier.measure(self._path, self._version, spans, spec=spec)
        return asyncio.run_coroutine_threadsafe(measuring, self._loop).result()


@contextlib.contextmanager
def _as_engine_failed() -> Iterator[None]:
    """Raise EngineFailed, of the same code, for an engine that cannot hold a policy: `Prefills` know no engines."""
    try:
        yield
    except EngineError as error:
        raise EngineFailed(str(error), code=error.code) from error


def _batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    batch: list[Span] = []
    for span in spans:
        if batch and sum(held.length for held in batch) + span.length > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(span)
    if batch:
        yield batch
