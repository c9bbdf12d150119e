"""Generation with plain torch: continuous batching over a transformers model, on a CPU or a GPU.

One thread decodes while there is work, one token of every row per step, whatever call a row belongs to. Between steps,
finished or abandoned rows leave, waiting rows join where there is room, and a new policy is switched to. Joining means
prefilling all that the row has so far, so a row that continues under a new policy simply joins anew. A policy of the
same architecture is read into the memory of the one before, between two steps: both at once would take twice as much.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from node.engines.base import (
    BrokenPolicy,
    EngineError,
    Interrupted,
    NoPolicy,
    SampleRequest,
    check_requests,
)
from node.engines.recorder import DecodeRow, Recorder, check_recorded
from node.engines.recurrent_decoder import RecurrentDecoder
from node.engines.torch_decoder import Decoder
from node.engines.torch_loading import LoadedPolicy, Replacement, kept_open, load_beside, refill
from node.engines.turns import converse
from node.policy.file import Policy, read_blueprint
from node.policy.memory import free_memory
from node.policy.models.base import RecurrentForCausalLM
from node.protocol.profiles import Hardware, hardware_of
from node.protocol.run import RunSpec, SamplingSpec
from node.protocol.submission import Rollout
from node.sampling.forced import choose, warm_up
from node.sampling.types import Choose

MAX_ROWS = 128
"""Completions decoded together: more bring no speed on a CPU, and a batch's memory grows."""

_names = count()


class TorchEngine:
    """An in-process `Engine` on `device`.

    `threads` sets torch's threads for the whole process; `choose` as for `Recorder`.
    """

    name = "torch"

    def __init__(
        self,
        spec: RunSpec,
        *,
        device: torch.device | str = "cpu",
        threads: int = 1,
        max_rows: int = MAX_ROWS,
        choose: Choose = choose,
    ) -> None:
        torch.set_num_threads(threads)
        self._spec = spec
        self._device = torch.device(device)
        self._choose = choose
        self._max_rows = max_rows
        self._lock = threading.Lock()
        self._loaded: LoadedPolicy | None = None
        self._waiting: deque[_Row] = deque()
        self._replacing: deque[Replacement] = deque()
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int | None:
        loaded = self._loaded
        return None if loaded is None else loaded.version

    @property
    def policy(self) -> Policy:
        loaded = self._loaded
        if loaded is None:
            raise NoPolicy("no policy is loaded yet")
        return loaded.policy

    async def hardware(self) -> Hardware:
        on_gpu = self._device.type == "cuda"
        device = await asyncio.to_thread(torch.cuda.get_device_name, self._device) if on_gpu else "CPU"
        return hardware_of(device, f"torch {torch.__version__}", self._spec.model.dtype)

    async def load(self, path: Path, *, version: int) -> None:
        # Open until its weights are read: its owner deletes it when the next policy is there.
        with kept_open(path) as opened:
            blueprint = await asyncio.to_thread(read_blueprint, opened)
            if blueprint.hidden < self._spec.proofs.min_hidden:
                raise BrokenPolicy(f"{blueprint.hidden} hidden units are too few for the run's proofs")
            held = self._loaded
            if held is not None and held.policy.has_architecture_of(blueprint):
                await self._replace(Replacement(opened, blueprint, version))
            else:
                await self._load_beside(opened, version)

    async def _replace(self, wanted: Replacement) -> None:
        """Have the thread read a policy into the memory of the loaded one."""
        with self._lock:
            self._replacing.append(wanted)
            self._start()
        try:
            await asyncio.shield(asyncio.wrap_future(wanted.done))
        except asyncio.CancelledError:
            # The file has to stay open as long as it is read.
            if not wanted.done.cancel():
                await asyncio.gather(asyncio.wrap_future(wanted.done), return_exceptions=True)
            raise

    async def _load_beside(self, path: Path, version: int) -> None:
        """Load a policy into memory of its own."""
        dtype = getattr(torch, self._spec.model.dtype)
        loaded = await asyncio.to_thread(load_beside, path, version=version, dtype=dtype, device=self._device)
        await asyncio.to_thread(warm_up, self._device)
        with self._lock:
            self._loaded = loaded

    async def generate(
        self, requests: Sequence[SampleRequest], *, on_finished: Callable[[], None] | None = None
    ) -> list[Rollout]:
        policy, sampling = self.policy, self._spec.sampling
        check_requests(requests, vocabulary=policy.vocabulary, sampling=sampling)
        if not requests:
            return []
        if any(request.has_pieces for request in requests):
            return await converse(
                requests, self._piece, eos_ids=policy.eos_ids, sampling=sampling, on_finished=on_finished
            )
        loop = asyncio.get_running_loop()
        call = Call(requests, on_finished=on_finished and partial(loop.call_soon_threadsafe, on_finished))
        with self._lock:
            self._waiting.extend(call.rows)
            self._start()
        return await asyncio.wrap_future(call.rollouts)

    async def _piece(self, request: SampleRequest) -> Rollout:
        (rollout,) = await self.generate([request])
        return rollout

    async def close(self) -> None:
        with self._lock:
            self._loaded, thread = None, self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join)

    def _start(self) -> None:
        """Start the thread unless it runs; the caller holds the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._decode, name="torch-engine")
            self._thread.start()

    @torch.inference_mode()
    def _decode(self) -> None:
        """Decode and replace policies until there is nothing left; body of the thread."""
        batch = Batch(self._spec, choose=self._choose)
        while True:
            with self._lock:
                replacement = self._replacing.popleft() if self._replacing else None
                loaded = self._loaded
                if replacement is None:
                    room = self._max_rows - len(batch.rows) if loaded is not None else len(self._waiting)
                    joining = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
                    if loaded is None or not (batch.rows or joining):
                        self._thread = None
                        break
            if replacement is not None:
                self._refill(replacement)
                continue
            assert loaded is not None
            rows = [*batch.rows, *joining]
            try:
                batch.step(loaded, joining)
            except Exception as error:  # noqa: BLE001  (forwarded to the callers)
                _fail(rows, error)
                batch = Batch(self._spec, choose=self._choose)
        _fail([*batch.rows, *joining], Interrupted("engine has no policy any more"))

    def _refill(self, wanted: Replacement) -> None:
        """Read a policy into the loaded one's memory; a failure half-way leaves none loaded."""
        if not wanted.done.set_running_or_notify_cancel():
            return
        loaded = self._loaded
        if loaded is None or not loaded.policy.has_architecture_of(wanted.blueprint):
            wanted.done.set_exception(Interrupted("engine was closed, or has another policy by now"))
            return
        found = refill(loaded, wanted)
        with self._lock:
            if self._loaded is loaded:
                self._loaded = found if isinstance(found, LoadedPolicy) else None
        if isinstance(found, LoadedPolicy):
            wanted.done.set_result(None)
            return
        del loaded
        free_memory()
        wanted.done.set_exception(found)


class Call:
    """One call of `generate`: its rows, and the future of its rollouts, which a cancelled caller cancels.

    `on_finished` is called in the engine's thread for each row that has its last token.
    """

    def __init__(self, requests: Sequence[SampleRequest], *, on_finished: Callable[[], object] | None = None) -> None:
        self.on_finished = on_finished
        self.rollouts: Future[list[Rollout]] = Future()
        self.rows = [_Row(self, request, f"{next(_names)}") for request in requests]

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for its rows any more."""
        return self.rollouts.done()


@dataclass(slots=True, eq=False)
class _Row:
    """One running completion, under the name that the recorder knows it by."""

    call: Call
    request: SampleRequest
    name: str
    tokens: list[int] = field(default_factory=list)
    is_finished: bool = False

    @property
    def batch_row(self) -> DecodeRow:
        """The batch row of its next token."""
        first = self.request.position
        return DecodeRow(self.name, self.request.seed, first + len(self.tokens), first=first)

    def is_at_end(self, eos_ids: Collection[int], sampling: SamplingSpec) -> bool:
        """Return whether its newest token is its last."""
        return len(self.tokens) == self.request.cap(sampling) or self.request.rules.ends_turn(self.tokens, eos_ids)


class Batch:
    """The rows that are decoded together, across policies. Not thread-safe."""

    def __init__(self, spec: RunSpec, *, choose: Choose = choose) -> None:
        self.rows: list[_Row] = []
        self._spec = spec
        self._choose_token = choose
        self._loaded: LoadedPolicy | None = None
        self._recorder: Recorder
        self._decoder: Decoder | RecurrentDecoder

    def step(self, loaded: LoadedPolicy, joining: Sequence[_Row]) -> None:
        """Draw one token of every row, and the first of those `joining`, from the policy of `loaded`."""
        abandoned = {call for call in {row.call for row in self.rows} if call.is_over}
        self._leave([row.call in abandoned for row in self.rows])
        self._drop_records({row.call for row in joining if row.call.is_over})
        joining = [row for row in joining if not row.call.is_over]
        if loaded is not self._loaded:
            self._switch_policy(loaded)
            joining, self.rows = self.rows + joining, []
        if not (self.rows or joining):
            return
        carried = self._decoder.step([row.tokens[-1] for row in self.rows])
        begun = self._decoder.join([(*row.request.prompt_ids, *row.tokens) for row in joining])
        self.rows += joining
        self._choose(loaded.policy, torch.cat([carried, begun]))
        self._leave([row.is_finished for row in self.rows])

    def _switch_policy(self, loaded: LoadedPolicy) -> None:
        """Switch to another policy: discard caches and begin new segments."""
        policy, sampling, proofs = loaded.policy, self._spec.sampling, self._spec.proofs
        if self._loaded is None:
            self._recorder = Recorder(
                hidden=policy.hidden,
                proofs=proofs,
                temperature=sampling.temperature,
                version=loaded.version,
                device=policy.model.device,
                choose=self._choose_token,
            )
        elif policy.hidden != self._loaded.policy.hidden:
            raise BrokenPolicy(f"policy {loaded.version} has another hidden size than the previous one")
        self._loaded = loaded
        self._recorder.version = loaded.version
        self._decoder = _make_decoder(policy, columns=sampling.most_tokens - 1)

    def _choose(self, policy: Policy, hidden: Tensor) -> None:
        """Choose each row's forced token from `hidden` [B, hidden] (docs/protocol.md, section 4)."""
        self._recorder.begin([row.batch_row for row in self.rows], hidden)
        logits: Tensor = self._recorder.sample(policy.logits(hidden))
        for row, token in zip(self.rows, logits.argmax(-1).tolist(), strict=True):
            row.tokens.append(token)
            row.is_finished = row.is_at_end(policy.eos_ids, self._spec.sampling)
            if row.is_finished and row.call.on_finished is not None and not row.call.is_over:
                row.call.on_finished()

    def _leave(self, leaving: list[bool]) -> None:
        if not any(leaving):
            return
        calls = {row.call for row, leaves in zip(self.rows, leaving, strict=True) if leaves}
        self.rows = [self.rows[batch_row] for batch_row in self._decoder.leave(leaving)]
        for call in calls:
            if not call.is_over and all(row.is_finished for row in call.rows):
                self._finish(call)
        self._drop_records({call for call in calls if call.is_over})

    def _drop_records(self, calls: set[Call]) -> None:
        if self._loaded is not None:
            self._recorder.drop([row.name for call in calls for row in call.rows])

    def _finish(self, call: Call) -> None:
        """Deliver the rollouts of a call whose rows are all finished, or the reason for their absence."""
        records = self._recorder.collect([(row.name, len(row.tokens)) for row in call.rows])
        try:
            for row, recorded in zip(call.rows, records, strict=True):
                check_recorded(recorded, delivered=row.tokens)
        except EngineError as error:
            _fail(call.rows, error)
            return
        rollouts = [
            Rollout(
                seed=row.request.seed,
                prompt_ids=list(row.request.prompt_ids),
                completion_ids=recorded.tokens,
                logprobs=recorded.logprobs,
                segment_versions=recorded.segment_versions,
                segment_tokens=recorded.segment_tokens,
                proofs=recorded.proofs,
            )
            for row, recorded in zip(call.rows, records, strict=True)
        ]
        if call.rollouts.set_running_or_notify_cancel():
            call.rollouts.set_result(rollouts)


def _make_decoder(policy: Policy, *, columns: int) -> Decoder | RecurrentDecoder:
    if isinstance(policy.model, RecurrentForCausalLM):
        return RecurrentDecoder(policy)
    return Decoder(policy, columns=columns)


def _fail(rows: Iterable[_Row], error: Exception) -> None:
    for row in rows:
        if not row.call.is_over and row.call.rollouts.set_running_or_notify_cancel():
            row.call.rollouts.set_exception(error)
