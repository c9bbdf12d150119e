"""Admitted groups as a trainer reads them from the store: what does not belong together is refused before a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from coordinator.errors import StorageFault
from coordinator.training.groups import Group, Sample, decode_group, encode_group

SAMPLE = Sample((1, 2), (3, 4, 5), (-1.0,) * 3, segments=((0, 1), (1, 2)), replies=((2, (9,)),))
GROUP = Group(0, (0.0, 1.0), (SAMPLE, SAMPLE), experts=(bytes(10), b""))


def with_sample(**changes: Any) -> Group:
    return msgspec.structs.replace(GROUP, rollouts=(SAMPLE, replace(SAMPLE, **changes)))


def test_a_group_whose_parts_do_not_belong_together_is_no_group() -> None:
    """It would end the trainer with an index error in the middle of a step, each time that it is started again."""
    assert decode_group(encode_group(GROUP)) == GROUP
    for group in (
        msgspec.structs.replace(GROUP, rewards=(0.0,)),
        msgspec.structs.replace(GROUP, rewards=(), rollouts=(), experts=()),
        with_sample(prompt_ids=()),
        with_sample(completion_ids=(3, 4)),
        with_sample(logprobs=(-1.0,)),
        with_sample(completion_ids=(), logprobs=(), segments=()),
        with_sample(segments=((0, 4),)),
        with_sample(replies=((4, (9,)),)),
        with_sample(replies=((-1, (9,)),)),
        with_sample(replies=((2, (9,)), (1, (9,)))),
        msgspec.structs.replace(GROUP, experts=(bytes(10),)),
        msgspec.structs.replace(GROUP, experts=(bytes(11), b"")),
        msgspec.structs.replace(GROUP, experts=(bytes(10), bytes(15))),
    ):
        with pytest.raises(StorageFault, match="not an admitted group"):
            decode_group(encode_group(group))
