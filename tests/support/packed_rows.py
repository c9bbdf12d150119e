"""A packed row through a model and its head, as the trainer does it."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from coordinator.training.head import final_states, head_backward, head_logprobs, output_head
from coordinator.training.packing import PackedRow


def row_logprobs(model: PreTrainedModel, row: PackedRow, *, temperature: float) -> Tensor:
    """Compute the log-probabilities of a row's drawn tokens, without gradients."""
    return head_logprobs(final_states(model, row), output_head(model), row.targets, temperature=temperature)


def row_backward(model: PreTrainedModel, row: PackedRow, coefficients_N: Tensor) -> Tensor:
    """Accumulate the gradient of the row's log-probabilities, weighted by `coefficients_N`; return them."""
    logp_N, _ = head_backward(
        final_states(model, row),
        output_head(model),
        row.targets,
        temperature=1.0,
        loss=lambda part, logp_n, _: (logp_n * coefficients_N[part]).sum(),
    )
    return logp_N
