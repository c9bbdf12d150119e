"""The part of a run's rules on what honest work may deviate, and on how nodes fare (docs/protocol.md, section 7)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from node.protocol.spec_types import NonNegativeFloat, Positive
from shardcast.wire import Count, Wire


class LevelSpec(Wire, frozen=True):
    """Distribution of one honest deviation, per chunk or per token.

    `variance` is that of one value, `shared_variance` that of what all values of a group have in common (its prompt,
    and the machine that drew it). `largest`: a value above it counts as it.
    """

    mean: Annotated[float, Meta(ge=-1e9, le=1e9)]
    variance: Annotated[float, Meta(ge=1e-18, le=1e9)]
    largest: Annotated[float, Meta(ge=-1e9, le=1e9)]
    shared_variance: Annotated[float, Meta(ge=0, le=1e9)] = 0.0

    def __post_init__(self) -> None:
        if self.largest - self.mean < 1e-9:
            raise ValueError("largest must exceed mean by 1e-9 or more")


class HonestSpec(Wire, frozen=True):
    """The levels of honest work, as `swarmproof calibrate` finds them; what has none is not summed up.

    `far` has one from the start, 1 token in 10, which deep policies in bfloat16 stay well below: a sketch that is right
    for part of the tokens shows in nothing else.
    """

    exponents: LevelSpec | None = None
    mantissa: LevelSpec | None = None
    sketch: LevelSpec | None = None
    far: LevelSpec | None = LevelSpec(mean=0.1, variance=0.1, largest=1.0)
    margin: LevelSpec | None = None
    logprob: LevelSpec | None = None


class LimitsSpec(Wire, frozen=True):
    """Limits of the figures; a figure equal to its limit passes.

    `false_rejections` bounds the probability that honest values sum up to a rejection, for each sum that is judged.
    `suspects` are the weights that a group is compared with where its sketches show more than `suspicion` (nats),
    and by chance in a share `second_looks` of all groups. `readings` 2: rollouts are measured in float32 as well, and
    what deviates no further than rounding does counts less.
    """

    exponent_mismatches: NonNegativeFloat = 38.0
    mantissa_mean: NonNegativeFloat = 10.0
    mantissa_median: NonNegativeFloat = 8.0
    sketch_distance: NonNegativeFloat = 3.0
    token_margin: NonNegativeFloat = 1.0
    rollout_margin_mean: NonNegativeFloat = 0.05
    logprob_error: NonNegativeFloat = 0.5
    false_rejections: Annotated[float, Meta(ge=1e-100, le=0.1)] = 1e-6
    honest: HonestSpec = HonestSpec()
    suspects: Annotated[tuple[Literal["int8", "previous"], ...], Meta(max_length=2)] = ("int8", "previous")
    suspicion: NonNegativeFloat = 2.0
    second_looks: Annotated[float, Meta(ge=0, le=1)] = 0.05
    readings: Annotated[int, Meta(ge=1, le=2)] = 1
    max_submission_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1)] = 4 * 1024 * 1024


class StandingSpec(Wire, frozen=True):
    """Probation, full rate, vesting and bans; see `node.protocol.standing`.

    `probation`: fully measured slots, admitted in a row, before any slot of a node is measured in part.
    `full_rate_floor`: the least share of a node's slots that is measured in full, however long it has been right.
    `vesting`: fully measured and admitted slots after which the credit for an earlier, partly measured one is the
    node's. `ban_after`: rejected slots without a probation passed in between, after which a node gets no more work.
    `stake`: what a node must have staked to be measured in part, in the units of the operator's registry.
    """

    probation: Positive = 8
    full_rate_floor: Annotated[float, Meta(gt=0, le=1)] = 1.0
    vesting: Positive = 2
    ban_after: Positive = 3
    stake: Count = 0
