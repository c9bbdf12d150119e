"""Admitted groups, passed from the verifier to the trainer as canonical MessagePack blobs.

The log-probabilities are the verifier's own, so that a worker cannot exploit the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from coordinator.errors import StorageFault
from node.protocol.admission import has_signal


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion, with the natural log-probabilities of its tokens when sampled.

    `segments` are (policy version, tokens) in order; empty if one policy drew all. `replies` are the environment's:
    (completion tokens before it, its token ids).
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[tuple[int, int], ...] = ()
    replies: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Group(msgspec.Struct, frozen=True, omit_defaults=True):
    """The completions of one problem, leased from policy `version`, with one reward each.

    `environment`: the number of the run's environment that the problem is of. It follows from the slot, so that blobs
    do not have it: None until a batch is read (`coordinator.training.batches`). `experts`: those that each
    completion's tokens but the last met where its log-probabilities are from (`node.policy.routing`); b"" if they are
    not known, and () if they are of no completion.
    """

    version: int
    rewards: tuple[float, ...]
    rollouts: tuple[Sample, ...]
    environment: int | None = None
    experts: tuple[bytes, ...] = ()

    @property
    def has_signal(self) -> bool:
        """Whether any rewards differ; otherwise every advantage is zero."""
        return has_signal(self.rewards)


def encode_group(group: Group) -> bytes:
    """Encode an admitted group as a blob."""
    return msgspec.msgpack.encode(group)


def decode_group(data: bytes) -> Group:
    """Decode a blob written by `encode_group`; raises StorageFault."""
    try:
        return msgspec.msgpack.decode(data, type=Group)
    except msgspec.DecodeError as error:
        raise StorageFault(f"blob is not an admitted group: {error}") from error
