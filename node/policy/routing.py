"""Which experts tokens meet in a forward pass: noted for whoever trains on them, and replayed there.

A router's choice is a token's set of experts in one layer; rounding turns it where two scores are nearly equal
(docs/adr/0037-routing-is-replayed.md). Shapes: T tokens, k experts that each meets in a layer, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from node.policy.experts import routers

NARROW_EXPERTS: Final = 256
"""The most experts of a layer whose numbers take one byte each; those of more take two."""

_Output = tuple[Tensor, Tensor, Tensor]
"""Of a router: scores [T, E], weights [T, k] of the chosen experts, and their numbers [T, k]."""


@contextmanager
def noted_choices(found: Sequence[Any]) -> Iterator[list[list[Tensor]]]:
    """Note what each of these routers chooses [T, k] in each forward pass within the context, by router and pass."""
    noted: list[list[Tensor]] = [[] for _ in found]

    def note(layer: int, router: Any, _inputs: object, output: _Output) -> None:
        noted[layer].append(output[2].to(_dtype(router)))

    handles = [router.register_forward_hook(partial(note, layer)) for layer, router in enumerate(found)]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def choices_of_lines(chosen: Sequence[Tensor], *, lines: int) -> Tensor | None:
    """Return each token's choices as bytes [lines, T / lines, bytes]; None without routers.

    `chosen` is what each router chose [T, k] of a batch of `lines` sequences, as `noted_choices` has it.
    """
    if not chosen:
        return None
    return torch.cat([each.view(torch.uint8) for each in chosen], 1).view(lines, -1, _bytes(chosen)).cpu()


def are_choices(data: bytes, found: Sequence[Any], *, tokens: int) -> bool:
    """Return whether these bytes name experts of these routers for so many tokens, as `choices_of_lines` writes them.

    A number beyond a layer's experts would end a pass on a GPU, and the process with it.
    """
    width = sum(router.top_k * _dtype(router).itemsize for router in found)
    if not found or len(data) != tokens * width:
        return False
    given = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tokens, len(found), -1)
    for layer, router in enumerate(found):
        numbers = given[:, layer].contiguous().view(_dtype(router))
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < router.num_experts:
            return False
    return True


@contextmanager
def replayed_choices(model: nn.Module, choices: Tensor, is_known: Tensor) -> Iterator[None]:
    """Have the tokens of one forward pass, and of its recomputation, meet given experts within the context.

    `choices` [T, bytes] is as `choices_of_lines` has it, for the tokens of `is_known` [T]; the others meet those that
    the routers choose. Weights are the routers' own scores of the experts, so that routers are trained as ever. Raises
    ValueError for choices of other layers than the model's.
    """
    found = routers(model)
    if choices.shape[1] != sum(router.top_k * _dtype(router).itemsize for router in found):
        raise ValueError(f"{choices.shape[1]} bytes a token are not the choices of this model's {len(found)} routers")
    each = choices.shape[1] // max(1, len(found))

    def replay(layer: int, router: Any, _inputs: object, output: _Output) -> _Output:
        scores, weights, own = output
        given = choices[:, layer * each : (layer + 1) * each].contiguous().view(_dtype(router)).to(own.dtype)
        met = torch.where(is_known[:, None], given, own)
        return scores, _weigh(router, scores, met).to(weights.dtype), met

    # First, so that whoever counts a layer's load counts what is computed.
    handles = [router.register_forward_hook(partial(replay, layer), prepend=True) for layer, router in enumerate(found)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _dtype(router: Any) -> torch.dtype:
    return torch.uint8 if router.num_experts <= NARROW_EXPERTS else torch.int16


def _bytes(chosen: Sequence[Tensor]) -> int:
    return sum(each.shape[1] * each.element_size() for each in chosen)


def _weigh(router: Any, scores: Tensor, met: Tensor) -> Tensor:
    """Weigh experts [T, k] by scores [T, E] as transformers' routers weigh those that they choose."""
    if hasattr(router, "bias"):  # gpt_oss
        return scores.gather(1, met).softmax(1)
    is_sigmoid = hasattr(router, "e_score_correction_bias")
    shares = (scores.sigmoid() if is_sigmoid else scores.float().softmax(1)).gather(1, met)
    if getattr(router, "norm_topk_prob", True):
        shares = shares / (shares.sum(1, keepdim=True) + (1e-20 if is_sigmoid else 0.0))
    return shares * getattr(router, "routed_scaling_factor", 1.0)
