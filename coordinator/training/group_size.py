"""Size bound of an admitted group; separate from `groups` for users that need no torch."""

from __future__ import annotations

from node.protocol.run import RunSpec

_NUMBER_BYTES = 9
_OTHER_BYTES = 64


def max_group_bytes(spec: RunSpec) -> int:
    """Return an upper bound of an admitted group's blob in bytes: a number takes at most 9 in MessagePack."""
    sampling = spec.sampling
    row = _NUMBER_BYTES * (1 + sampling.most_tokens + sampling.max_new_tokens + 3 * spec.most_pieces) + _OTHER_BYTES
    return sampling.group_size * row + _OTHER_BYTES
