"""Text of strangers on a page: a person sees what is there, and as much of it as fits."""

from __future__ import annotations

import re
import unicodedata

import pytest

from coordinator.dashboard.formatting import number, seconds
from coordinator.dashboard.visible import short, visible, with_code

BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"
INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u2028\u2029\u3164\u115f\u2800\U000e0041"


def test_trojan_source_is_shown_as_what_it_is() -> None:
    assert visible("access\u202e\u2066level") == "access⟨U+202E⟩⟨U+2066⟩level"


def test_no_character_hides_or_turns_the_line_round() -> None:
    for character in [*BIDI, *INVISIBLE, *map(chr, range(32)), "\x7f", "\x85", "\x9b"]:
        assert re.fullmatch(rf"a[^{re.escape(character)}]+b", visible(f"a{character}b"), re.DOTALL), ascii(character)


def test_what_stands_between_backticks_is_code_and_stays_text() -> None:
    assert with_code("`swarmproof <x>` & a lone `") == "<code>swarmproof &lt;x&gt;</code> &amp; a lone `"


def test_a_pile_of_combining_marks_cannot_cover_the_lines_around_it() -> None:
    shown = visible("Z" + "\u0335\u0489" * 5000 + "algo", most=20_000)
    assert sum(unicodedata.category(each) in {"Mn", "Me"} for each in shown) == 4
    assert shown.endswith("⟨+9996 marks⟩algo")


def test_marks_that_begin_a_text_do_not_sit_on_what_is_before_it() -> None:
    assert visible("\u0301a") == "\u25cc\u0301a"


def test_languages_that_need_marks_and_right_to_left_letters_stay_as_they_are() -> None:
    for text in ("Việt Nam", unicodedata.normalize("NFD", "Việt Nam"), "שָׁלוֹם", "नमस्ते", "漢字 🙂"):
        assert visible(text) == text


def test_a_line_of_ten_megabytes_costs_no_more_than_what_is_shown_of_it() -> None:
    shown = visible("x" * 10_000_000, most=100)
    assert shown == "x" * 100 + "… (9,999,900 more)"


def test_lines_end_where_they_end_only_if_they_may() -> None:
    assert visible("a\nb") == "a↵b"
    assert visible("a\nb", lines=True) == "a↵\nb"


def test_a_key_that_is_none_is_shortened_with_the_same_care() -> None:
    assert short("0123456789abcdef" * 4) == "01234567…cdef"
    assert short("\u202eabc") == "⟨U+202E⟩abc"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (99_999, "99,999"),
        (100_000, "100 k"),
        (999.9, "1 k"),
        (12_345.6, "12.3 k"),
        (999_999, "1 M"),
        (1_234_567, "1.23 M"),
        (0.00012345, "0.000123"),
        (float("nan"), "not finite"),
        (1e308, "not finite"),
        (None, "-"),
    ],
)
def test_numbers_fit_where_they_stand(value: float | None, said: str) -> None:
    assert number(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0123, "12 ms"), (3.14, "3.1 s"), (61, "1 min 1 s"), (3600, "1 h"), (90_000, "1 d 1 h"), (None, "-")],
)
def test_spans_of_time_have_two_units_at_most(value: float | None, said: str) -> None:
    assert seconds(value) == said
