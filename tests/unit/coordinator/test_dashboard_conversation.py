"""A completion of several turns is shown as a conversation, whatever a stranger's model wrote in it."""

from __future__ import annotations

import json

import pytest

from coordinator.dashboard.conversation import MOST_CHARACTERS, MOST_PARTS, Passage, conversation_of
from coordinator.verifier.evidence import RowEvidence

CALL = json.dumps({"name": "python", "arguments": {"code": "a = 1\nprint(a)", "n": 2}})


def shown(*texts: str, most_tokens: int = 10**6) -> list[tuple[bool, list[Passage]]]:
    """The conversation of texts, the model's and the environment's in turn, a token for each of its characters."""
    pieces, replies = [], []
    for at, text in enumerate(texts):
        if at % 2:
            replies.append((len(pieces), text))
        else:
            pieces += list(text)
    row = RowEvidence(
        tokens=len(pieces), ids=b"", pieces=pieces, margins=b"", errors=b"", chunks=[], segments=[], replies=replies
    )
    return [(one.is_models, list(one.parts)) for one in conversation_of(row, most_tokens=most_tokens)]


def test_turns_thoughts_calls_and_results_are_told_apart():
    said = shown(
        f"<think>Better ask.</think>I ask.<tool_call>{CALL}</tool_call>",
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "So it is.\n</think>It is 1.",
    )
    assert said == [
        (True, [
            Passage("thought", "Better ask."), Passage("text", "I ask."),
            Passage("call", "a = 1\nprint(a)\nn = 2", "python"),
        ]),
        (False, [Passage("result", "1")]),
        (True, [Passage("thought", "So it is."), Passage("text", "It is 1.")]),
    ]  # fmt: skip


def test_one_turn_of_plain_text_is_no_conversation():
    assert shown("It is 42.") == []
    assert shown("") == []
    assert shown("1+1", "=2\n", "2") == [
        (True, [Passage("text", "1+1")]),
        (False, [Passage("text", "=2")]),
        (True, [Passage("text", "2")]),
    ]


def test_what_is_not_on_the_page_is_not_in_the_conversation():
    assert shown("1+1", "=2\n", "2", most_tokens=2) == []
    assert shown("1+1", "=2\n", "2", most_tokens=3) == [
        (True, [Passage("text", "1+1")]),
        (False, [Passage("text", "=2")]),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 10_000,
        "<think>" * 10_000,
        "<tool_call></tool_call>" * 1000,
        '<tool_call>{"name": 1, "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "x", "arguments": ' + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "\u202e", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "x", "arguments": ' + json.dumps({"k" * 10_000: "v" * 10_000}) + "}</tool_call>",
        "<tool_response>\x00\x1b[2J\u202e</tool_response>",
    ],
    ids=lambda text: text[:40],
)
def test_hostile_turns_stay_bounded_and_visible(text):
    for _, parts in shown(text, text):
        assert len(parts) <= MOST_PARTS + 1
        for part in parts:
            assert len(part.text) <= MOST_CHARACTERS + len("… (10,000,000 more)")
            assert not set(part.text + part.name) & set("\x00\x1b\u202e")
