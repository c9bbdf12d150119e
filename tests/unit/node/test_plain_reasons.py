"""Whoever runs a worker reads why a slot was rejected, and what to do, without knowing the protocol."""

from __future__ import annotations

import re

import pytest

from node.plain_reasons import PLAIN, plain
from node.protocol.reasons import Reason


def test_every_reason_of_the_protocol_has_plain_words():
    assert set(PLAIN) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_the_words_are_sentences_that_need_no_protocol_document(reason):
    said = PLAIN[reason]
    for sentence in (said.meaning, said.todo):
        assert re.fullmatch(r"[A-Z].*[.)]", sentence), sentence
        assert not re.search(r"section|sampling\.|limits\.|Retry-After|[Nn]ull", sentence), sentence
    assert said.meaning != said.todo
    assert len(said.meaning + said.todo) < 260, "it has to fit beside everything else"


def test_a_code_of_tomorrow_has_no_words_and_breaks_nothing():
    assert plain("not_yet_invented") is None
    assert plain("wrong_token") is PLAIN[Reason.WRONG_TOKEN]
