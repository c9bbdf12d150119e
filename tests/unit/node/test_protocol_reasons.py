"""Reason codes are an interface: whoever runs a node reads them, and programs compare them."""

from __future__ import annotations

import re

import pytest

from node.protocol.reasons import Reason, Refusal, reason_of


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_has_a_whole_row(reason: Reason) -> None:
    assert reason.status is None or 400 <= reason.status < 500
    assert re.fullmatch(r"[A-Z][^\n]{15,140}\.", reason.advice), "one sentence for who implements a node"
    for sentence in (reason.meaning, reason.todo):
        assert re.fullmatch(r"[A-Z].*[.)]", sentence), sentence
        assert not re.search(r"section|sampling\.|limits\.|Retry-After|[Nn]ull", sentence), (
            f"{sentence!r} cannot be understood without the protocol's document"
        )
    assert reason.meaning != reason.todo
    assert len(reason.meaning + reason.todo) < 260, "it has to fit beside everything else"


@pytest.mark.parametrize("reason", Reason)
def test_a_code_is_stable_text(reason: Reason) -> None:
    assert reason.value == reason.name.lower()
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", reason.value)


def test_a_code_of_tomorrow_has_no_row_and_breaks_nothing() -> None:
    assert reason_of("not_yet_invented") is None
    assert reason_of("wrong_token") is Reason.WRONG_TOKEN


def test_a_refusal_says_what_was_seen_and_what_to_do() -> None:
    refusal = Refusal(Reason.WRONG_RUN, "Signed for run 1234….")
    assert refusal.reason is Reason.WRONG_RUN
    assert refusal.detail == "Signed for run 1234…."
    assert str(refusal) == f"wrong_run: Signed for run 1234…. {Reason.WRONG_RUN.advice}"
