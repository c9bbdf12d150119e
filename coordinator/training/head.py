"""The output head in training: log-probabilities, entropies and gradients without the logits of all tokens at once.

Over a real vocabulary logits are a step's largest tensors: 32,000 tokens x 151,936 ids are 18 GiB of float32, several
times over. Here a chunk of tokens goes from logits to loss to gradient before the next one begins, so memory does not
grow with the tokens, and nothing is computed twice: three products of N * V * D multiplications, as with all logits at
once. The head computes in float32 whatever the model's dtype and autocast, as workers and verifiers do
(docs/protocol.md, section 4).

Several processes compute the head together: each the logits of the ids whose rows it holds, for a chunk of all
processes' tokens (`coordinator.training.vocabulary`), so that no weight moves.

Log-probabilities are of logits / temperature. Shapes: N drawn tokens, n of them in a chunk and m of all processes',
V ids of which this process has v, D hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from coordinator.training.packing import PackedRow
from coordinator.training.vocabulary import VocabularyShard, like_weight, own_rows
from node.policy.families import ATTENTION_FAMILIES
from node.policy.packed_attention import layout_arguments
from node.policy.products import LogitRule, OutputHead

CHUNK_BYTES = 128 * 2**20
"""Bound on a chunk's logits, of which up to three copies exist at a time. Each chunk reads and writes all of the head's
gradient: half of this took 11 % longer on a CPU core, and twice this was 4 % faster.
"""

ChunkLoss = Callable[[slice, Tensor, Tensor], Tensor]
"""Compute the summed loss of some of the N tokens from their log-probabilities [n] and their distributions' entropies
[n]; both require gradients.
"""


def output_head(model: PreTrainedModel) -> OutputHead:
    """Return the model's head; its weight [V, D] is shared out by rows over several processes, and trained in place.

    No family's head has a bias (`node.policy.config.FAMILIES`).
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return OutputHead(head.weight, LogitRule.of(model.config))


def final_states(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Compute the hidden states [N, D] that predict a row's drawn tokens; call in `packed_attention`."""
    where = layout_arguments(model, row.layout)

    def gather(states_1LD: Tensor) -> Tensor:
        # The end of a prompt predicts the first token of each of its samples. As in `attention`, `embedding` sums
        # gradients of shared columns in a fixed order.
        return F.embedding(row.predicts, states_1LD[0])

    with _head_replaced(model, gather):
        states_ND: Tensor = model(input_ids=row.ids, position_ids=row.positions, use_cache=False, **where).logits
    return states_ND


def head_logprobs(
    states_ND: Tensor, head: OutputHead, targets_N: Tensor, *, temperature: float, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """Compute the log-probabilities [N] of `targets_N`, without gradients; every process must call it."""
    weight_VD, shard = head.weight, VocabularyShard.of(head.weight)
    with torch.no_grad(), _in_float32(states_ND):
        wide_vD, logp_N = own_rows(weight_VD).float(), states_ND.new_empty(len(targets_N), dtype=torch.float32)
        for part in shard.chunks(targets_N, token_bytes=4 * len(weight_VD), chunk_bytes=chunk_bytes):
            logits_mv = head.rule.apply(F.linear(shard.gather(states_ND, part).float(), wide_vD))
            logprobs_mv = shard.log_softmax(logits_mv.div_(temperature))
            del logits_mv
            picked_m = _pick(logprobs_mv, *shard.places(shard.gather(targets_N, part)))
            del logprobs_mv  # before the next chunk's
            shard.take_own(shard.sum_all(picked_m), out_n=logp_N[part])
        return logp_N


def head_backward(
    states_ND: Tensor,
    head: OutputHead,
    targets_N: Tensor,
    *,
    temperature: float,
    loss: ChunkLoss,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Run the head forward and backward, and the backward pass of what computed `states_ND`.

    The gradient of the sum of all processes' losses is added to `head.weight.grad`, in place, unless that weight is
    frozen, and to the gradients of `states_ND`'s graph. Every process must call it. Return log-probabilities of
    `targets_N` [N] and entropies in nats [N].
    """
    weight_VD, shard = head.weight, VocabularyShard.of(head.weight)
    with torch.no_grad(), _in_float32(states_ND):
        wide_vD, wide_ND = own_rows(weight_VD).float(), states_ND.float()
        grad_vD = _gradient_so_far(weight_VD)
        grad_ND = torch.empty_like(wide_ND)
        logp_N, entropy_N = wide_ND.new_empty(2, len(targets_N))
        for part in shard.chunks(targets_N, token_bytes=4 * len(weight_VD), chunk_bytes=chunk_bytes):
            states_mD, targets_m = shard.gather(wide_ND, part), shard.gather(targets_N, part)
            logits_mv = head.rule.apply(F.linear(states_mD, wide_vD))
            slopes_mv = head.rule.slopes(logits_mv)
            logprobs_mv = shard.log_softmax(logits_mv.div_(temperature))
            del logits_mv
            probs_mv = logprobs_mv.exp()
            picked_m = _pick(logprobs_mv, *shard.places(targets_m))
            logp_m, entropy_m = shard.sum_all(torch.stack((picked_m, -torch.linalg.vecdot(probs_mv, logprobs_mv))))
            shard.take_own(logp_m, out_n=logp_N[part])
            shard.take_own(entropy_m, out_n=entropy_N[part])
            by_logp_n, by_entropy_n = _slopes(loss, part, logp_N[part], entropy_N[part])
            chunk = slice(0, part.stop - part.start)
            by_logp_m = shard.gather(by_logp_n, chunk)
            by_entropy_m = None if by_entropy_n is None else shard.gather(by_entropy_n, chunk)
            grad_mv = _logit_gradients(logprobs_mv, probs_mv, entropy_m, by_logp_m, by_entropy_m)
            places_m, is_here_m = shard.places(targets_m)
            grad_mv.scatter_add_(1, places_m[:, None], (by_logp_m * is_here_m)[:, None]).div_(temperature)
            if slopes_mv is not None:
                grad_mv.mul_(slopes_mv)
            shard.sum_own(torch.mm(grad_mv, wide_vD), out_n=grad_ND[part])
            if grad_vD is not None:
                grad_vD.addmm_(grad_mv.t(), states_mD)
            del logprobs_mv, probs_mv, grad_mv, slopes_mv  # before the next chunk's
        if grad_vD is not None:
            weight_VD.grad = like_weight(grad_vD.to(weight_VD.dtype), weight_VD)
        del grad_vD, wide_vD  # copies, of weights in 16 bits
    states_ND.backward(grad_ND.to(states_ND.dtype))  # type: ignore[no-untyped-call]
    return logp_N, entropy_N


def _gradient_so_far(weight_VD: Tensor) -> Tensor | None:
    """Return this process's rows [v, D] of the gradient until now, in float32; None for a frozen weight."""
    if not weight_VD.requires_grad:
        return None
    if weight_VD.grad is None:
        return torch.zeros_like(own_rows(weight_VD), dtype=torch.float32)
    return own_rows(weight_VD.grad).float()


def _logit_gradients(
    logprobs_mv: Tensor, probs_mv: Tensor, entropy_m: Tensor, by_logp_m: Tensor, by_entropy_m: Tensor | None
) -> Tensor:
    """Return the loss's derivative along logits / temperature but for the targets' own part, which is `by_logp_m`.

    d logp / d logits = onehot(target) - probs, d entropy / d logits = -probs * (logprobs + entropy). In the memory of
    `probs_mv`; overwrites `logprobs_mv`.
    """
    if by_entropy_m is None:
        return probs_mv.mul_(-by_logp_m[:, None])
    logprobs_mv.add_(entropy_m[:, None]).mul_(by_entropy_m[:, None]).add_(by_logp_m[:, None])
    return probs_mv.mul_(logprobs_mv).neg_()


def _in_float32(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def _slopes(loss: ChunkLoss, part: slice, logp_n: Tensor, entropy_n: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the loss's derivatives along log-probabilities and entropies [n]; None if it has no entropies."""
    logp_n, entropy_n = (each.detach().requires_grad_() for each in (logp_n, entropy_n))
    with torch.enable_grad():
        total = loss(part, logp_n, entropy_n)
    by_logp_n, by_entropy_n = torch.autograd.grad(total, (logp_n, entropy_n), allow_unused=True)
    return by_logp_n, by_entropy_n


def _pick(logprobs_mv: Tensor, places_m: Tensor, is_here_m: Tensor) -> Tensor:
    """Return the log-probabilities [m] of targets whose rows are here, and 0 for others."""
    return torch.where(is_here_m, logprobs_mv.gather(1, places_m[:, None])[:, 0], 0)


@contextmanager
def _head_replaced(model: PreTrainedModel, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have the model return `function` of its final states [1, L, D] in place of logits.

    Its base model alone cannot be called instead: FSDP gathers the root's parameters when the root is called.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    family = ATTENTION_FAMILIES.get(model.config.model_type)
    # What the model would do to logits, it would do to the states.
    idle = {family.logit_divisor: 1.0, family.logit_cap: None} if family else {}
    before = {name: getattr(model.config, name) for name in idle if name}
    head.forward = function
    for name in before:
        setattr(model.config, name, idle[name])
    try:
        yield
    finally:
        del head.forward
        for name, value in before.items():
            setattr(model.config, name, value)
