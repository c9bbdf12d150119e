"""Expert parallelism on paper: what each rank of a trainer would hold and send, beside what this trainer does.

The trainer shares out a layer's experts by rows, like any tensor, and gathers the layer for each row (FSDP2). With
expert parallelism a rank would keep whole experts, and tokens' states would go to whoever has theirs; all else would be
shared out and gathered as it is.
"""

from __future__ import annotations

import math

import msgspec

from coordinator.planning import formulas, roles
from coordinator.planning.roles import Item, TrainerOptions
from coordinator.planning.shape import ModelShape
from node.protocol.run import RunSpec


class ExpertPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture's experts over `ranks`: `items` are what a rank would hold with expert parallelism.

    `most_of_a_layer` is the most of a layer's experts that a rank would have; weights, gradients and moments are those
    of ranks that divide the experts evenly. Bytes are those that one rank receives in a step: `gathered_bytes` of the
    routed experts as they are gathered and their gradients reduced now, `sent_bytes` of tokens' states in their place,
    where routers choose all experts as often.
    """

    ranks: int
    experts: int
    most_of_a_layer: int
    items: tuple[Item, ...]
    gathered_bytes: float
    sent_bytes: float

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)


def plan_experts(shape: ModelShape, spec: RunSpec, settings: TrainerOptions, *, tokens: int) -> ExpertPlan | None:
    """Plan the experts of a trainer whose step has `tokens`; None without routed experts, or of one rank."""
    ranks = settings.ranks
    if not shape.routed or ranks == 1:
        return None
    item = 2 if settings.autocast else formulas.WIDE
    row = roles.row_layout(spec, settings.row_tokens).tokens
    dense = msgspec.structs.replace(shape, largest_layer=shape.largest_dense)
    met = Item("states of one layer's tokens, met and answered", 2 * item * row * shape.chosen * shape.hidden)
    return ExpertPlan(
        ranks=ranks,
        experts=shape.experts,
        most_of_a_layer=math.ceil(shape.experts / ranks),
        items=(
            *roles.trainer_items(dense, spec, settings),
            met,
            Item("CUDA, NCCL and the allocator", roles.CUDA_BYTES),
        ),
        gathered_bytes=formulas.gathered_expert_bytes(
            shape, ranks, rows=math.ceil(tokens / ranks / row), autocast=settings.autocast
        ),
        sent_bytes=formulas.sent_state_bytes(
            shape, ranks, tokens=tokens, autocast=settings.autocast, recompute=settings.recompute
        ),
    )
