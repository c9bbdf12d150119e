"""What a challenge asks a node to draw (section 14.4)."""

from __future__ import annotations

from typing import Any

from .slots import Slot
from .values import derive


def challenge_slot(request: dict[str, Any], manifest_digest: str) -> Slot:
    """Return the slot that stands for a challenge of the policy with this manifest."""
    parts = (request["run_id"], manifest_digest, request["to"], request["nonce"])
    return Slot(request["run_id"], derive("swarmproof/1 challenge", *map(bytes.fromhex, parts)).hex(), 0)
