"""What of a row is learnt, and which rows are refused.

What would break for whom: an operator whose policy learns to write the user's turns, never to end, or nothing at all of
a part of the data, without a word about it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.sft.examples import Examples, write_examples
from coordinator.sft.recipe import DataCounts, SftRecipe
from coordinator.sft.rendering import RowRenderer
from coordinator.sft.rows import MAX_LINE_BYTES, BadData, ChatRow, PairRow, RowColumns, RowFault, parse_row
from node.chat.template import TemplateAnswer, TemplateQuery
from node.chat.template_process import render_query
from node.policy.models.tiny_llama import EOS, make_tokenizer

NEWLINE = make_tokenizer()("\n")["input_ids"][0]
CHATML = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FORGETS = (
    "{% for m in messages %}{{ m.role }}:"
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""As Qwen3's does it: earlier turns lose their thoughts once another question follows."""
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.content }}]<eos>{% endfor %}"
)
TWO_TURNS = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "<think>a</think>2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "<think>b</think>4"},
]


def renderer(template: str | None = CHATML, *, each_turn: bool = False) -> RowRenderer:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template

    def render(messages: Sequence[Any], tools: Sequence[Any], *, opening: bool) -> TemplateAnswer:
        return render_query(tokenizer, TemplateQuery(tuple(messages), tuple(tools), opening))

    return RowRenderer(tokenizer, frozenset({EOS}), EOS, render if template else None, each_turn)


def learnt(row: PairRow | ChatRow, of: RowRenderer) -> list[tuple[str, str]]:
    """Each example's whole text, and what of it is learnt with · for the rest."""

    def text(ids: list[int]) -> str:
        return of.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)

    return [
        (
            text(list(each.ids)),
            "".join(
                text([token]) if is_learnt else "·" for token, is_learnt in zip(each.ids, each.is_learnt, strict=True)
            ),
        )
        for each in of.examples(row)
    ]


def test_only_the_assistants_turns_and_their_end_marks_are_learnt() -> None:
    [(whole, shown)] = learnt(ChatRow(tuple(TWO_TURNS)), renderer())
    assert whole == renderer().tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert shown.strip("·").split("·" * len("\nuser:2+2.\nassistant:")) == [
        "<think>a</think>2<eos>",
        "<think>b</think>4<eos>",
    ]
    assert shown.endswith("<eos>·")  # the newline behind the end mark is never drawn


def test_a_pair_is_learnt_from_its_completion_on_and_ends() -> None:
    assert learnt(PairRow("Q:", "4"), renderer(None)) == [("Q:4<eos>", "··4<eos>")]


def test_what_follows_the_last_turn_of_the_assistant_is_left_out() -> None:
    [(whole, _)] = learnt(ChatRow((*TWO_TURNS, {"role": "user", "content": "and?"})), renderer())
    assert "and?" not in whole


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    """Its text of both turns holds no longer what the policy was shown at the first one."""
    with pytest.raises(RowFault, match=r"message 4.*differently.*--each-turn"):
        learnt(ChatRow(tuple(TWO_TURNS)), renderer(FORGETS))


def test_each_turn_by_itself_is_what_the_policy_sees_at_that_turn() -> None:
    (first, _), (second, shown) = learnt(ChatRow(tuple(TWO_TURNS)), renderer(FORGETS, each_turn=True))
    assert first == "user:1+1<eos>\nassistant:<think>a</think>2<eos>\n"
    assert second == "user:1+1<eos>\nassistant:2<eos>\nuser:2+2<eos>\nassistant:<think>b</think>4<eos>\n"
    assert shown.strip("·") == "<think>b</think>4<eos>"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, TWO_TURNS, "no chat template"),
        (ALTERNATES, [TWO_TURNS[0], *TWO_TURNS], "the chat template fails.*roles must alternate"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", TWO_TURNS, "none of the model's end marks.*--end-mark"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", TWO_TURNS, "does not begin"),
        ("{% for m in messages if m.role == 'assistant' %}{{ m.content }}<eos>{% endfor %}", TWO_TURNS[:2], "nothing"),
    ],
    ids=["none", "raises", "endless", "no prefix", "no prompt"],
)
def test_a_template_that_does_not_say_which_tokens_are_the_assistants_is_refused(
    template: str | None, messages: list[Any], reason: str
) -> None:
    with pytest.raises(RowFault, match=reason):
        learnt(ChatRow(tuple(messages)), renderer(template))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1]", "not a JSON object"),
        (b"{", "not a JSON object"),
        (b'{"messages": ' + b"[" * 100_000, "not a JSON object"),
        (b'{"prompt": "\xff"}', "not a JSON object"),
        (b'{"prompt": "\\ud800", "completion": "a"}', "not a JSON object"),
        (b"{}", "neither 'messages' nor both 'prompt' and 'completion', but nothing"),
        (b'{"prompt": "a", "answer": "b"}', "but 'answer', 'prompt'; --messages"),
        (b'{"prompt": "a", "completion": 4}', "'completion' is no text"),
        (b'{"prompt": "", "completion": "4"}', "'prompt' is empty"),
        (b'{"prompt": "a", "completion": ""}', "'completion' is empty"),
        (b'{"messages": "hi"}', "no list of 1 to"),
        (b'{"messages": []}', "no list of 1 to"),
        (b'{"messages": ["hi"]}', "message 1 is no object"),
        (b'{"messages": [{"role": "human", "content": "hi"}]}', "message 1 has the role 'human'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content of message 1 is no text"),
        (b'{"messages": [{"role": "assistant", "content": null}]}', "content of message 1 is no text"),
        (b'{"messages": [{"role": "assistant", "content": "hi"}]}', "message 1 is the assistant's"),
        (b'{"messages": [{"role": "user", "content": "hi"}]}', "no message is the assistant's"),
        (
            b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}], "tools": 1}',
            "'tools' is no list",
        ),
    ],
)
def test_a_row_that_is_none_says_why(line: bytes, reason: str) -> None:
    with pytest.raises(RowFault, match=reason):
        parse_row(line, RowColumns())


def test_columns_have_the_names_that_are_given() -> None:
    line = b'{"question": "1+1", "answer": "2", "other": [1]}'
    assert parse_row(line, RowColumns(prompt="question", completion="answer")) == PairRow("1+1", "2")
    chat = parse_row(line, RowColumns(prompt="question", completion="answer", chat=True))
    assert chat == ChatRow(({"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}))


def written(folder: Path, rows: list[Any], *, max_tokens: int = 512, **recipe: Any) -> DataCounts:
    data = folder / "rows.jsonl"
    data.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return write_examples(folder, data, SftRecipe(**recipe), renderer(), max_tokens=max_tokens, on_row=lambda: None)


def test_every_faulty_line_is_counted_and_the_first_ones_are_named(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": "a", "completion": "b"}, b"", b"x", *[{"prompt": "a"}] * 6]
    with pytest.raises(BadData, match=r"line 3: not a JSON.*line 4: has neither.*line 7: .*and 2 more") as refused:
        written(tmp_path, rows)
    assert "line 8" not in str(refused.value)


def test_a_line_without_end_is_read_no_further_than_its_limit(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=f"line 2: longer than {MAX_LINE_BYTES} bytes"):
        written(tmp_path, [{"prompt": "a", "completion": "b"}, b" " * (MAX_LINE_BYTES + 1)])


def test_rows_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    """Cut off, they would teach never to end."""
    rows = [{"prompt": "a", "completion": "b" * length} for length in (3, 30, 4, 40)]
    counts = written(tmp_path, rows, max_tokens=6, held_out=0.0)
    assert (counts.training, counts.too_long, counts.too_long_lines) == (2, 2, (2, 4))
    with pytest.raises(BadData, match="every row has more than 2 tokens"):
        written(tmp_path, rows, max_tokens=2)


@pytest.mark.parametrize("rows", [[], [b"", b"  "], [{"prompt": "a", "completion": "b"}]])
def test_data_with_nothing_to_train_on_is_refused(tmp_path: Path, rows: list[Any]) -> None:
    with pytest.raises(BadData, match="no rows to train on"):
        written(tmp_path, rows)


def test_a_repeated_row_is_held_out_everywhere_or_nowhere(tmp_path: Path) -> None:
    """Otherwise the held-out loss would be of what training has seen."""
    rows = [{"prompt": f"{number % 20}", "completion": "b", "id": number} for number in range(100)]
    rows = [dict(reversed(row.items())) if number % 3 else row for number, row in enumerate(rows)]
    counts = written(tmp_path, rows, held_out=0.1)
    found = Examples(tmp_path)
    prompts = [{found.scored(each).sample.prompt_ids for each in part} for part in (found.training, found.held_out)]
    assert prompts[0].isdisjoint(prompts[1])
    assert (counts.training, counts.held_out) == (90, 10)


def test_examples_come_back_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path, [{"messages": TWO_TURNS}, {"prompt": "Q:", "completion": "4"}], held_out=0.0)
    found = Examples(tmp_path)
    assert found.training == [0, 1]
    sample = found.scored(0).sample
    decode = make_tokenizer().backend_tokenizer.decode
    prompt, completion = (
        decode(list(ids), skip_special_tokens=False) for ids in (sample.prompt_ids, sample.completion_ids)
    )
    assert prompt == "user:1+1<eos>\nassistant:"
    assert completion == "<think>a</think>2<eos><think>b</think>4<eos>"
    [(before, reply)] = sample.replies
    assert (before, reply[0]) == (5, NEWLINE)
