"""Code inside vLLM's worker process: forced sampling, capture of hidden states, proofs, weight reloads.

Written against vLLM 0.32 and both of its model runners (`node.engines.vllm_runners`). vLLM loads both classes by name.
The extension wraps the runner's `sample_tokens`, where the step's final hidden states (one row per request, after the
last norm) and their positions are known, also under chunked prefill, prefix caching and preemption; `compute_logits`
would include warm-up runs. The logits processor then chooses the tokens from the same rows. Only bytes leave this
process.

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
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from node.engines.device import add_products_in_float32
from node.engines.recorder import DecodeRow, Recorder
from node.engines.vllm_processes import end_with_owner
from node.engines.vllm_runners import RunnerRow, RunnerStep, RunnerV1, RunnerV2, ours_of
from node.policy.products import multiply_exactly
from node.protocol.reasons import Refusal
from node.protocol.run import ProofSpec
from node.sampling.forced import warm_up
from node.verification.spans import Span, measure_states

_recorders: list[Recorder] = []
"""This process's only recorder, shared by the extension and the logits processor."""

_views: list[RunnerV2] = []
"""This process's view of a V2 runner, which the logits processor tells of requests."""

_captures: dict[str, list[Tensor]] = {}
"""Hidden states of the rows captured so far, by span name."""


@dataclass(frozen=True, slots=True)
class _WholeHead:
    """vLLM's output head, which computes all logits at once."""

    compute: Callable[[Tensor], Tensor]
    width: int

    def parts(self, states: Tensor) -> Iterator[Tensor]:
        yield self.compute(states)


@LogitsProcessor.register_oot
class ExactLogits(LogitsProcessor):
    """vLLM's output head in float32, which on a CPU copies the whole weight to float32 in each step otherwise."""

    def _apply_head(
        self, lm_head: VocabParallelEmbedding, hidden_states: Tensor, embedding_bias: Tensor | None
    ) -> Tensor:
        if hidden_states.device.type != "cpu":
            logits: Tensor = super()._apply_head(lm_head, hidden_states, embedding_bias)
            return logits
        logits = multiply_exactly(hidden_states, lm_head.get_parameter("weight"))
        return logits if embedding_bias is None else logits + embedding_bias


class Installation(msgspec.Struct, frozen=True):
    """The run's parameters for the extension."""

    hidden: int
    vocabulary: int
    proofs: ProofSpec
    temperature: float
    version: int


class ForcedSampling(LogitsProcessorV1, LogitsProcessorV2):
    """docs/protocol.md, section 4, as a logits processor: the forced token becomes the largest logit.

    It has the interface of both runners; vLLM says at its start which one it takes.
    """

    def __init__(self, vllm_config: VllmConfig, *_: Any) -> None:  # noqa: ARG002
        # Our first code in each worker process, before it loads weights and captures graphs.
        end_with_owner()
        add_products_in_float32()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError unless sampling is greedy, which forcing the chosen token relies on."""
        if ours_of(sampling_params) is not None and sampling_params.temperature != 0:
            raise ValueError("forced sampling needs temperature 0")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Do nothing: rows are read off the runner at each step."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Note a request of the V2 runner; return whether its logits are changed."""
        for view in _views:
            view.add(req_idx, sampling_params)
        return "seed" in (ours_of(sampling_params) or {})

    def apply(self, logits: Tensor, _: Any = None) -> Tensor:
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
        view = RunnerV2(runner) if runner.vllm_config.use_v2_model_runner else RunnerV1(runner)
        _views[:] = [view] if isinstance(view, RunnerV2) else []
        original = runner.sample_tokens

        def sample_tokens(grammar_output: Any) -> Any:
            step = view.step()
            if step is not None:
                recorder.reread([row.ours["name"] for row in step.rows if row.ours is not None and row.is_resumed])
                recorder.begin([_decode_row(row) for row in step.rows], step.sampled)
                _capture(step)
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

    def swarmproof_prove(self, proofs: bytes) -> None:
        """Prove as the `ProofSpec` in MessagePack says from the next chunk on; its chunks have the same size."""
        _recorders[0].scheme = msgspec.msgpack.decode(proofs, type=ProofSpec)

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


def _capture(step: RunnerStep) -> None:
    """Capture this step's rows [tokens, H] of verifier spans, from each span's first requested row."""
    for row in step.rows:
        if row.ours is None or "first_row" not in row.ours:
            continue
        skipped = max(0, row.ours["first_row"] - row.computed)
        # A preempted span is read again from its beginning.
        kept = _captures.setdefault(row.ours["name"], [])
        if row.computed == 0:
            kept.clear()
        kept.append(step.hidden[row.start + skipped : row.start + row.scheduled].clone())


def _decode_row(row: RunnerRow) -> DecodeRow | None:
    """Return the completion of which a row draws a token; None for a prompt not read to its end yet."""
    if row.ours is None or "seed" not in row.ours or row.is_partial:
        return None
    drawn = row.computed + row.scheduled - row.prompt
    first, seed = row.ours["position"], bytes.fromhex(row.ours["seed"])
    return DecodeRow(name=row.ours["name"], seed=seed, position=first + drawn, first=first)
