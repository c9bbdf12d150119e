"""An admitted group as the verifier leaves it for the trainer: canonical MessagePack in a blob.

The log-probabilities are the verifier's own, so that a worker cannot lean on the tolerance.
"""

from __future__ import annotations

import msgspec

from coordinator.errors import StorageFault
from coordinator.training.grpo import Group


def encode_group(group: Group) -> bytes:
    """The blob of an admitted group."""
    return msgspec.msgpack.encode(group)


def decode_group(data: bytes) -> Group:
    """Read a blob that `encode_group` wrote; raises StorageFault."""
    try:
        return msgspec.msgpack.decode(data, type=Group)
    except msgspec.DecodeError as error:
        raise StorageFault(f"not an admitted group: {error}") from error
