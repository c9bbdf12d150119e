"""The embedding and the output head of several processes, each of which holds some rows of the vocabulary.

Gathered, they would be a step's largest tensors, and their gradients again. So they are never gathered: the tokens of
all processes come to the rows instead, as ids or hidden states, and every process computes its own rows' part for all
of them (Megatron-LM, arXiv 1909.08053, section 3). A row's gradient is whole where the row is, and needs no reduction.

Every process must look up and predict equally often. Shapes: V ids of which a process has v, D hidden units, n tokens
of each process in a chunk, m = n * processes of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from coordinator.errors import BadConfiguration

# Their names since torch 2.13, which warns of those before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

LOOKUP_BYTES = 64 * 2**20
"""Bound on the embeddings, of tokens of all processes, that one process sends or receives at a time."""


def rows_of_rank(rank: int, size: int, rows: int) -> tuple[int, int]:
    """Return the first of `rows` rows that a process of `size` holds, and how many it holds, as FSDP shares them."""
    most = math.ceil(rows / size)
    first = min(rank * most, rows)
    return first, min(most, rows - first)


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This process's `rows` ids from `first` on; without a `group`, the whole vocabulary of a single process."""

    first: int
    rows: int
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(weight: Tensor) -> VocabularyShard:
        """Return what this process holds of an embedding [V, D]."""
        if not isinstance(weight, DTensor):
            return VocabularyShard(0, len(weight))
        group = weight.device_mesh.get_group()
        return VocabularyShard(*rows_of_rank(group.rank(), group.size(), len(weight)), group)

    @property
    def size(self) -> int:
        """How many processes share the vocabulary."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return 0 if self.group is None else self.group.rank()

    def chunks(self, tokens: Tensor, *, token_bytes: int, chunk_bytes: int) -> Iterator[slice]:
        """Yield slices of tokens, as many in every process, that together take at most `chunk_bytes`, or one of each.

        `token_bytes` are those of one token of each process. The slices cover the longest of all processes' `tokens`.
        """
        most = len(tokens)
        if self.group is not None:
            longest = torch.tensor([most], device=tokens.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
            most = int(longest)
        count = max(1, chunk_bytes // token_bytes)
        return (slice(start, min(start + count, most)) for start in range(0, most, count))

    def gather(self, own: Tensor, part: slice) -> Tensor:
        """Return the tokens [m, ...] of all processes in a chunk, of which `own` [N, ...] are this one's.

        A process without as many tokens adds zeros.
        """
        if self.group is None:
            return own[part]
        found, count = own[part], part.stop - part.start
        padded = F.pad(found, (0, 0) * (own.ndim - 1) + (0, count - len(found))).contiguous()
        gathered = own.new_empty(count * self.size, *own.shape[1:])
        _all_gather(gathered, padded, group=self.group)
        return gathered

    def take_own(self, values_m: Tensor, *, out_n: Tensor) -> None:
        """Copy what belongs to this process's tokens [n, ...] of a chunk out of all processes'."""
        out_n.copy_(values_m.view(self.size, -1, *out_n.shape[1:])[self.rank, : len(out_n)])

    def sum_own(self, values_m: Tensor, *, out_n: Tensor) -> None:
        """Sum [m, ...] over all processes, of which this one receives its own tokens' [n, ...]."""
        if self.group is None:
            out_n.copy_(values_m)
            return
        own_n = values_m.new_empty(len(values_m) // self.size, *out_n.shape[1:])
        _reduce_scatter(own_n, values_m, group=self.group)
        out_n.copy_(own_n[: len(out_n)])

    def sum_all(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def log_softmax(self, logits_mv: Tensor) -> Tensor:
        """Return log-probabilities, normalised over the whole vocabulary; overwrites the logits."""
        if self.group is None:
            return torch.log_softmax(logits_mv, dim=-1)
        own_m = torch.logsumexp(logits_mv, dim=-1)
        parts = own_m.new_empty(self.size * len(own_m))
        _all_gather(parts, own_m, group=self.group)
        return logits_mv.sub_(torch.logsumexp(parts.view(self.size, -1), dim=0)[:, None])

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return each id's row here, and whether it has one; the row is arbitrary if not."""
        places = ids - self.first
        return places.clamp(0, self.rows - 1), (places >= 0) & (places < self.rows)


def own_rows(tensor_VD: Tensor) -> Tensor:
    """Return this process's rows [v, D] of an embedding or of its gradient, in place."""
    return tensor_VD.to_local() if isinstance(tensor_VD, DTensor) else tensor_VD


def like_weight(own_vD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return this process's rows as a tensor that is shared out as `weight_VD` is."""
    return _as_rows(own_vD, weight_VD, weight_VD.device_mesh) if isinstance(weight_VD, DTensor) else own_vD


def share_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Share out the rows of a model's embedding and head, and return the new parameters.

    Afterwards the embedding looks up in all processes' rows, and the head has none but this process's: only
    `coordinator.training.head` can compute with it. Raises BadConfiguration where a process would get no rows.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding = _embedding(model)
    modules: list[Any] = [head] if embedding is None else [head, embedding]
    fewest = min(len(module.weight) for module in modules)
    if rows_of_rank(mesh.size() - 1, mesh.size(), fewest)[1] < 1:
        raise BadConfiguration(f"a vocabulary of {fewest} ids cannot be shared out over {mesh.size()} processes")
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        if module.weight not in shared:
            shared[module.weight] = nn.Parameter(_shard(module.weight, mesh), module.weight.requires_grad)
        module.weight = shared[module.weight]
    if embedding is not None:
        embedding.forward = partial(_look_up, embedding)
    return set(shared.values())


def _embedding(model: PreTrainedModel) -> Any | None:
    """Return the embedding of tokens; None if the family embeds something else."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _shard(weight: Tensor, mesh: DeviceMesh) -> DTensor:
    first, rows = rows_of_rank(mesh.get_local_rank(), mesh.size(), len(weight))
    return _as_rows(weight.detach()[first : first + rows].clone(), weight, mesh)


def _as_rows(own_vD: Tensor, whole_VD: Tensor, mesh: DeviceMesh) -> DTensor:
    shape, stride = whole_VD.shape, whole_VD.stride()
    return DTensor.from_local(own_vD, mesh, (Shard(0),), run_check=False, shape=shape, stride=stride)


def _look_up(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    weight: Any = embedding.weight
    shard = VocabularyShard.of(weight)
    found_ND: Tensor = _Lookup.apply(weight.to_local(), ids.flatten(), shard, embedding.padding_idx)  # type: ignore[no-untyped-call]
    scale: Tensor | None = getattr(embedding, "embed_scale", None)  # transformers' own lookup multiplies by it
    if scale is not None:
        found_ND = found_ND * scale.to(found_ND.dtype)
    return found_ND.view(*ids.shape, -1)


class _Lookup(torch.autograd.Function):
    """Rows of all processes for this one's ids."""

    @staticmethod
    def forward(ctx: Any, own_vD: Tensor, ids_N: Tensor, shard: VocabularyShard, padding_id: int | None) -> Tensor:
        ctx.save_for_backward(ids_N)
        ctx.shard, ctx.padding_id = shard, padding_id
        found_ND = own_vD.new_empty(len(ids_N), own_vD.shape[1])
        for part in _lookup_chunks(ids_N, own_vD, shard):
            places_m, is_here_m = shard.places(shard.gather(ids_N, part))
            values_mD = F.embedding(places_m, own_vD).masked_fill_(~is_here_m[:, None], 0)
            shard.sum_own(values_mD, out_n=found_ND[part])
        return found_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, None, None, None]:
        (ids_N,) = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        grad_vD: Tensor | None = None
        for part in _lookup_chunks(ids_N, grad_ND, shard):
            ids_m, grad_mD = shard.gather(ids_N, part), shard.gather(grad_ND, part)
            places_m, learns_m = shard.places(ids_m)
            if ctx.padding_id is not None:
                learns_m &= ids_m != ctx.padding_id
            # Sorted by place, an id's gradients are summed in a fixed order; `index_add_` promises none on a GPU.
            places_m, grad_mD = places_m[learns_m], grad_mD[learns_m]
            found_vD = torch.ops.aten.embedding_dense_backward(grad_mD, places_m, shard.rows, -1, False)
            grad_vD = found_vD if grad_vD is None else grad_vD.add_(found_vD)
        return grad_vD, None, None, None


def _lookup_chunks(ids_N: Tensor, like_D: Tensor, shard: VocabularyShard) -> Iterator[slice]:
    token_bytes = like_D.element_size() * like_D.shape[-1] * shard.size
    return shard.chunks(ids_N, token_bytes=token_bytes, chunk_bytes=LOOKUP_BYTES)
