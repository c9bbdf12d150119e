"""What a step of vLLM's model runners is about: which request is in which row, and where its hidden states are.

vLLM has two runners that hold this in different places. `RunnerView` is all that `node.engines.vllm_worker` knows of
them; every name here that is vLLM's is in `tests/unit/node/test_vllm_names.py`. Written against vLLM 0.32, and imports
nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

TAG = "swarmproof"
"""Our key in a request's `extra_args`."""


@dataclass(frozen=True, slots=True)
class RunnerRow:
    """One request in a step: `ours` is what its `extra_args` have under TAG, None for a request of somebody else.

    Of its tokens `computed` were read before the step and `scheduled` are read in it, which begin at row `start` of the
    step's hidden states; the first `prompt` of all are its prompt. `is_partial`: more of them are known, so that none
    is drawn. `is_resumed`: it was preempted, and more than its newest token is read again from here.
    """

    ours: Mapping[str, Any] | None
    computed: int
    scheduled: int
    start: int
    prompt: int
    is_partial: bool
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class RunnerStep:
    """A step between its forward pass and its sampling: `hidden` [tokens, H] and `sampled` [rows, H], a row for each
    of `rows`, after the last norm.
    """

    rows: list[RunnerRow]
    hidden: Tensor
    sampled: Tensor


class RunnerView(Protocol):
    """Reads the steps of one model runner."""

    def step(self) -> RunnerStep | None:
        """Return the step that is to be sampled; None where this process holds no final hidden states."""


class RunnerV1:
    """View of the V1 runner (`vllm.v1.worker.gpu_model_runner`)."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def step(self) -> RunnerStep | None:
        state = self._runner.execute_model_state
        if state is None:
            return None
        return RunnerStep(self._rows(state.scheduler_output), state.hidden_states, state.sample_hidden_states)

    def _rows(self, scheduled: Any) -> list[RunnerRow]:
        runner, batch = self._runner, self._runner.input_batch
        resumed, partial = scheduled.scheduled_cached_reqs.resumed_req_ids, runner.discard_request_mask.np
        rows = []
        for row, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
            request = runner.requests[request_id]
            computed = int(batch.num_computed_tokens_cpu[row])
            rows.append(
                RunnerRow(
                    ours=ours_of(request.sampling_params),
                    computed=computed,
                    scheduled=scheduled.num_scheduled_tokens[request_id],
                    start=int(runner.query_start_loc.np[row]),
                    prompt=request.num_prompt_tokens,
                    is_partial=bool(partial[row]),
                    is_resumed=request_id in resumed and computed < request.num_tokens - 1,
                )
            )
        return rows


class RunnerV2:
    """View of the V2 runner (`vllm.v1.worker.gpu.model_runner`).

    It keeps no parameters of requests: its logits processor is told them, and calls `add`. A preempted request is added
    anew, with what it had drawn behind its prompt.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._ours: dict[int, Mapping[str, Any] | None] = {}
        self._added: set[int] = set()

    def add(self, slot: int, sampling_params: Any) -> None:
        """Note the request that now has `slot` of the runner's states."""
        self._ours[slot] = ours_of(sampling_params)
        self._added.add(slot)

    def step(self) -> RunnerStep | None:
        state = self._runner.execute_model_state
        if state is None or state.hidden_states is None:
            return None
        hidden = state.hidden_states
        return RunnerStep(self._rows(state.input_batch), hidden, hidden[state.input_batch.logits_indices])

    def _rows(self, batch: Any) -> list[RunnerRow]:
        prompts, rows = self._runner.req_states.prompt_len.np, []
        for row, slot in enumerate(batch.idx_mapping_np[: batch.num_reqs].tolist()):
            computed, known = int(batch.num_computed_tokens_np[row]), int(batch.prefill_len_np[row])
            scheduled, prompt = int(batch.num_scheduled_tokens[row]), int(prompts[slot])
            is_resumed = slot in self._added and known > prompt and computed < known - 1
            self._added.discard(slot)
            rows.append(
                RunnerRow(
                    ours=self._ours.get(slot),
                    computed=computed,
                    scheduled=scheduled,
                    start=int(batch.query_start_loc_np[row]),
                    prompt=prompt,
                    is_partial=computed + scheduled < known,
                    is_resumed=is_resumed,
                )
            )
        return rows


def ours_of(sampling_params: Any) -> Mapping[str, Any] | None:
    """Return what a request's parameters have under TAG."""
    ours: Mapping[str, Any] | None = (sampling_params.extra_args or {}).get(TAG)
    return ours
