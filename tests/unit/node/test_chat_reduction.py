"""Chat templates become data: the models' own texts, token for token, and a refusal for whatever is no data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from chat_models import FRAMES, PUBLISHED, chat_tokenizer
from tokenizers import Tokenizer

from node.chat import reduction_process
from node.chat.errors import Irreducible
from node.chat.reduce import Template, reduce_template
from node.chat.reduction import Reduced
from node.chat.reduction_process import reduce_tokenizer
from node.chat.render import render_reply
from node.chat.samples import conversations
from node.policy.file import render_prompt
from node.policy.tokenizer import normalized_tokens
from node.protocol.chat import ChatFormat
from node.protocol.chat_formats import CHAT_FORMATS
from shardcast.wire import encode

NAMES = sorted(PUBLISHED)


@cache
def reduced(name: str) -> ChatFormat:
    """The chat template of a published model as data."""
    template = PUBLISHED[name]["template"]
    found = reduce_tokenizer(
        chat_tokenizer(template), end_marks=[FRAMES[template]["eos"]], thinking="no-think" not in name
    )
    assert found.chat is not None, found.refusal
    return found.chat


@pytest.mark.parametrize("name", NAMES)
def test_the_data_writes_what_the_published_template_wrote(name: str) -> None:
    """A worker that renders another text than the model was trained on draws nonsense, and nobody notices."""
    assert encode(reduced(name)).decode() == PUBLISHED[name]["format"]
    hasher: Any = blake3()
    kinds = {"with_calls": 0, "with_tools": 0, "with_system": 0, "of_several_turns": 0}
    for messages, tools, text in conversations(reduced(name), 100):
        hasher.update(len(text.encode()).to_bytes(4, "big") + text.encode())
        kinds["with_calls"] += any("tool_calls" in message for message in messages)
        kinds["with_tools"] += bool(tools)
        kinds["with_system"] += messages[0]["role"] == "system"
        kinds["of_several_turns"] += sum(message["role"] == "user" for message in messages) > 1
    published = PUBLISHED[name]
    assert hasher.hexdigest() == published["texts_blake3"]
    assert kinds == {kind: published[kind] for kind in kinds}


@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_the_tokens_of_apply_chat_template(name: str) -> None:
    """A second beginning mark, or a mark that is spelled out in letters, would be another prompt than the model's."""
    tokenizer: Any = chat_tokenizer(PUBLISHED[name]["template"])
    policy: Any = SimpleNamespace(tokenizer=tokenizer)
    for messages, tools, text in conversations(reduced(name), 100, seed=1):
        ids = tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False, **PUBLISHED[name]["settings"]
        )
        assert render_prompt(policy, text, special_tokens=False) == ids


def test_the_thinking_switch_of_a_template_is_two_formats() -> None:
    on, off = reduced("qwen3"), reduced("qwen3/no-think")
    assert off == msgspec.structs.replace(on, generation=on.generation + "<think>\n\n</think>\n\n")
    tokenizer = chat_tokenizer("phi4")
    refused = reduce_tokenizer(tokenizer, end_marks=["<|im_end|>"], thinking=False)
    assert refused == Reduced(refusal="it has no thinking mode to turn off (enable_thinking)")


def test_what_a_template_leaves_out_has_no_place_in_its_format() -> None:
    assert (reduced("phi4").calls, reduced("phi4").results, reduced("phi4").tools) == (None, None, None)
    assert reduced("llama3.1").calls is not None
    assert reduced("llama3.1").calls.between is None  # it raises for two calls
    assert reduced("mistral").calls.id_length == 9
    assert reduced("mistral").openings.system.final is not None
    assert reduced("gemma3").alternates


def test_named_formats_are_data_that_a_template_can_be_reduced_to() -> None:
    """`llama3` is by name what the published template is reduced to."""
    assert CHAT_FORMATS["llama3"] == reduced("llama3")


def test_marks_are_the_tokens_that_frame_turns() -> None:
    assert set(reduced("qwen3").marks) >= {"<|im_end|>", "<|im_start|>", "<tool_response>", "</tool_response>"}
    assert reduced("glm4.5").after_turn == ""
    assert reduced("gemma3").after_turn == "\n"


def test_line_feeds_in_a_reply_stay_where_the_tokenizer_has_a_token_for_them() -> None:
    """Gemma 3's tokenizer has tokens of line feeds alone: as marks they would break paragraphs."""
    tokenizer = chat_tokenizer("gemma3")
    tokenizer.add_tokens(["\n\n", "\n\n\n", " \t"])
    found = reduce_tokenizer(tokenizer, end_marks=["<end_of_turn>"], thinking=True)
    assert found.chat is not None
    assert set(found.chat.marks) == set(reduced("gemma3").marks)
    assert "a\n\nb\n\n\nc" in render_reply([{"role": "user", "content": "a\n\nb\n\n\nc"}], found.chat)


def test_a_template_whose_marks_full_width_text_can_forge_is_refused() -> None:
    """NFKC makes <|im_end|> of full-width characters, in which no mark can be found and broken."""
    tokenizer = chat_tokenizer("qwen3")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        token["normalized"] = token["content"] == "<|im_end|>"

    def refusal(normalizer: dict[str, Any] | None) -> str:
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state | {"normalizer": normalizer}))
        ids = tokenizer("\uff1c|im_end|\uff1e", add_special_tokens=False)["input_ids"]
        found = reduce_tokenizer(tokenizer, end_marks=["<|im_end|>"], thinking=True)
        assert (len(ids) == 1) == (found.chat is None)
        return "" if found.chat else found.refusal

    assert "makes the mark '<|im_end|>' of other characters" in refusal({"type": "NFKC"})
    assert refusal({"type": "Sequence", "normalizers": []}) == ""
    assert refusal(None) == ""


def test_a_template_whose_marks_a_lowercasing_tokenizer_spells_in_capitals_is_refused() -> None:
    """It finds <|IM_START|> in the template's <|im_start|> and in a reply's <|Im_Start|>, which breaking never sees."""
    tokenizer = chat_tokenizer("qwen3")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        if token["content"] == "<|im_start|>":
            token |= {"content": "<|IM_START|>", "normalized": True}
    state["normalizer"] = {"type": "Lowercase"}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("<|im_start|>", "<|Im_Start|>")]
    assert len(ids[0]) == 1
    assert ids[0] == ids[1]
    found = reduce_tokenizer(tokenizer, end_marks=["<|im_end|>"], thinking=True)
    assert "of other characters, too (normalized)" in found.refusal
    assert normalized_tokens(tokenizer) == ("<|IM_START|>", "<|im_start|>")


def template_of(text: str) -> Template:
    tokenizer: Any = chat_tokenizer("phi4")
    tokenizer.chat_template = text

    def render(messages: Sequence[Any], tools: Sequence[Any], generation: bool) -> str:
        return tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generation
        )

    return render


LOOP = (
    "{% for m in messages %}<{{ m.role }}>CONTENT</{{ m.role }}>{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
REFUSED = {
    "numbered_turns": ("differs from one conversation", LOOP.replace("CONTENT", "{{ loop.index }}{{ m.content }}")),
    "users_named_twice": ("writes u1 2 times", LOOP.replace("CONTENT", "{{ m.content }}{{ m.content }}")),
    "users_left_out": ("leaves u1 out", LOOP.replace("CONTENT", "x")),
    "upper_case": ("leaves u1 out", LOOP.replace("CONTENT", "{{ m.content | upper }}")),
    "raises": ("raises for a conversation of user", "{{ raise_exception('no') }}"),
    "undefined": ("raises for a conversation of user", "{{ messages[0].content.x.y }}"),
    "by_length": (
        "where its data says",
        LOOP.replace("CONTENT", "{{ m.content }}{{ '!' if m.content | length is divisibleby 7 }}"),
    ),
    "by_content": (
        "where its data says",
        LOOP.replace("CONTENT", "{{ m.content.replace('quoted', 'QUOTED') }}"),
    ),
    "own_split_of_thoughts": (
        "rule of its own",
        LOOP.replace("CONTENT", "{{ m.content.split('</think>')[-1] }}"),
    ),
    "tools_as_a_list_of_names": (
        "otherwise than as JSON",
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + LOOP.replace("CONTENT", "{{ m.content }}"),
    ),
    "later_turns_differ": (
        "where its data says",
        LOOP.replace("CONTENT", "{{ m.content }}{{ '!' if loop.index > 6 }}"),
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_template_that_is_no_data_is_refused_with_its_reason(name: str) -> None:
    """Reduced to something that is nearly right, it would train the model on prompts that it never sees again."""
    reason, text = REFUSED[name]
    with pytest.raises(Irreducible, match=reason):
        reduce_template(template_of(text), end_marks=["</assistant>"], added_tokens=[])


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    text = LOOP.replace("CONTENT", "{{ m.content }}{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(Irreducible, match="raises"):
        reduce_template(template_of(text), end_marks=[], added_tokens=[])


def test_a_template_that_writes_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction_process, "LONGEST", 1000)
    tokenizer: Any = chat_tokenizer("phi4")
    tokenizer.chat_template = "{{ 'x' * 1001 }}"
    found = reduce_tokenizer(tokenizer, end_marks=["<|im_end|>"], thinking=True)
    assert "raises for a conversation of user" in found.refusal


@pytest.mark.parametrize(("template", "reason"), [(None, "no chat template"), ({"a": "x", "b": "y"}, "several")])
def test_a_folder_without_one_template_says_so(template: Any, reason: str) -> None:
    tokenizer: Any = chat_tokenizer("phi4")
    tokenizer.chat_template = template
    assert reason in reduce_tokenizer(tokenizer, end_marks=["<|im_end|>"], thinking=True).refusal


def test_a_template_with_the_date_is_told_apart() -> None:
    tokenizer: Any = chat_tokenizer("llama3")
    assert not reduce_tokenizer(tokenizer, end_marks=["<|eot_id|>"], thinking=True).is_dated
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + tokenizer.chat_template
    found = reduce_tokenizer(tokenizer, end_marks=["<|eot_id|>"], thinking=True)
    assert found.is_dated
