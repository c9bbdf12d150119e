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


def count_tokens(sample: Sample) -> int:
    """Count a sample's tokens: prompt, completion and replies."""
    replies = sum(len(ids) for _, ids in sample.replies)
    return len(sample.prompt_ids) + len(sample.completion_ids) + replies


def encode_group(group: Group) -> bytes:
    """Encode an admitted group as a blob."""
    return msgspec.msgpack.encode(group)


def decode_group(data: bytes) -> Group:
    """Decode a blob written by `encode_group`; raises StorageFault, also for one that cannot be trained on.

    What a verifier of another release, or a broken one, has written would else end the trainer in the middle of a step,
    again each time it is started; a group that is at fault is measured again.
    """
    try:
        group = msgspec.msgpack.decode(data, type=Group)
    except msgspec.DecodeError as error:
        raise StorageFault(f"blob is not an admitted group: {error}") from error
    fault = _fault(group)
    if fault is not None:
        raise StorageFault(f"blob is not an admitted group: {fault}")
    return group


def _fault(group: Group) -> str | None:
    """Return what of the group does not belong together, None if all does."""
    if not group.rollouts or len(group.rewards) != len(group.rollouts):
        return f"{len(group.rewards)} rewards for {len(group.rollouts)} completions"
    for sample in group.rollouts:
        drawn = len(sample.completion_ids)
        if not drawn or not sample.prompt_ids or len(sample.logprobs) != drawn:
            return f"{len(sample.logprobs)} log-probabilities for {drawn} tokens after {len(sample.prompt_ids)}"
        if sample.segments and sum(tokens for _, tokens in sample.segments) != drawn:
            return f"segments that are not of its {drawn} tokens"
        places = [before for before, _ in sample.replies]
        if places != sorted(places) or not all(0 <= place <= drawn for place in places):
            return f"replies that are not within its {drawn} tokens"
    return _fault_of_experts(group)


def _fault_of_experts(group: Group) -> str | None:
    """Return what is wrong with the experts: unless there are none, as many bytes for each token but the last."""
    if group.experts and len(group.experts) != len(group.rollouts):
        return f"experts of {len(group.experts)} completions for {len(group.rollouts)}"
    met = [(len(one), count_tokens(sample) - 1) for one, sample in zip(group.experts, group.rollouts) if one]  # noqa: B905
    widths = {divmod(size, tokens) for size, tokens in met}
    return None if len(widths) <= 1 and all(not rest for _, rest in widths) else "experts that are not of its tokens"
