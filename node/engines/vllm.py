"""Generation with vLLM: continuous batching over every slot under way, proved and forced inside its worker process.

One request is one completion: token ids go in, tokens are streamed back, and at its end the record that the worker
process kept (tokens, log-probabilities, policy versions, proofs) is fetched and compared with what was streamed.

A new policy is taken in place. vLLM freezes the requests under way, their cache is cleared, weights are reloaded,
and they go on: vLLM reads each prompt and what was drawn so far again under the new weights, so tokens after the
switch are the new policy's over the whole prefix, as docs/protocol.md, section 4.6, asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from node.engines.base import BrokenPolicy, EngineDied, EngineError, NoPolicy, SampleRequest, check_requests
from node.engines.recorder import Recorded, check_recorded
from node.engines.turns import converse
from node.engines.vllm_host import VllmHost, said
from node.engines.vllm_settings import VllmSettings
from node.policy import Blueprint
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout

TAKE_SECONDS = 0.005
"""How long a finished completion waits for others, so that one call to the worker process fetches them together."""


class VllmEngine:
    """An `Engine` on vLLM. `state` is a folder of its own, for what vLLM reads policies from.

    `tokens` counts what was drawn since the start, finished or not; `rereads` how often a finished completion was
    read again, because the cache was too small for all under way, or because the policy changed.
    """

    name = "vllm"

    def __init__(self, spec: RunSpec, settings: VllmSettings, *, state: Path) -> None:
        self.tokens = 0
        self.rereads = 0
        self._spec = spec
        self._under_way: set[asyncio.Task[Rollout]] = set()
        self._host = VllmHost(spec, settings, state=state, busy=lambda: bool(self._under_way), on_end=self._abandon)
        self._names = itertools.count()
        self._wanted: list[tuple[str, int, asyncio.Future[Recorded]]] = []
        self._taking: asyncio.Task[None] | None = None
        self._dropping: set[asyncio.Task[None]] = set()
        self._ended: EngineDied | None = None

    @property
    def version(self) -> int | None:
        return self._host.version

    @property
    def policy(self) -> Blueprint:
        return self._host.policy

    async def load(self, path: Path, *, version: int) -> None:
        await self._host.load(path, version=version)

    async def generate(
        self, requests: Sequence[SampleRequest], *, ended: Callable[[], None] | None = None
    ) -> list[Rollout]:
        if self._host.llm is None:
            raise NoPolicy("no policy was loaded yet")
        policy, sampling = self.policy, self._spec.sampling
        check_requests(requests, vocabulary=policy.vocabulary, sampling=sampling)
        if any(request.ask is not None for request in requests):
            return await converse(requests, self._turn, eos_ids=policy.eos_ids, sampling=sampling, ended=ended)
        if not self._under_way:
            self._host.progressed()
        self._ended = None
        tasks = [asyncio.create_task(self._complete(request, ended)) for request in requests]
        self._under_way.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._under_way.difference_update(tasks)

    async def close(self) -> None:
        await self._host.close()

    async def _turn(self, request: SampleRequest) -> Rollout:
        (rollout,) = await self.generate([request])
        return rollout

    async def _complete(self, request: SampleRequest, ended: Callable[[], None] | None) -> Rollout:
        name = f"c{next(self._names)}"
        tokens: list[int] = []
        try:
            async for output in self._host.llm.generate(
                {"prompt_token_ids": list(request.prompt_ids)}, self._parameters(name, request), name
            ):
                drawn = output.outputs[0].token_ids
                tokens += drawn
                self.tokens += len(drawn)
                self._host.progressed()
            if ended is not None:
                ended()
            recorded = await self._recorded(name, len(tokens))
            check_recorded(recorded, delivered=tokens)
            self.rereads += recorded.rereads
        except BrokenPolicy:
            self._host.taint()
            raise
        except EngineError:
            raise
        except asyncio.CancelledError:
            if self._ended is not None:
                raise self._ended from None
            self._forget(name)
            raise
        except Exception as error:
            raise EngineDied(f"vLLM failed, its log above says why: {said(error)}") from error
        return Rollout(
            seed=request.seed,
            prompt_ids=list(request.prompt_ids),
            completion_ids=recorded.tokens,
            logprobs=recorded.logprobs,
            segment_versions=recorded.segment_versions,
            segment_tokens=recorded.segment_tokens,
            proofs=recorded.proofs,
        )

    def _parameters(self, name: str, request: SampleRequest) -> Any:
        vllm = importlib.import_module("vllm")
        return vllm.SamplingParams(
            temperature=0,
            max_tokens=request.cap(self._spec.sampling),
            stop_token_ids=sorted(self.policy.eos_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
            extra_args={"veriswarm": {"name": name, "seed": request.seed.hex(), "position": request.position}},
        )

    # -- records

    async def _recorded(self, name: str, count: int) -> Recorded:
        """What the worker process recorded; several completions that end together share one call."""
        future: asyncio.Future[Recorded] = asyncio.get_running_loop().create_future()
        self._wanted.append((name, count, future))
        if self._taking is None or self._taking.done():
            self._taking = asyncio.create_task(self._take())
        return await future

    async def _take(self) -> None:
        while self._wanted:
            await asyncio.sleep(TAKE_SECONDS)
            wanted, self._wanted = self._wanted, []
            try:
                answers = await self._host.call("veriswarm_take", [(name, count) for name, count, _ in wanted])
                found = msgspec.msgpack.decode(answers[0], type=list[Recorded])
                for (_, _, future), recorded in zip(wanted, found, strict=True):
                    if not future.done():
                        future.set_result(recorded)
            except BaseException as error:
                # Of whatever kind: those who wait are told.
                _fail(wanted, EngineDied(f"vLLM's worker process failed: {said(error)}"))
                if not isinstance(error, Exception):
                    raise

    def _forget(self, name: str) -> None:
        """Have a cancelled completion's record dropped, without waiting for it."""

        async def drop() -> None:
            # If it fails the engine is gone, and its records with it.
            with contextlib.suppress(Exception):
                await self._host.call("veriswarm_drop", [name])

        task = asyncio.create_task(drop())
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    def _abandon(self, reason: EngineDied) -> None:
        """The engine ended: whatever is under way raises `reason`."""
        self._ended = reason
        wanted, self._wanted = self._wanted, []
        _fail(wanted, reason)
        # What waits for an answer of processes that are gone would wait for ever.
        taking, self._taking = self._taking, None
        for task in (*self._under_way, *self._dropping, *([taking] if taking is not None else [])):
            task.cancel()


def _fail(wanted: Sequence[tuple[str, int, asyncio.Future[Recorded]]], reason: EngineDied) -> None:
    for _, _, future in wanted:
        if not future.done():
            future.set_exception(reason)
