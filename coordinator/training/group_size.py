"""Size bound of an admitted group; separate from `groups` for users that need no torch."""

from __future__ import annotations

from node.protocol.run import RunSpec

_NUMBER_BYTES = 9
_OTHER_BYTES = 64
MAX_CHOICE_BYTES = 2048
"""Of the experts that a token met, which a group of a run in 16 bits may have; 960 in 60 layers with 8 of 384 each."""


def max_group_bytes(spec: RunSpec) -> int:
    """Return an upper bound of an admitted group's blob in bytes: a number takes at most 9 in MessagePack."""
    sampling = spec.sampling
    row = _NUMBER_BYTES * (1 + sampling.most_tokens + sampling.max_new_tokens + 3 * spec.most_pieces) + _OTHER_BYTES
    if spec.model.dtype != "float32":
        row += MAX_CHOICE_BYTES * sampling.most_tokens
    return sampling.group_size * row + _OTHER_BYTES
