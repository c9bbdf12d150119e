"""Conversations as text: what a policy reads must be the same for everybody, and as the documents say."""

from __future__ import annotations

import json

import pytest

from node.environments.chat import MAX_TOOL_CALLS, NotText, prompt_of, reply_of, turn_of

ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "description": "Adds."}}


def test_the_plain_form_names_who_speaks():
    text, opening = prompt_of(ASKED, form="plain")
    assert text == "System: Be brief.\n\nUser: 1+1\n\nAssistant: 2\n\nUser: 2+2\n\nAssistant:"
    assert text[opening:].startswith("1+1")
    assert prompt_of(ASKED[:1], form="plain") == ("System: Be brief.\n\nAssistant:", 0)
    assert reply_of([{"role": "user", "content": "No."}], form="plain") == "\n\nUser: No.\n\nAssistant:"


def test_chatml_is_what_qwen_was_trained_on():
    text, opening = prompt_of(ASKED[:2], form="chatml")
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")
    assert text[opening:].startswith("1+1")
    # The assistant's own end mark is in the context already: the policy wrote it.
    assert reply_of([{"role": "user", "content": "No."}], form="chatml") == (
        "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_told_in_the_system_message_and_answered_as_the_user():
    text, _ = prompt_of(ASKED[:2], form="plain", tools=[TOOL])
    described = '{"description": "Adds.", "name": "add", "parameters": {"type": "object"}}'
    assert text.startswith(f"System: Be brief.\n\nThese functions can be called:\n{described}\nTo call one, write ")
    alone, opening = prompt_of(ASKED[1:2], form="chatml", tools=[TOOL])
    assert alone.startswith("<|im_start|>system\nThese functions can be called:")
    assert alone[opening:].startswith("1+1")
    answer = reply_of([{"role": "tool", "content": "4", "tool_call_id": "call_0_0"}], form="chatml")
    assert answer == "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_calls_are_read_as_a_server_would_return_them():
    written = 'Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> <tool_call>{"name": "now"}</tool_call>'
    message = turn_of(f" {written}\n", form="plain", number=2, tools=True)
    assert message["content"] == written
    assert [call["id"] for call in message["tool_calls"]] == ["call_2_0", "call_2_1"]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert "tool_calls" not in turn_of(written, form="plain", number=0, tools=False)
    assert turn_of(" kept\n", form="chatml", number=0, tools=True) == {"role": "assistant", "content": " kept\n"}


@pytest.mark.parametrize(
    "written", ["", "nonsense", "[]", "3", "null", '{"name": 3', '{"arguments": {}}', "[" * 100_000, "\x00"]
)
def test_a_malformed_call_is_a_call_of_nothing_and_no_crash(written):
    message = turn_of(f"<tool_call>{written}</tool_call>", form="plain", number=0, tools=True)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "", "arguments": written.strip()}


def test_a_turn_of_nothing_but_calls_makes_no_more_than_are_allowed():
    """Each is a function that the environment runs, at the price of eleven characters."""
    message = turn_of("<tool_call>{}</tool_call>" * 1000 + "<tool_call>", form="plain", number=0, tools=True)
    assert len(message["tool_calls"]) == MAX_TOOL_CALLS
    assert "tool_calls" not in turn_of("<tool_call>" * 1000, form="plain", number=0, tools=True)
    assert json.dumps(message)


def test_an_image_is_refused_rather_than_left_out():
    with pytest.raises(NotText):
        prompt_of([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], form="plain")
