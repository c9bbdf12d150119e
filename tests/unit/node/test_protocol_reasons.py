"""Reason codes are an interface: whoever runs a node reads them, and programs compare them."""

from __future__ import annotations

import re

from node.protocol.reasons import Reason, Refusal, reason_of


def test_each_reason_has_a_whole_row() -> None:
    for reason in Reason:
        assert reason.status is None or 400 <= reason.status < 500, reason
        assert re.fullmatch(r"[A-Z][^\n]{15,140}\.", reason.advice), f"{reason}: one sentence for who writes a node"
        for sentence in (reason.meaning, reason.todo):
            assert re.fullmatch(r"[A-Z].*[.)]", sentence), sentence
            assert not re.search(r"section|sampling\.|limits\.|Retry-After|[Nn]ull", sentence), (
                f"{sentence!r} cannot be understood without the protocol's document"
            )
        assert reason.meaning != reason.todo
        assert len(reason.meaning + reason.todo) < 260, f"{reason}: it has to fit beside everything else"


def test_a_code_is_stable_text() -> None:
    for reason in Reason:
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


def test_every_refused_request_has_a_status_and_no_verdict_has() -> None:
    """One without would be a 500."""
    first_verdict = list(Reason).index(Reason.WRONG_BODY)
    assert [reason.status is None for reason in Reason] == [place >= first_verdict for place in range(len(Reason))]
