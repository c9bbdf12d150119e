"""The output head in training: log-probabilities, entropies and gradients without the logits of all tokens at once.

Over a real vocabulary logits are a step's largest tensors: 32,000 tokens x 151,936 ids are 18 GiB of float32, several
times over. Here a chunk of tokens goes from logits to loss to gradient before the next one begins, so memory does not
grow with the tokens, and nothing is computed twice: three products of N * V * D multiplications, as with all logits at
once. The head computes in float32 whatever the model's dtype and autocast, as workers and verifiers do
(docs/protocol.md, section 4).

Log-probabilities are of logits / temperature. Shapes: N drawn tokens, n of them in a chunk, V ids, D hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from coordinator.training.attention import layout_arguments
from coordinator.training.packing import PackedRow

CHUNK_BYTES = 128 * 2**20
"""Bound on a chunk's logits, of which up to three copies exist at a time. Each chunk reads and writes all of the head's
gradient: half of this took 11 % longer on a CPU core, and twice this was 4 % faster.
"""

ChunkLoss = Callable[[slice, Tensor, Tensor], Tensor]
"""Compute the summed loss of some of the N tokens from their log-probabilities [n] and their distributions' entropies
[n]; both require gradients.
"""


def head_weight(model: PreTrainedModel) -> Tensor:
    """Return the output embedding [V, D]; no family's head has a bias (`node.policy.config.FAMILIES`)."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight: Tensor = head.weight
    return weight


def final_states(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Compute the hidden states [N, D] that predict a row's drawn tokens; call in `packed_attention`.

    With FSDP, `head_weight` is whole after this and until the states' backward pass.
    """
    where = layout_arguments(model, row)

    def gather(states_1LD: Tensor) -> Tensor:
        # The end of a prompt predicts the first token of each of its samples. As in `attention`, `embedding` sums
        # gradients of shared columns in a fixed order.
        return F.embedding(row.predicts, states_1LD[0])

    with _head_replaced(model, gather):
        states_ND: Tensor = model(input_ids=row.ids, position_ids=row.positions, use_cache=False, **where).logits
    return states_ND


def head_logprobs(
    states_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, temperature: float, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """Compute the log-probabilities [N] of `targets_N`, without gradients."""
    with torch.no_grad(), _in_float32(states_ND):
        wide_VD, logp_N = weight_VD.float(), torch.empty(len(targets_N), device=states_ND.device)
        for part in _chunks(len(targets_N), wide_VD, chunk_bytes):
            logprobs_nV = _logprobs(states_ND[part].float(), wide_VD, temperature)
            logp_N[part] = _pick(logprobs_nV, targets_N[part])
            del logprobs_nV  # before the next chunk's
        return logp_N


def head_backward(
    states_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    loss: ChunkLoss,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Run the head forward and backward, and the backward pass of what computed `states_ND`.

    The gradient of the losses' sum is added to `weight_VD.grad`, in place, and to the gradients of `states_ND`'s graph.
    Return log-probabilities of `targets_N` [N] and entropies in nats [N].
    """
    with torch.no_grad(), _in_float32(states_ND):
        wide_VD, wide_ND = weight_VD.float(), states_ND.float()
        grad_VD = torch.zeros_like(wide_VD) if weight_VD.grad is None else weight_VD.grad.float()
        grad_ND = torch.empty_like(wide_ND)
        logp_N, entropy_N = wide_ND.new_empty(2, len(targets_N))
        for part in _chunks(len(targets_N), wide_VD, chunk_bytes):
            logprobs_nV = _logprobs(wide_ND[part], wide_VD, temperature)
            probs_nV = logprobs_nV.exp()
            logp_N[part] = _pick(logprobs_nV, targets_N[part])
            entropy_N[part] = -torch.linalg.vecdot(probs_nV, logprobs_nV)
            by_logp_n, by_entropy_n = _slopes(loss, part, logp_N[part], entropy_N[part])
            # d logp / d logits = onehot(target) - probs, d entropy / d logits = -probs * (logprobs + entropy), in place
            if by_entropy_n is None:
                grad_nV = probs_nV.mul_(-by_logp_n[:, None])
            else:
                logprobs_nV.add_(entropy_N[part, None]).mul_(by_entropy_n[:, None]).add_(by_logp_n[:, None])
                grad_nV = probs_nV.mul_(logprobs_nV).neg_()
            grad_nV.scatter_add_(1, targets_N[part, None], by_logp_n[:, None]).div_(temperature)
            torch.mm(grad_nV, wide_VD, out=grad_ND[part])
            grad_VD.addmm_(grad_nV.t(), wide_ND[part])
            del logprobs_nV, probs_nV, grad_nV  # before the next chunk's
        weight_VD.grad = grad_VD.to(weight_VD.dtype)
    states_ND.backward(grad_ND.to(states_ND.dtype))  # type: ignore[no-untyped-call]
    return logp_N, entropy_N


def _in_float32(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def _slopes(loss: ChunkLoss, part: slice, logp_n: Tensor, entropy_n: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the loss's derivatives along log-probabilities and entropies [n]; None if it has no entropies."""
    logp_n, entropy_n = (each.detach().requires_grad_() for each in (logp_n, entropy_n))
    with torch.enable_grad():
        total = loss(part, logp_n, entropy_n)
    by_logp_n, by_entropy_n = torch.autograd.grad(total, (logp_n, entropy_n), allow_unused=True)
    return by_logp_n, by_entropy_n


def _chunks(tokens: int, weight_VD: Tensor, chunk_bytes: int) -> Iterator[slice]:
    """Yield slices of tokens whose float32 logits take at most `chunk_bytes`, or of one token."""
    size = max(1, chunk_bytes // (4 * len(weight_VD)))
    return (slice(start, start + size) for start in range(0, tokens, size))


def _logprobs(states_nD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    """Compute log-probabilities [n, V] of all ids."""
    return torch.log_softmax(F.linear(states_nD, weight_VD).div_(temperature), dim=-1)


def _pick(logprobs_nV: Tensor, targets_n: Tensor) -> Tensor:
    return logprobs_nV.gather(1, targets_n[:, None])[:, 0]


@contextmanager
def _head_replaced(model: PreTrainedModel, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have the model return `function` of its final states [1, L, D] in place of logits.

    Its base model alone cannot be called instead: FSDP gathers the root's parameters when the root is called.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    head.forward = function
    try:
        yield
    finally:
        del head.forward
