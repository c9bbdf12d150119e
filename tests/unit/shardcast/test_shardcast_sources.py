"""Choosing sources: a slow, failing or lying relay must lose its draws, and get them back when it recovers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shardcast.errors import CorruptChunk, LocalFault, NotServed, TooSlow, Unreachable
from shardcast.fetch.source import SourceLimits
from shardcast.fetch.sources import MAX_REMEMBERED, Sources

FAST, SLOW, BAD = "http://fast:1", "http://slow:1", "http://bad:1"


def pool(*urls: str, **limits: float) -> Sources:
    return Sources(urls, limits=SourceLimits(**limits), rng=random.Random(7))  # type: ignore[arg-type]


def draws(sources: Sources, now: float, count: int = 2000) -> Counter[str | None]:
    return Counter(sources.draw(now) for _ in range(count))


def row(sources: Sources, url: str, now: float) -> dict[str, object]:
    return next(row for row in sources.status(now) if row["url"] == url)


def test_bandwidth_decides_the_share_of_draws() -> None:
    sources = pool(FAST, SLOW)
    sources.succeeded(FAST, received_bytes=900, seconds=1, now=0)
    sources.succeeded(SLOW, received_bytes=100, seconds=1, now=0)
    counted = draws(sources, 0)
    assert 0.86 < counted[FAST] / 2000 < 0.94


def test_a_slow_source_is_still_tried_sometimes() -> None:
    """Otherwise nobody would notice that it has become fast."""
    sources = pool(FAST, SLOW)
    sources.succeeded(FAST, received_bytes=10**9, seconds=1, now=0)
    sources.succeeded(SLOW, received_bytes=1, seconds=1, now=0)
    assert 10 < draws(sources, 0)[SLOW] < 120


def test_a_failed_fetch_never_raises_the_bandwidth() -> None:
    """The defect of shardcast 0.3.2: seconds until the timeout were read as MB/s."""
    sources = pool(BAD)
    sources.succeeded(BAD, received_bytes=100, seconds=1, now=0)
    before = row(sources, BAD, 0)["bytes_per_s"]
    sources.failed(BAD, TooSlow("60 s"), 60)
    sources.lost_race(BAD, 60)
    assert row(sources, BAD, 60)["bytes_per_s"] == before


def test_failures_cost_draws_and_heal_with_time() -> None:
    sources = pool(FAST, BAD, healing_half_life_s=10, first_backoff_s=0)
    for url in (FAST, BAD):
        sources.succeeded(url, received_bytes=100, seconds=1, now=0)
    for _ in range(8):
        sources.failed(BAD, Unreachable("refused"), 0)
    assert draws(sources, 0)[BAD] < 250
    assert 800 < draws(sources, 200)[BAD] < 1200


def test_a_failing_source_backs_off_longer_each_time_and_success_ends_it() -> None:
    sources = pool(BAD, first_backoff_s=1, max_backoff_s=8)
    delays = []
    now = 0.0
    for _ in range(6):
        sources.failed(BAD, Unreachable("refused"), now)
        at = sources.next_usable_at()
        assert at is not None
        delays.append(at - now)
        assert sources.draw(at - 0.01) is None
        assert sources.draw(at + 0.01) == BAD
        now = at
    assert all(0.5 * 2**n <= delay <= 1.5 * 2**n for n, delay in enumerate(delays[:4]))
    assert max(delays) <= 12
    sources.succeeded(BAD, received_bytes=1, seconds=1, now=now)
    sources.failed(BAD, Unreachable("refused"), now)
    at = sources.next_usable_at()
    assert at is not None
    assert at - now <= 1.5


def test_a_liar_is_quarantined_with_the_reason_and_longer_when_it_lies_again() -> None:
    sources = pool(FAST, BAD, first_quarantine_s=10, max_quarantine_s=30)
    sources.failed(BAD, CorruptChunk("chunk 5 is wrong"), 0)
    sources.failed(BAD, CorruptChunk("chunk 6 is wrong"), 0)
    described = row(sources, BAD, 1)
    assert (described["state"], described["code"], described["reason"]) == (
        "quarantined",
        "corrupt_chunk",
        "chunk 5 is wrong",
    )
    assert described["offences"] == 1, "requests in flight at once are one offence"
    assert draws(sources, 9.9)[BAD] == 0
    assert draws(sources, 10.1)[BAD] > 0
    sources.failed(BAD, CorruptChunk("again"), 11)
    assert draws(sources, 30.9)[BAD] == 0
    for _ in range(5):
        sources.failed(BAD, CorruptChunk("again"), 1000)
    assert draws(sources, 1031)[BAD] > 0


def test_slots_per_source_are_bounded() -> None:
    """A source that hangs must not hold every slot of a download."""
    sources = pool(FAST, per_source=2)
    assert sources.draw(0) == FAST
    sources.started(FAST)
    assert sources.draw(0) is None, "an unproven source gets one chunk"
    sources.finished(FAST)
    sources.succeeded(FAST, received_bytes=1, seconds=1, now=0)
    for _ in range(2):
        assert sources.draw(0) == FAST
        sources.started(FAST)
    assert sources.draw(0) is None
    sources.finished(FAST)
    assert sources.draw(0) == FAST


def test_a_race_asks_somebody_else() -> None:
    sources = pool(FAST, SLOW)
    assert sources.draw(0, exclude=[FAST]) == SLOW
    assert sources.draw(0, exclude=[FAST, SLOW]) is None


def test_replacing_sources_keeps_what_was_measured() -> None:
    sources = pool(FAST, SLOW)
    sources.succeeded(FAST, received_bytes=100, seconds=1, now=0)
    sources.set_urls([FAST + "/", BAD])
    assert sources.urls == [FAST, BAD]
    assert row(sources, FAST, 0)["bytes_per_s"] == 100
    sources.finished(SLOW)
    sources.failed(SLOW, Unreachable("gone"), 0)


def test_the_most_telling_error_is_a_lie() -> None:
    sources = pool(FAST, BAD)
    sources.failed(FAST, Unreachable("refused"), 0)
    sources.failed(BAD, CorruptChunk("wrong"), 0)
    error = sources.last_error()
    assert error is not None
    assert error.code == "corrupt_chunk"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "relay",
        "ftp://a",
        "http://",
        "http://a:99999",
        "http://a?x=1",
        "http://a#b",
        "file:///etc/passwd",
        "http://user@a",
        "http://[::1",
    ],
)
def test_a_source_that_is_no_url_is_refused_by_name(url: str) -> None:
    sources = pool(FAST)
    with pytest.raises(LocalFault) as caught:
        sources.set_urls([SLOW, url])
    assert caught.value.code == "bad_url"
    assert sources.urls == [FAST]


# -- stripes


A, B, C, SPARE = (f"http://{name}:1" for name in ("a", "b", "c", "spare"))


def striped(**limits: float) -> Sources:
    sources = pool(**limits)
    sources.set_urls([SPARE], stripes=[[A, B], [B, C]])
    return sources


def test_each_stripe_is_asked_of_its_first_candidate_alone() -> None:
    """Asking whoever answers fastest would put the whole load on the relays next to the origin, and on the origin."""
    sources = striped(per_source=2)
    assert sources.stripes == 2
    assert set(sources.urls) == {A, B, C, SPARE}
    assert [sources.parent(stripe, 0) for stripe in (0, 1, 2, 3)] == [A, B, A, B]
    sources.started(A)
    sources.started(A)
    assert sources.parent(0, 0) is None, "it waits for its parent rather than load another"
    assert sources.helper(0, 0) == B, "unless that one lags"


def test_a_parent_that_dies_or_lies_is_replaced_by_the_next_candidate() -> None:
    sources = striped(first_backoff_s=1.0)
    sources.failed(A, Unreachable("gone"), 0)
    assert sources.parent(0, 0.1) == B
    sources.failed(B, CorruptChunk("lied"), 0)
    assert sources.parent(0, 0.1) in {C, SPARE}, "with no candidate left, whoever there is"
    assert sources.parent(1, 0.1) == C
    assert sources.parent(0, 5) == A, "and tried again when it has had time"


def test_a_stripe_without_candidates_leaves_no_stripes() -> None:
    sources = pool()
    sources.set_urls([A, B], stripes=[[A], []])
    assert sources.stripes == 1
    assert sources.parent(0, 0) in {A, B}


def test_versions_that_a_source_does_not_keep_cost_no_more_one_after_another() -> None:
    """An audit asks relays for many old policies: each took half a minute once a few had been refused."""
    sources = pool(BAD, first_backoff_s=0.1, max_backoff_s=10)
    now = 0.0
    for _ in range(20):
        for refusals in range(3):
            sources.failed(BAD, NotServed("404", code="not_served"), now, of_chunk=True, refusals=refusals)
            at = sources.next_usable_at()
            assert at is not None
            assert 0.05 * 2**refusals <= at - now <= 0.15 * 2**refusals
            now = at
    sources.failed(BAD, Unreachable("refused"), now, of_chunk=True)
    at = sources.next_usable_at()
    assert at is not None
    assert at - now <= 0.15  # the first failure of its own


def test_a_source_that_is_back_is_asked_at_once() -> None:
    """After an outage of a minute nobody wants to wait out a back-off that no longer has a reason."""
    sources = pool(FAST)
    for _ in range(10):
        sources.failed(FAST, Unreachable("away"), 0)
    assert sources.draw(3) is None
    sources.answered(FAST)
    assert sources.draw(3) == FAST
    sources.failed(FAST, CorruptChunk("lied"), 3)
    sources.answered(FAST)
    assert sources.draw(4) is None, "a liar stays in quarantine, however politely it answers"


# -- strangers: addresses are free, so that any number of sources may be there that never deliver


STRANGERS = [f"http://stranger-{number}:1" for number in range(40)]


def deliver(sources: Sources, url: str) -> None:
    sources.started(url)
    sources.finished(url)
    sources.succeeded(url, received_bytes=100, seconds=1, now=0)


def test_strangers_together_get_few_chunks_while_somebody_delivers() -> None:
    """Each was weighted like the best, so that forty that hang had every request in flight."""
    sources = pool(FAST, *STRANGERS, unproven_in_flight=2)
    deliver(sources, FAST)
    asked = []
    while (url := sources.draw(0)) is not None:
        asked.append(url)
        sources.started(url)
    assert asked.count(FAST) == sources.limits.per_source
    assert len(asked) - asked.count(FAST) == 2
    assert len(set(asked)) == 3, "and each stranger one"


def test_each_stranger_gets_its_turn_before_any_gets_a_second() -> None:
    sources = pool(*STRANGERS, first_backoff_s=0)
    asked = []
    for _ in STRANGERS:
        url = sources.draw(0)
        assert url is not None
        asked.append(url)
        sources.lost_race(url, 0, hopelessly=True)
    assert sorted(asked) == sorted(STRANGERS)


def test_a_chunk_is_hedged_at_whoever_delivers_and_else_at_any_stranger() -> None:
    sources = pool(FAST, *STRANGERS)
    assert sources.helper(0, 0, exclude=[FAST]) in STRANGERS
    deliver(sources, FAST)
    assert sources.helper(0, 0, exclude=STRANGERS[:1]) == FAST


def test_a_stranger_that_is_first_in_its_stripe_is_tried_beside_a_candidate_that_delivers() -> None:
    sources = striped(per_source=2)
    deliver(sources, B)
    assert sources.parent(0, 0) == A, "it is the plan's first"
    sources.started(A)
    assert sources.parent(0, 0) == B, "and is not waited for"
    sources.finished(A)
    sources.failed(A, TooSlow("nothing"), 0, of_chunk=True)
    assert sources.parent(0, 0) == B


def test_who_delivered_and_then_hangs_has_to_prove_itself_anew() -> None:
    sources = pool(FAST, SLOW, first_backoff_s=0)
    for url in (FAST, SLOW):
        deliver(sources, url)
    sources.failed(FAST, TooSlow("nothing"), 0, of_chunk=True)
    assert not sources.is_proven(FAST)
    assert sources.usable(0)[0] == SLOW


def test_who_answers_everything_but_chunks_does_not_end_its_back_off_so() -> None:
    """Heads cost a hostile source nothing."""
    sources = pool(BAD, first_backoff_s=10)
    sources.failed(BAD, TooSlow("no chunk"), 0, of_chunk=True)
    sources.answered(BAD)
    assert sources.draw(1) is None


def test_a_parent_that_only_lags_is_asked_again_until_it_lags_too_long() -> None:
    """A relay whose own upstream is slow is no liar, and the tree's load stays where it was planned."""
    sources = striped(lag_s=4)
    for url in (A, B):
        deliver(sources, url)
    sources.lagged(A, 10)
    assert sources.parent(0, 13) == A
    assert sources.parent(0, 14.5) == B
    deliver(sources, A)
    assert sources.parent(0, 15) == A


def test_a_last_resort_is_asked_only_as_such_and_for_one_chunk_at_a_time() -> None:
    sources = pool(FAST)
    sources.set_urls([FAST], last_resort=[SPARE, FAST])
    assert sources.last_resort == (SPARE,), "what is in the set besides is no last resort"
    assert {sources.draw(0), sources.parent(0, 0), sources.helper(0, 0)} == {FAST}
    assert sources.usable(0) == [FAST, SPARE]
    assert sources.resort(0) == SPARE
    sources.started(SPARE)
    assert sources.resort(0) is None
    sources.set_urls([], last_resort=[SPARE])
    assert sources.draw(0) is None, "it is busy"
    sources.finished(SPARE)
    assert sources.draw(0) == SPARE, "where there is nobody else it is a source like any"


def test_a_liar_that_is_dropped_and_named_again_stays_in_quarantine() -> None:
    """Whoever names the sources could otherwise end a quarantine by leaving the source out of one list."""
    sources = Sources(["http://liar", "http://good"])
    sources.failed("http://liar", CorruptChunk("wrong"), 0.0, of_chunk=True)
    sources.set_urls(["http://good"])
    sources.set_urls(["http://liar", "http://good"])
    assert sources.usable(1.0) == ["http://good"]
    assert [row["state"] for row in sources.status(1.0)] == ["quarantined", "ok"]
    sources.failed("http://liar", CorruptChunk("wrong"), 20.0, of_chunk=True)
    assert "http://liar" not in sources.usable(20.0 + 1.5 * sources.limits.first_quarantine_s), "the second is longer"


def test_dropped_liars_take_no_more_memory_than_so_many() -> None:
    sources = Sources([])
    for start in range(0, 3 * MAX_REMEMBERED, 256):
        sources.set_urls([f"http://liar-{start + number}" for number in range(256)])
        for url in sources.urls:
            sources.failed(url, CorruptChunk("wrong"), float(start), of_chunk=True)
    sources.set_urls([])
    assert len(sources._offenders) == MAX_REMEMBERED
    last = f"http://liar-{3 * MAX_REMEMBERED - 1}"
    sources.set_urls(["http://liar-0", last])
    assert sources.usable(float(3 * MAX_REMEMBERED - 256)) == ["http://liar-0"], "the latest are remembered"
