"""Numbers within bounds, of which a run's rules are made."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e9)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[int, Meta(ge=0, le=1_000_000)]
