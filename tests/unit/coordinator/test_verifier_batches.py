"""How many submissions a verifier judges together."""

from __future__ import annotations

import pytest

from coordinator.verifier.claimed import submissions_at_once
from node.protocol.environment_spec import FileSpec, PackageSpec
from node.protocol.run import EnvironmentSpec, RunSpec, SamplingSpec

ARITHMETIC = EnvironmentSpec(name="arithmetic")


@pytest.mark.parametrize(
    ("sampling", "number"),
    [
        (SamplingSpec(), 32),
        (SamplingSpec(group_size=8, max_prompt_tokens=512, max_new_tokens=448), 16),
        (SamplingSpec(group_size=16, max_prompt_tokens=1024, max_new_tokens=8192), 8),
        (SamplingSpec(max_turns=16, max_reply_tokens=2**20), 8),
    ],
)
def test_more_submissions_are_judged_together_where_the_rules_keep_them_small(
    sampling: SamplingSpec, number: int
) -> None:
    assert submissions_at_once(RunSpec(name="test", environments=(ARITHMETIC,), sampling=sampling)) == number


def test_an_environment_that_may_take_its_time_holds_up_few_others() -> None:
    package = PackageSpec(name="slow", version="1", lock=FileSpec(digest="0" * 64, bytes=1))
    slow = EnvironmentSpec(name="slow", package=package)
    assert submissions_at_once(RunSpec(name="test", environments=(ARITHMETIC, slow))) == 8
