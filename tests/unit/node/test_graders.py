"""Rewards of strangers' texts: whoever derives one again gets the same, and no text is worth more than its answer."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from locations import VECTORS_FOLDER

from node.graders import BadAnswer, GraderFault, check_answer, grade
from node.graders.unit_tests import check_machine
from node.protocol.grading import (
    ChoiceGrader,
    ExactGrader,
    GraderSpec,
    JsonGrader,
    MathGrader,
    NumberGrader,
    RegexGrader,
    UnitTestsGrader,
)
from shardcast.errors import Malformed
from shardcast.wire import decode, encode

VECTORS = json.loads((VECTORS_FOLDER / "protocol" / "grading.json").read_text(encoding="utf-8"))
PURE: list[tuple[GraderSpec, str]] = [
    (ExactGrader(), "42"),
    (ChoiceGrader(), "B"),
    (NumberGrader(relative=0.01), "42"),
    (MathGrader(), r"\frac{x+1}{2}"),
    (JsonGrader(), '{"a": [1, 2]}'),
    (RegexGrader(), "(a|b)*c"),
]
ids = [spec.__class__.__name__ for spec, _ in PURE]


@pytest.mark.parametrize("row", VECTORS["graded"], ids=lambda row: f"{row['answer'][:12]} {row['completion'][:20]!r}")
def test_a_reader_of_the_vectors_gives_each_completion_its_reward(row: dict) -> None:
    spec = decode(GraderSpec, row["grader"].encode(), max_bytes=1000)
    assert grade(spec, row["answer"], row["completion"]) == row["reward"]
    check_answer(spec, row["answer"])


@pytest.mark.parametrize("row", VECTORS["refused"], ids=lambda row: f"{row['code']} {row['answer'][:12]!r}")
def test_an_answer_that_nothing_can_match_is_refused_with_its_code(row: dict) -> None:
    spec = decode(GraderSpec, row["grader"].encode(), max_bytes=1000)
    with pytest.raises(BadAnswer) as refused:
        check_answer(spec, row["answer"])
    assert refused.value.code == row["code"]


def test_a_grader_names_its_version_first_and_no_other_is_taken() -> None:
    """A node that took `math/2` for `math/1` would contradict everybody who has it."""
    assert encode(NumberGrader(relative=0.01)) == b'{"kind":"number/1","absolute":0.0,"relative":0.01}'
    for text in ('{"kind":"math/2","evaluated":false}', '{"kind":"exact/1"}', '{"kind":"exact/1","ignore_case":1}'):
        with pytest.raises(Malformed):
            decode(GraderSpec, text.encode(), max_bytes=1000)


@pytest.mark.parametrize("steps", [0, 2_000_001])
def test_a_run_cannot_ask_for_more_steps_than_the_protocol_allows(steps: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"steps": steps}, UnitTestsGrader)


def test_programs_are_judged_by_the_python_that_the_run_names_and_no_other() -> None:
    with pytest.raises(GraderFault) as fault:
        check_machine(UnitTestsGrader(python="3.99"))
    assert fault.value.code == "python_version"


# -- hostile completions


HOSTILE = [
    "",
    "</think>",
    "\\boxed{",
    "\\boxed{}" * 8000,
    "\\boxed{" * 9000,
    "{" * 60_000,
    "[" * 60_000,
    '{"a":' * 10_000,
    '"' + "\\" * 60_001,
    "\\" * 60_000,
    "9" * 60_000,
    "1e" + "9" * 400,
    "1," * 30_000,
    "1/" * 30_000,
    "$" * 60_000,
    "```" * 20_000,
    "(" * 30_000 + ")" * 30_000,
    "-" * 60_000,
    "\ud800",
    "\x00",
    "\N{SUPERSCRIPT TWO}" * 900,
    "answer is " * 6000,
    "x" * (2**20),
]


@pytest.mark.parametrize(("spec", "answer"), PURE, ids=ids)
def test_a_text_that_is_huge_or_broken_earns_nothing_and_raises_nothing(spec: GraderSpec, answer: str) -> None:
    for text in HOSTILE:
        assert grade(spec, answer, text) == 0.0, text[:40]


@pytest.mark.parametrize(("spec", "answer"), PURE, ids=ids)
@settings(max_examples=40)
@given(text=st.text(st.characters(), max_size=60) | st.text("01+-*/^{}[]()\\,.=<>%$ \nfracsqtbox|!_&e", max_size=60))
@example(text="\\frac")
@example(text="0.\\overline{\N{SUPERSCRIPT TWO}}")
@example(text="\\begin{pmatrix}")
@example(text="x\\in,1")
def test_no_text_raises(spec: GraderSpec, answer: str, text: str) -> None:
    assert grade(spec, answer, text) in (0.0, 1.0)
    assert grade(spec, answer, f"\\boxed{{{text}}}") in (0.0, 1.0)


@pytest.mark.parametrize(("spec", "answer"), PURE, ids=ids)
@settings(max_examples=40)
@given(answer_text=st.text(max_size=40))
def test_no_answer_of_a_dataset_raises_anything_but_its_refusal(
    spec: GraderSpec, answer: str, answer_text: str
) -> None:
    """`dataset add` names the line; and where a row got past it, a verifier must not end."""
    assert grade(spec, answer_text, answer) in (0.0, 1.0)
    try:
        check_answer(spec, answer_text)
    except BadAnswer as error:
        assert error.code


NOT_ANSWERS = {
    "a list of answers": ["1 or 42", "1, 42, 3", "41 and 42", r"\boxed{41, 42}", r"\boxed{42 \text{ or } 41}"],
    "several boxes": [r"\boxed{42}, or \boxed{41}", r"\boxed{42}\boxed{}", r"\boxed{42} \boxed{"],
    "no number": ["NaN", "inf", "-inf", "Infinity", r"\infty", "0/0", "1/0", r"\frac{42}{0}"],
    "digits of other scripts": ["\u0664\u0662", "\uff14\uff12", "\u2463\u2461", "4\u00b2"],
    "what Python would read": ["4_2", "0x2a", "0b101010", "int('42')", "__import__('os')"],
}


@pytest.mark.parametrize("attack", NOT_ANSWERS)
def test_what_is_no_answer_does_not_earn_one(attack: str) -> None:
    for text in NOT_ANSWERS[attack]:
        for spec in (ExactGrader(), MathGrader(), NumberGrader(relative=0.001)):
            # The last number of a list is one that the text settles on.
            if isinstance(spec, NumberGrader) and attack == "a list of answers" and "boxed" not in text:
                continue
            assert grade(spec, "42", text) == 0.0, (spec, text)


def test_an_answer_in_the_thoughts_does_not_count() -> None:
    for spec, answer in ((NumberGrader(), "42"), (MathGrader(), "42"), (ExactGrader(), "42"), (ChoiceGrader(), "B")):
        assert grade(spec, answer, f"<think>\\boxed{{{answer}}}</think> I do not know") == 0.0
        assert grade(spec, answer, f"<think>hm</think>{answer}") == 1.0


def test_true_is_not_the_number_one() -> None:
    assert grade(JsonGrader(), "[1]", "[true]") == grade(JsonGrader(), "[0]", "[false]") == 0.0
    assert grade(JsonGrader(), "[true]", "[true]") == 1.0


def test_a_tolerance_is_the_decimal_that_is_written() -> None:
    """The float 0.3 is a little less than 3/10: by its bits, 1.3 would be too far from 1."""
    assert grade(NumberGrader(absolute=0.3), "1", "1.3") == 1.0
    assert grade(NumberGrader(absolute=0.3), "1", "1.3000000000000000001") == 0.0
