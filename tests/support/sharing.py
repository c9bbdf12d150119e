"""One model in several processes against the same model whole, in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from coordinator.training import vocabulary
from coordinator.training.groups import Sample
from coordinator.training.head import final_states, head_backward, head_logprobs, output_head
from coordinator.training.packing import PackedRow, Scored, pack
from coordinator.training.world import World, open_world
from node.policy.file import load_policy
from node.policy.models.base import RecurrentForCausalLM
from node.policy.packed_attention import packed_attention

TEMPERATURE = 0.7
CHUNK_TOKENS = 3


def compare_gradients(state: Path) -> None:
    """Compare log-probabilities and gradients of a row of each process, of unequal lengths and in several chunks.

    Raise in a process whose rows have others than a single process finds for all of these rows.
    """
    with open_world(device="cpu") as world:
        whole, parts = models(state, world)
        chunk_bytes = 4 * whole.config.hidden_size * world.size * CHUNK_TOKENS
        rows = [row_of(whole, drawn=2 + 5 * rank) for rank in range(world.size)]
        with patch.object(vocabulary, "LOOKUP_BYTES", chunk_bytes), packed_attention(whole, parts):
            found = backward(parts, rows[world.rank])
            wanted = [backward(whole, row) for row in rows]
        torch.testing.assert_close(found, wanted[world.rank], rtol=0, atol=1e-5)
        for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
            own, first = world.own_part(ours.grad)
            expected = theirs.grad.flatten()[first : first + len(own)]
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-5 * float(theirs.grad.abs().max()))


def compare_autocast(state: Path) -> None:
    """Raise if layers gathered in 16 bits stay after the forward pass, or log-probabilities are worse than one's."""
    with open_world(device="cpu", gathered_in=torch.bfloat16) as world:
        whole, parts = models(state, world)
        row = row_of(whole, drawn=20)
        with packed_attention(whole, parts):
            exact = logprobs(whole, row)
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                alone = logprobs(whole, row)
                with held_matrices(whole) as by_one:
                    backward(whole, row)
                with held_matrices(parts) as by_several:
                    backward(parts, row)
                shared = logprobs(parts, row)
        assert len(by_one) > 0
        assert by_several == []
        assert rms(shared - exact) < 1.25 * rms(alone - exact)


def models(state: Path, world: World) -> tuple[Any, Any]:
    """Load the policy of `state` whole, and shared out."""
    path = state / "policy-0.safetensors"
    whole, parts = (load_policy(path, dtype=torch.float32, shards=each).model for each in (None, world))
    return whole.train(), parts.train()


def row_of(model: Any, *, drawn: int) -> PackedRow:
    """Pack a sample that begins with the padding token, which learns nothing as an input."""
    ids = torch.randint(5, 100, (drawn,), generator=torch.Generator().manual_seed(drawn)).tolist()
    sample = Sample((0, 5, 6), tuple(ids), (-4.5,) * drawn)
    recurrent = isinstance(model, RecurrentForCausalLM)
    (row,) = pack([Scored(sample, 1.0, (0,) * drawn)], row_tokens=64, recurrent=recurrent)
    return row


def backward(model: Any, row: PackedRow) -> Tensor:
    head = output_head(model)
    found, _ = head_backward(
        final_states(model, row),
        head,
        row.targets,
        temperature=TEMPERATURE,
        loss=lambda _part, logp_n, entropy_n: (logp_n.exp() - 0.3 * entropy_n).sum(),
        chunk_bytes=4 * len(head.weight) * CHUNK_TOKENS,
    )
    return found


def logprobs(model: Any, row: PackedRow) -> Tensor:
    with torch.no_grad():
        return head_logprobs(final_states(model, row), output_head(model), row.targets, temperature=TEMPERATURE)


@contextmanager
def held_matrices(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """List the layers' matrices in 16 bits whose memory the graph holds when the backward pass begins."""
    shapes = {tuple(each.shape) for each in model.model.layers.parameters() if each.ndim == 2}
    saved, held = list[Tensor](), list[tuple[int, ...]]()

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def restore(tensor: Tensor) -> Tensor:
        if saved:
            is_cast = (each for each in saved if each.dtype == torch.bfloat16 and {*_shapes(each)} & shapes)
            held.extend(tuple(each.shape) for each in is_cast if each.untyped_storage().nbytes())
            saved.clear()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, restore):
        yield held


def _shapes(tensor: Tensor) -> Iterator[tuple[int, ...]]:
    yield tuple(tensor.shape)
    yield tuple(reversed(tensor.shape))


def rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())
