"""Generation with vLLM: continuous batching over every running slot, forced and proved inside its worker process.

One request is one completion: token ids go in, tokens are streamed back, and at its end the record kept by the worker
process (tokens, log-probabilities, policy versions, proofs) is fetched and compared with the stream.

Stop strings are looked for in the stream, by the run's own rule, which vLLM's is not. So the worker process may have
drawn past the end by the time it is told, and may have proved a chunk with what came after. Such a chunk is drawn
again, up to the end and no further; without an end there, once more and on.

A new policy is loaded in place: vLLM pauses the running requests, clears their cache, reloads the weights, and reads
each prefix again under the new weights, so later tokens are the new policy's over the whole prefix, as
docs/protocol.md, section 4.6, requires.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from node.engines.base import BrokenPolicy, EngineDied, EngineError, NoPolicy, SampleRequest, check_requests
from node.engines.recorder import Recorded, check_recorded
from node.engines.turns import converse, merge_pieces
from node.engines.vllm_host import VllmHost, describe_error
from node.engines.vllm_settings import VllmSettings
from node.policy.file import Blueprint
from node.protocol.profiles import Hardware
from node.protocol.run import ProofSpec, RunSpec
from node.protocol.submission import Rollout

COLLECT_SECONDS = 0.005
"""How long a finished completion waits for others, to fetch their records in one call."""


class VllmEngine:
    """An `Engine` on vLLM. `state` is a private folder from which vLLM reads policies.

    `tokens` counts tokens drawn since the start, finished or not; `rereads` how often finished completions were read
    again because the cache was full or the policy changed.
    """

    name = "vllm"

    def __init__(self, spec: RunSpec, settings: VllmSettings, *, state: Path) -> None:
        self.tokens = 0
        self.rereads = 0
        self._spec = spec
        self._under_way: set[asyncio.Task[Rollout]] = set()
        self._host = VllmHost(spec, settings, state=state, busy=lambda: bool(self._under_way), on_end=self._fail_all)
        self._names = itertools.count()
        self._pending: list[tuple[str, int, asyncio.Future[Recorded]]] = []
        self._collecting: asyncio.Task[None] | None = None
        self._dropping: set[asyncio.Task[None]] = set()
        self._death: EngineDied | None = None

    @property
    def version(self) -> int | None:
        return self._host.version

    @property
    def policy(self) -> Blueprint:
        return self._host.policy

    async def hardware(self) -> Hardware:
        return await self._host.hardware()

    async def load(self, path: Path, *, version: int) -> None:
        await self._host.load(path, version=version)

    async def prove(self, proofs: ProofSpec) -> None:
        """Prove what is drawn from now on as `proofs` says, without another start; its chunks have the same size."""
        await self._host.prove(proofs)

    async def generate(
        self, requests: Sequence[SampleRequest], *, on_finished: Callable[[], None] | None = None
    ) -> list[Rollout]:
        if self._host.llm is None:
            raise NoPolicy("no policy is loaded yet")
        policy, sampling = self.policy, self._spec.sampling
        check_requests(requests, vocabulary=policy.vocabulary, sampling=sampling)
        if any(request.has_pieces for request in requests):
            return await converse(
                requests, self._piece, eos_ids=policy.eos_ids, sampling=sampling, on_finished=on_finished
            )
        if not self._under_way:
            self._host.progressed()
        self._death = None
        tasks = [asyncio.create_task(self._complete(request, on_finished)) for request in requests]
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

    async def _piece(self, request: SampleRequest) -> Rollout:
        (rollout,) = await self.generate([request])
        return rollout

    async def _complete(self, request: SampleRequest, on_finished: Callable[[], None] | None) -> Rollout:
        parts, tokens, missing = list[Rollout](), list[int](), 0
        cap = request.cap(self._spec.sampling)
        is_over = False
        while not is_over:
            rest = replace(
                request,
                prompt_ids=(*request.prompt_ids, *tokens),
                position=request.position + len(tokens),
                max_tokens=missing or cap - len(tokens),
            )
            part, drawn = await self._draw(rest, before=tokens)
            whole, left_out = [*tokens, *part.completion_ids], drawn - len(part.completion_ids)
            is_over = not left_out and (len(whole) == cap or request.rules.ends_turn(whole, self.policy.eos_ids))
            if missing and not left_out and not is_over:
                # Drawn again with other rows beside it, or by a newer policy, a token may be another one, and the end
                # elsewhere. Kept, this would be a chunk cut short with others behind it: its place is drawn without
                # the old end. That finds the old end once more only if rounding differs once more.
                missing = 0
                continue
            parts.append(part)
            tokens, missing = whole, left_out
        if on_finished is not None:
            on_finished()
        return merge_pieces(request, parts)

    async def _draw(self, request: SampleRequest, *, before: Sequence[int]) -> tuple[Rollout, int]:
        """Draw what follows the completion's tokens `before`, to its end or the request's cap.

        Returns it without a chunk that goes on behind a stop string, and how many tokens it has with it.
        """
        name = f"c{next(self._names)}"
        tokens: list[int] = []
        try:
            await self._stream(name, request, tokens, before=before)
            recorded = await self._fetch_record(name, len(tokens))
            check_recorded(recorded, delivered=tokens[: len(recorded.tokens)] if request.rules.stop else tokens)
            self.rereads += recorded.rereads
        except BrokenPolicy:
            self._host.taint()
            raise
        except EngineError:
            raise
        except asyncio.CancelledError:
            if self._death is not None:
                raise self._death from None
            self._drop_record(name)
            raise
        except Exception as error:
            raise EngineDied(f"vLLM failed (see its log above): {describe_error(error)}") from error
        part = Rollout(
            seed=request.seed,
            prompt_ids=list(request.prompt_ids),
            completion_ids=recorded.tokens,
            logprobs=recorded.logprobs,
            segment_versions=recorded.segment_versions,
            segment_tokens=recorded.segment_tokens,
            proofs=recorded.proofs,
        )
        return part, len(tokens)

    async def _stream(self, name: str, request: SampleRequest, tokens: list[int], *, before: Sequence[int]) -> None:
        """Add what vLLM draws to `tokens`, up to a stop string."""
        parameters, stop, whole = self._parameters(name, request), request.rules.stop, list(before)
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        async with contextlib.aclosing(self._host.llm.generate(prompt, parameters, name)) as outputs:
            async for output in outputs:
                drawn = output.outputs[0].token_ids
                self.tokens += len(drawn)
                self._host.progressed()
                for token in drawn:
                    tokens.append(token)
                    whole.append(token)
                    if stop is not None and stop.found(whole, 0, len(whole)):
                        return

    def _parameters(self, name: str, request: SampleRequest) -> Any:
        vllm = importlib.import_module("vllm")
        return vllm.SamplingParams(
            temperature=0,
            max_tokens=request.cap(self._spec.sampling),
            stop_token_ids=sorted(self.policy.eos_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
            extra_args={"swarmproof": {"name": name, "seed": request.seed.hex(), "position": request.position}},
        )

    # -- records

    async def _fetch_record(self, name: str, count: int) -> Recorded:
        """Fetch the worker process's record; completions that end together share one call."""
        future: asyncio.Future[Recorded] = asyncio.get_running_loop().create_future()
        self._pending.append((name, count, future))
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect_pending())
        return await future

    async def _collect_pending(self) -> None:
        while self._pending:
            await asyncio.sleep(COLLECT_SECONDS)
            wanted, self._pending = self._pending, []
            try:
                answers = await self._host.call("swarmproof_take", [(name, count) for name, count, _ in wanted])
                found = msgspec.msgpack.decode(answers[0], type=list[Recorded])
                for (_, _, future), recorded in zip(wanted, found, strict=True):
                    if not future.done():
                        future.set_result(recorded)
            except BaseException as error:
                # Any kind: every waiting caller must be told.
                _fail_pending(wanted, EngineDied(f"vLLM's worker process failed: {describe_error(error)}"))
                if not isinstance(error, Exception):
                    raise

    def _drop_record(self, name: str) -> None:
        """Drop a cancelled completion's record in the background."""

        async def drop() -> None:
            # A failure means the engine is gone, and its records with it.
            with contextlib.suppress(Exception):
                await self._host.call("swarmproof_drop", [name])

        task = asyncio.create_task(drop())
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    def _fail_all(self, reason: EngineDied) -> None:
        """Fail everything that is running with `reason`: the engine ended."""
        self._death = reason
        wanted, self._pending = self._pending, []
        _fail_pending(wanted, reason)
        # A call to processes that are gone would wait forever.
        taking, self._collecting = self._collecting, None
        for task in (*self._under_way, *self._dropping, *([taking] if taking is not None else [])):
            task.cancel()


def _fail_pending(wanted: Sequence[tuple[str, int, asyncio.Future[Recorded]]], reason: EngineDied) -> None:
    for _, _, future in wanted:
        if not future.done():
            future.set_exception(reason)
