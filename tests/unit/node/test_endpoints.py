"""Which coordinator a node asks: a node that forgets, flaps or believes a hostile list works for nobody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.client.endpoints import MAX_ENDPOINTS, Endpoints
from node.errors import ConfigError

A, B, C, D = (f"http://{name}:1" for name in "abcd")


def many(count):
    return [f"http://h{number}:1" for number in range(count)]


def test_one_url_is_a_list_of_one_and_duplicates_count_once():
    assert Endpoints(A).urls == (A,)
    assert Endpoints([B, A, f"{B}/", A]).urls == (B, A)


@pytest.mark.parametrize("urls", [(), [A, "b:1"], [""], many(MAX_ENDPOINTS + 1)])
def test_a_list_without_use_is_refused_before_anything_is_sent(urls):
    with pytest.raises(ConfigError):
        Endpoints(urls)


def test_as_many_as_are_allowed_are_taken():
    assert len(Endpoints(many(MAX_ENDPOINTS)).urls) == MAX_ENDPOINTS


def test_the_one_that_answers_stays_in_use_although_the_first_may_be_back():
    endpoints = Endpoints([A, B])
    assert endpoints.note_failure(A) == B
    for _ in range(3):
        endpoints.note_answer(B)
        assert endpoints.current == B
    assert endpoints.note_failure(B) == A, "the first is tried again once the one in use fails"


def test_attack_slow_loris_whoever_fails_is_behind_all_others_and_not_next():
    endpoints = Endpoints([A, B, C])
    endpoints.note_failure(A)
    endpoints.note_answer(B)
    assert endpoints.note_failure(B) == C
    assert endpoints.urls == (C, A, B)


def test_requests_that_fail_late_at_the_endpoint_that_was_left_do_not_turn_a_node_away_from_the_good_one():
    endpoints = Endpoints([A, B, C])
    endpoints.note_failure(A)
    for _ in range(5):  # they were under way together
        assert endpoints.note_failure(A) is None
    assert endpoints.current == B
    assert not endpoints.away


def test_all_are_away_only_when_each_has_failed_since_one_answered():
    endpoints = Endpoints([A, B])
    endpoints.note_failure(A)
    assert not endpoints.away
    assert endpoints.note_failure(B) is None, "there is nobody to go on with"
    assert endpoints.away
    endpoints.note_answer(B)
    assert not endpoints.away


def test_an_answer_during_an_outage_is_where_everybody_goes():
    endpoints = Endpoints([A, B, C])
    for url in (A, B, C):
        endpoints.note_failure(url)
    endpoints.note_answer(C)
    assert endpoints.current == C


def test_a_new_list_keeps_the_one_in_use():
    endpoints = Endpoints([A, B])
    endpoints.note_failure(A)
    endpoints.replace([C, A, B])
    assert endpoints.urls == (B, C, A), "and whoever failed stays behind"
    endpoints.replace([D, A])
    assert endpoints.urls == (D, A)


def test_a_new_list_that_says_the_same_does_not_send_a_node_back_to_who_failed():
    endpoints = Endpoints([A, B, C])
    endpoints.note_failure(A)
    endpoints.replace([A, B, C])
    assert endpoints.urls == (B, C, A)


def test_a_newcomer_ends_an_outage_before_those_that_are_away_are_asked_again():
    endpoints = Endpoints([A, B])
    endpoints.note_failure(A)
    endpoints.note_failure(B)
    endpoints.replace([A, B, C])
    assert endpoints.current == C
    assert not endpoints.away


@pytest.mark.parametrize("urls", [[], ["ftp://x", "javascript:alert(1)", "http://user:secret@h"]])
def test_attack_a_list_of_nothing_does_not_cut_a_node_off(urls):
    endpoints = Endpoints([A, B])
    endpoints.replace(urls)
    assert endpoints.urls == (A, B)


def test_attack_an_endless_list_is_cut_and_the_one_in_use_stays():
    endpoints = Endpoints(A)
    endpoints.replace([*many(1000), A])
    assert len(endpoints.urls) == MAX_ENDPOINTS
    assert endpoints.current == A


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["failure", "answer"]), st.sampled_from([A, B, C, D])),
        st.tuples(st.just("replace"), st.lists(st.sampled_from([A, B, C, D, "junk"]), max_size=5)),
    ),
    max_size=30,
)


@given(STEPS)
def test_whatever_happens_somebody_can_be_asked_and_nobody_twice(steps):
    endpoints = Endpoints([A, B, C])
    for what, argument in steps:
        {"failure": endpoints.note_failure, "answer": endpoints.note_answer, "replace": endpoints.replace}[what](
            argument
        )
        assert endpoints.urls
        assert len(set(endpoints.urls)) == len(endpoints.urls)
        asked = []
        while (url := endpoints.next(asked)) is not None:
            asked.append(url)
        assert tuple(asked) == endpoints.urls
        if what == "answer":
            assert not endpoints.away
