"""Code inside vLLM's worker process: forced sampling, capture of hidden states, proofs, weight reloads.

Written against vLLM 0.32 and its V1 model runner, which `node.engines.vllm` pins. vLLM loads both classes by name. The
extension wraps the runner's `sample_tokens`, where the step's final hidden states (one row per request, after the last
norm) and their positions are known, also under chunked prefill, prefix caching and preemption; `compute_logits` would
include warm-up runs. The logits processor then chooses the tokens from the same rows. Only bytes leave this process.

Under tensor parallelism every rank samples, so every rank forces; only rank 0 records and proves.
"""

# ruff: noqa: TID251  (this is where vllm may be imported)
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from node.engines.recorder import DecodeRow, Recorder
from node.engines.vllm_processes import end_with_owner
from node.protocol.reasons import Refusal
from node.protocol.run import ProofSpec
from node.sampling.forced import warm_up
from node.verification.spans import Span, measure_states

TAG = "swarmproof"
"""Our key in a request's `extra_args`."""

_recorders: list[Recorder] = []
"""This process's only recorder, shared by the extension and the logits processor."""

_captures: dict[str, list[Tensor]] = {}
"""Hidden states of the rows captured so far, by span name."""


@dataclass(frozen=True, slots=True)
class _WholeHead:
    """vLLM's output head, which computes all logits at once."""

    compute: Callable[[Tensor], Tensor]
    width: int

    def parts(self, states: Tensor) -> Iterator[Tensor]:
        yield self.compute(states)


class Installation(msgspec.Struct, frozen=True):
    """The run's parameters for the extension."""

    hidden: int
    vocabulary: int
    proofs: ProofSpec
    temperature: float
    version: int


class ForcedSampling(LogitsProcessor):
    """docs/protocol.md, section 4, as a logits processor: the forced token becomes the largest logit."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        self._device = device
        # Our first code in each worker process, before it loads weights.
        end_with_owner()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError unless sampling is greedy, which forcing the chosen token relies on."""
        if TAG in (sampling_params.extra_args or {}) and sampling_params.temperature != 0:
            raise ValueError("forced sampling needs temperature 0")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Do nothing: rows are read off the runner at each step."""

    def apply(self, logits: Tensor) -> Tensor:
        return _recorders[0].sample(logits) if _recorders else logits


class ProvingWorker:
    """Methods that vLLM mixes into its worker class (`worker_extension_cls`), called through `collective_rpc`.

    The prefix keeps their names apart from vLLM's own.
    """

    model_runner: Any
    rank: int
    _installed: Installation

    def swarmproof_install(self, installation: bytes) -> None:
        """Start to force and record; call once, before the first request."""
        wanted = msgspec.msgpack.decode(installation, type=Installation)
        runner = self.model_runner
        device = torch.device(runner.device)
        recorder = Recorder(
            hidden=wanted.hidden,
            proofs=wanted.proofs,
            temperature=wanted.temperature,
            version=wanted.version,
            device=device,
            proves=self.rank == 0,
        )
        self._installed = wanted
        _recorders[:] = [recorder]
        _captures.clear()
        original = runner.sample_tokens

        def sample_tokens(grammar_output: Any) -> Any:
            state = runner.execute_model_state
            if state is not None:
                recorder.reread(_resumed(runner, state.scheduler_output))
                recorder.begin(_batch_rows(runner, state.scheduler_output), state.sample_hidden_states)
                _capture(runner, state.scheduler_output, state.hidden_states)
            try:
                return original(grammar_output)
            finally:
                recorder.end()

        runner.sample_tokens = sample_tokens
        warm_up(device)

    def swarmproof_reload(self, path: str, version: int) -> None:
        """Load the weights in folder `path` between steps; every later token is of `version`."""
        self.model_runner.reload_weights(weights_path=path)
        for module in self.model_runner.get_model().modules():
            # A head tied to the embedding is not in the file, so vLLM does not reload it; on a CPU it would keep the
            # packed copy of the old weights.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
            # On a CPU vLLM packs the experts of a mixture when it loads them first, and takes them for packed after.
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and self.model_runner.device.type == "cpu":
                kernel.fused_experts.process_weights_after_loading(module)
        _recorders[0].version = version

    def swarmproof_take(self, wanted: list[list[Any]]) -> bytes:
        """Collect the records of `[[name, tokens], …]` as MessagePack of `list[Recorded]`; empty except on rank 0."""
        if self.rank != 0:
            return b""
        return msgspec.msgpack.encode(_recorders[0].collect([(name, count) for name, count in wanted]))

    def swarmproof_drop(self, names: list[str]) -> int:
        """Drop aborted completions and spans; return the number of running completions."""
        _recorders[0].drop(names)
        for name in names:
            _captures.pop(name, None)
        return len(_recorders[0])

    def swarmproof_measure(self, spans: bytes) -> bytes:
        """Measure spans that were read: `[[[name, Span], …], temperature, ProofSpec]` to `[SpanMeasured | [reason,
        detail], …]`.

        Both are MessagePack. Every rank computes, as the output head is sharded; rank 0 responds.
        """
        wanted, temperature, proofs = msgspec.msgpack.decode(
            spans, type=tuple[list[tuple[str, Span]], float, ProofSpec]
        )
        states = [span.predicted_from(torch.cat(_captures.pop(name))) for name, span in wanted]
        with torch.inference_mode():
            found = measure_states(
                [span for _, span in wanted],
                states,
                _WholeHead(self.model_runner.get_model().compute_logits, self._installed.vocabulary),
                temperature=temperature,
                proofs=proofs,
            )
        answers = [(one.reason, one.detail) if isinstance(one, Refusal) else one for one in found]
        return msgspec.msgpack.encode(answers) if self.rank == 0 else b""


def _capture(runner: Any, scheduled: Any, hidden: Tensor) -> None:
    """Capture this step's rows [tokens, H] of verifier spans, from each span's first requested row."""
    batch = runner.input_batch
    for row, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        ours = (runner.requests[request_id].sampling_params.extra_args or {}).get(TAG)
        if ours is None or "first_row" not in ours:
            continue
        first = int(batch.num_computed_tokens_cpu[row])
        start = int(runner.query_start_loc.np[row])
        skipped = max(0, ours["first_row"] - first)
        rows = hidden[start + skipped : start + scheduled.num_scheduled_tokens[request_id]]
        # A preempted span is read again from its beginning.
        kept = _captures.setdefault(ours["name"], [])
        if first == 0:
            kept.clear()
        kept.append(rows.clone())


def _resumed(runner: Any, scheduled: Any) -> list[str]:
    """List completions resumed after a preemption with more to read than their newest token."""
    batch, resumed = runner.input_batch, scheduled.scheduled_cached_reqs.resumed_req_ids
    names: list[str] = []
    for row, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        request = runner.requests[request_id]
        ours = (request.sampling_params.extra_args or {}).get(TAG)
        kept = int(batch.num_computed_tokens_cpu[row])
        if ours is not None and request_id in resumed and kept < request.num_tokens - 1:
            names.append(ours["name"])
    return names


def _batch_rows(runner: Any, scheduled: Any) -> list[DecodeRow | None]:
    """Return the completion of each row of this step; None for a prompt not read to its end yet."""
    batch = runner.input_batch
    partial = runner.discard_request_mask.np
    batch_rows: list[DecodeRow | None] = []
    for row, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        request = runner.requests[request_id]
        ours = (request.sampling_params.extra_args or {}).get(TAG)
        if ours is None or "seed" not in ours or partial[row]:
            batch_rows.append(None)
            continue
        last = int(batch.num_computed_tokens_cpu[row]) + scheduled.num_scheduled_tokens[request_id] - 1
        drawn = last - (request.num_prompt_tokens - 1)
        first, seed = ours["position"], bytes.fromhex(ours["seed"])
        batch_rows.append(DecodeRow(name=ours["name"], seed=seed, position=first + drawn, first=first))
    return batch_rows
