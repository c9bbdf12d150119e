"""How long a missing dataset is waited for between attempts."""

from __future__ import annotations

import pytest

from node.datasets.fetching import MAX_COSTLY_PAUSE_SECONDS, MAX_PAUSE_SECONDS, pause_after
from shardcast.errors import LocalFault, Malformed, NotServed, ShardcastError


def pauses(error: ShardcastError, count: int) -> list[float]:
    found = [0.0]
    for _ in range(count):
        found.append(pause_after(error, last_s=found[-1]))
    return found[1:]


def test_a_source_that_has_nothing_yet_is_asked_again_soon() -> None:
    assert pauses(NotServed("nothing"), 8) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]


@pytest.mark.parametrize(
    "error", [Malformed("another file", code="wrong_content"), LocalFault("full", code="disk_full")]
)
def test_attack_another_file_under_the_runs_key_is_not_downloaded_every_few_seconds(error: ShardcastError) -> None:
    """Each attempt may be 4 GiB: an operator who signed the wrong file would use up every node's traffic."""
    found = pauses(error, 7)
    assert found == [10.0, 20.0, 40.0, 80.0, 160.0, MAX_COSTLY_PAUSE_SECONDS, MAX_COSTLY_PAUSE_SECONDS]
    assert pause_after(NotServed("nothing"), last_s=found[-1]) == MAX_PAUSE_SECONDS
