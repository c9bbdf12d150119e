"""Reason codes are an interface: a worker's operator reads them, and programs compare them."""

from __future__ import annotations

import re

import pytest

from node.protocol.reasons import ADVICE, Reason, Refusal


def test_every_reason_has_advice() -> None:
    assert set(ADVICE) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_advice_is_one_sentence_for_a_person(reason: Reason) -> None:
    assert re.fullmatch(r"[A-Z][^\n]{15,140}\.", ADVICE[reason])


@pytest.mark.parametrize("reason", Reason)
def test_a_code_is_stable_text(reason: Reason) -> None:
    assert reason.value == reason.name.lower()
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", reason.value)


def test_a_refusal_says_what_was_seen_and_what_to_do() -> None:
    refusal = Refusal(Reason.WRONG_RUN, "Signed for run 1234….")
    assert refusal.reason is Reason.WRONG_RUN
    assert refusal.detail == "Signed for run 1234…."
    assert str(refusal) == f"wrong_run: Signed for run 1234…. {ADVICE[Reason.WRONG_RUN]}"
