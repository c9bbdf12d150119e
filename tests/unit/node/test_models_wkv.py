"""The recurrence in chunks is the recurrence token by token, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.modelling.policies import random_model
from benchmarks.modelling.rwkv_package import package_logits
from node.policy.models.wkv import WKV_CHUNK, log_decay, wkv_chunked, wkv_step

B, H, N = 2, 3, 4


def inputs(tokens: int, *, spread: float = 2.0) -> list[Tensor]:
    """r, k, v, w [B, T, H, N], u [H, N] and a state [B, H, N, N]."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(B, tokens, H, N)] * 4 + [(H, N), (B, H, N, N)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[3] *= spread
    return [each.requires_grad_() for each in made]


def by_steps(given: list[Tensor]) -> tuple[Tensor, Tensor]:
    r, k, v, w, bonus, state = given
    out = []
    for t in range(r.shape[1]):
        read, state = wkv_step(r[:, t], k[:, t], v[:, t], log_decay(w[:, t]), bonus_HN=bonus, state_BHNN=state)
        out.append(read)
    return torch.stack(out, 1), state


def by_chunks(given: list[Tensor], *, start: int = 0) -> tuple[Tensor, Tensor]:
    r, k, v, w, bonus, state = given
    return wkv_chunked(r, k, v, log_decay(w), bonus_HN=bonus, state_BHNN=state, start=start)


@pytest.mark.parametrize("tokens", [1, 2, WKV_CHUNK - 1, WKV_CHUNK, WKV_CHUNK + 1, 3 * WKV_CHUNK + 5])
@pytest.mark.parametrize("start", [0, 1, WKV_CHUNK - 1, WKV_CHUNK + 3])
def test_chunks_give_what_steps_give_and_the_same_gradients(tokens: int, start: int) -> None:
    given = inputs(tokens)
    found = []
    for out, state in (by_steps(given), by_chunks(given, start=start)):
        loss = (out * torch.arange(out.numel()).view_as(out).cos()).sum() + state.square().sum()
        found.append((out.detach(), state.detach(), *torch.autograd.grad(loss, given)))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(one.abs().max()))


@pytest.mark.parametrize("w", [5.0, 100.0, -20.0])
def test_a_channel_that_forgets_all_or_nothing_gives_numbers(w: float) -> None:
    """A policy may decay by more than float32's range within a chunk; quotients of powers would make NaN of it."""
    given = inputs(40)
    with torch.no_grad():
        given[3][..., ::2] = w
        given[3][..., 1::2] = 3.0
    (one, state), (other, ended) = by_chunks(given), by_steps(given)
    assert (one - other).abs().max() < 1e-4
    assert (state - ended).abs().max() < 1e-4
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(one.sum() + state.sum(), given))


def test_under_autocast_the_recurrence_stays_in_float32() -> None:
    """Training in bfloat16 must not train another model than the one that is served."""
    given = inputs(40)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = by_chunks(given)
    assert torch.equal(out, by_chunks(given)[0])
    assert state.dtype == torch.float32


@pytest.mark.system
@pytest.mark.parametrize("name", ["eagle", "finch"])
@torch.inference_mode()
def test_the_authors_own_package_computes_the_same(name: str) -> None:
    """Whoever trained an Eagle or Finch elsewhere must get the model they trained."""
    model = random_model(name, spread=0.1)
    ids = torch.randint(0, 128, (2, 3 * WKV_CHUNK + 5), generator=torch.Generator().manual_seed(1))
    assert (package_logits(model, ids.tolist()) - model(input_ids=ids).logits).abs().max() <= 1e-3
