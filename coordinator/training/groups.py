"""An admitted group as the verifier leaves it for the trainer: canonical MessagePack in a blob.

The log-probabilities are the verifier's own, so that a worker cannot lean on the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from coordinator.errors import StorageFault
from node.protocol.admission import has_signal


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion and the natural logarithms of the probabilities with which its tokens were sampled.

    `segments` are (policy version, tokens) in order; empty where one policy drew all. `replies` are what the
    environment said in between: (completion tokens before it, its token ids).
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[tuple[int, int], ...] = ()
    replies: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one problem, leased from policy `version`, with one reward each."""

    version: int
    rewards: tuple[float, ...]
    rollouts: tuple[Sample, ...]

    @property
    def has_signal(self) -> bool:
        """Whether any reward differs from another: where none does, every advantage is zero."""
        return has_signal(self.rewards)


def encode_group(group: Group) -> bytes:
    """The blob of an admitted group."""
    return msgspec.msgpack.encode(group)


def decode_group(data: bytes) -> Group:
    """Read a blob that `encode_group` wrote; raises StorageFault."""
    try:
        return msgspec.msgpack.decode(data, type=Group)
    except msgspec.DecodeError as error:
        raise StorageFault(f"not an admitted group: {error}") from error
