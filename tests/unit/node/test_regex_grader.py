"""Patterns of operators on texts of strangers: the language is a part of Python's, and every step is bounded."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.graders import grade, regex
from node.graders.regex import MAX_POSITIONS, MAX_REGEX_TEXT_CHARS, BadPattern, compile_pattern
from node.protocol.grading import RegexGrader

PATTERNS = [
    "", "a*b", "(a|b)*a(a|b){3}", "a{0,2}b{2,}", "(?:ab|c)+d?", "[^a]b", r"[a-c\d]+", "x{0}y", "(a{2}){2}",
    r"\w+-\w+\.b", "(a?b?){3}", ".+", "(a*)+b", "a|b|", "(a|)b", r"[\]\-a]+", r"\D\S\W?", "(a+|b+){2,3}", r"a\.b",
    "((a|b?){2}-){0,2}", "(a{1,2}b*){2,}", "(|a|b1){2}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_it_means_to_python(pattern: str) -> None:
    """An operator tries a pattern in Python before it goes into a dataset."""
    automaton = compile_pattern(pattern, ignore_case=False)
    for size in range(6):
        for letters in itertools.product("ab1-.", repeat=size):
            text = "".join(letters)
            assert automaton.matches(text) == bool(re.fullmatch(pattern, text, re.ASCII)), text


part = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d"])
pattern = st.recursive(
    part,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}"])).map("({0[0]}){0[1]}".format),
    ),
    max_leaves=6,
)


@given(pattern=pattern, text=st.text("ab1", max_size=7))
def test_every_pattern_means_what_it_means_to_python(pattern: str, text: str) -> None:
    assert compile_pattern(pattern, ignore_case=False).matches(text) == bool(re.fullmatch(pattern, text, re.ASCII))


def test_folding_is_that_of_ascii() -> None:
    assert grade(RegexGrader(ignore_case=True), "[a-c]+X", "aBcx") == 1.0
    assert grade(RegexGrader(ignore_case=True), "k", "\N{KELVIN SIGN}") == 0.0
    assert grade(RegexGrader(), "x", "X") == 0.0


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "a**", "a*?", "{2}", "()", "(){9}", "^a", "a$", "a{,3}", "a{3,2}", "a{300}", "[", "[]a]", "[z-a]", "\\",
     "a{99999999999}", r"\b", r"(a)\1", "(?=a)", "(?i)a", "(?P<n>a)", r"[\d-z]", "[[:alpha:]]", "((a{99}){99}){99}"],
)  # fmt: skip
def test_what_is_outside_the_language_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern):
        compile_pattern(pattern, ignore_case=False)


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|a)*b", "(a|b)*a(a|b){200}", "(.*,){20}P", "([a-z]+)+X"])
def test_a_text_made_for_backtracking_costs_no_more_than_others(pattern: str) -> None:
    """Python's `re` takes longer than the universe lasts for the first of these; here, each character is one step."""
    began = time.process_time()
    assert grade(RegexGrader(), pattern, ("ab,a" * MAX_REGEX_TEXT_CHARS)[: MAX_REGEX_TEXT_CHARS - 1] + "!") == 0.0
    assert grade(RegexGrader(), pattern, "a" * (MAX_REGEX_TEXT_CHARS - 1) + "!") == 0.0
    assert time.process_time() - began < 5


def test_a_text_of_many_different_characters_costs_no_more_than_others() -> None:
    letters = "".join(chr(0x4E00 + at) for at in range(MAX_REGEX_TEXT_CHARS))
    some = "[^" + "".join(chr(0x100 + 2 * at) for at in range(470)) + "]"
    began = time.process_time()
    assert grade(RegexGrader(), f"(?:{some}{{256}})*!", letters) == 0.0
    assert time.process_time() - began < 2


def test_a_nested_repetition_is_counted_before_it_is_built() -> None:
    assert len(compile_pattern(f"a{{{MAX_POSITIONS // 2}}}" * 2, ignore_case=False).classes) == MAX_POSITIONS
    with pytest.raises(BadPattern):
        compile_pattern("(((((a{250}){250}){250}){250}){250}){250}", ignore_case=False)


def test_repetitions_of_empty_alternatives_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset of such patterns would hold up every verifier, a second for each."""
    read = []
    sequence = regex._Parser._sequence

    def counted(parser: regex._Parser, depth: int) -> regex.Part:
        read.append(depth)
        return sequence(parser, depth)

    monkeypatch.setattr(regex._Parser, "_sequence", counted)
    pattern = "(" + "|" * 900 + "a){256}"
    assert grade(RegexGrader(), pattern, "a" * 256) == 1.0
    assert len(read) < len(pattern)
