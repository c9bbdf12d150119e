"""What is equal as mathematics, decided exactly and within bounds."""

from __future__ import annotations

import json
import re
import time
from collections import Counter

import pytest
from locations import ROOT, VECTORS_FOLDER

from node.graders import grade
from node.protocol.grading import MathGrader

CASES = json.loads((VECTORS_FOLDER / "math_cases.json").read_text(encoding="utf-8"))


def reward(answer: str, given: str, *, evaluated: bool = False) -> float:
    return grade(MathGrader(evaluated=evaluated), answer, rf"\boxed{{{given}}}")


@pytest.fixture(scope="module")
def verdicts() -> list[bool]:
    return [bool(grade(MathGrader(), case["answer"], case["completion"])) for case in CASES]


def test_the_500_cases_are_decided_as_mathematics_has_it(verdicts: list[bool]) -> None:
    wrong = [case for case, verdict in zip(CASES, verdicts, strict=True) if verdict != case["equal"]]
    assert len(CASES) == 500
    assert wrong == []


def test_the_page_lists_every_form_in_which_math_verify_differs(verdicts: list[bool]) -> None:
    page = (ROOT / "docs" / "graders.md").read_text(encoding="utf-8")
    differing = Counter(
        case["form"] for case, verdict in zip(CASES, verdicts, strict=True) if verdict != case["math_verify"]
    )
    agreed = len(CASES) - differing.total()
    assert f"{agreed} of 500" in page
    listed = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) \|", page, re.MULTILINE))
    assert {form: str(count) for form, count in differing.items()} == listed


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (r"\sqrt{8+4\sqrt{3}}", r"\sqrt{2}+\sqrt{6}"),
        (r"\frac{\sqrt[3]{2}}{2}", r"2^{-2/3}"),
        (r"\sqrt{-4}", "2i"),
        (r"\sqrt[3]{-8}", "-2"),
        (r"\log 1000", "3"),
        (r"\tan \frac{\pi}{4}", "1"),
        (r"\cos \frac{5\pi}{6}", r"-\frac{\sqrt3}{2}"),
        ("n!", "n!"),
        ("x_1+x_{2}", "x_2+x_1"),
        (r"\alpha\beta", r"\beta\alpha"),
        ("0.1\\overline{6}", r"\frac16"),
        ("f(x)=x^2", "x^2"),
        ("|-3|", "3"),
        ("3 pi", r"3\pi"),
        ("sqrt(2)/2", r"\frac{1}{\sqrt2}"),
        (r"\text{June 5}", "june 5"),
        (r"\emptyset", r"\{\}"),
        ("10%", r"\frac{1}{10}"),
        ("11_2", "11_{2}"),
        ("5", "5 = x"),
        (r"x\in[100,200]", "[100, 200]"),
        (r"P=(100,200)", "(100,200)"),
        (r"A=\{100,200\}", r"\{200,100\}"),
        (r"\frac{1,000}{3}", r"\frac{1000}{3}"),
        ("5", r"5\text{ m}"),
        ("5", r"5\,\mathrm{m}^2"),
        ("5", r"5~\text{cm}"),
        ("3+2i", r"3+2\mathrm{i}"),
        (r"x \ge 2", "x >= 2"),
        (r"x \ne 2", "x != 2"),
        ("2^{10}", "2**10"),
        ("7", r"\boldsymbol{7}"),
        ("5", r"\approx 5"),
    ],
)
def test_these_are_equal_in_both_directions(answer: str, given: str) -> None:
    assert reward(answer, given) == reward(given, answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (r"\sqrt{x^2}", "x"),
        (r"\sqrt{2}", "1.414213562373095048801688724209698"),
        (r"\frac13", "0.333333333333333"),
        (r"\pi", "3.14159265358979"),
        ("x", "X"),
        ("2^n", "n^2"),
        ("-1", r"\sqrt{1}"),
        (r"\ln 2", r"\log 2"),
        ("(0,1)", r"\{0,1\}"),
        ("x<1", "x>1"),
        ("0", r"\emptyset"),
        ("5", r"\text{not } 5"),
        ("5", "5 not"),
        ("10", r"10\text{ or more}"),
        ("10", r"\text{no more than } 10"),
        ("100200", "(100,200)"),
        ("100,200", "(100, 200)"),
    ],
)
def test_these_are_not(answer: str, given: str) -> None:
    assert reward(answer, given) == reward(given, answer) == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "So\n\\[\n5\n\\]",
        "The answer is:\n\n$$\n5\n$$",
        "The answer is **5** meters.",
        "**Answer**: $5$",
        "**The answer is 5.**",
    ],
)
def test_an_answer_without_a_box_is_read_from_its_display(completion: str) -> None:
    assert grade(MathGrader(), "5", completion) == 1.0


def test_where_a_list_is_expected_a_comma_may_separate_its_items() -> None:
    for given in ("100,200", "200, 100", r"\{100,200\}"):
        assert reward("100, 200", given) == 1.0
    assert reward("1,000, 2,000", "2,000, 1,000") == reward("100200", "100,200") == 1.0
    assert reward("100200", "100, 200") == 0.0


LETTERS = " ".join("abcdfghjklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
BOMBS = {
    "a tower of powers": "9^" * 150 + "9",
    "a tower in braces": "9^{" * 30 + "9" + "}" * 30,
    "a huge power": "9^{999999999}",
    "a root of a huge number": r"\sqrt{" + "7" * 900 + "}",
    "a huge factorial": "99999999!",
    "factorials of factorials": "((200!)!)!",
    "factorials multiplied": "200!*" * 80 + "1",
    "a sum to a power": "(x+y+z+w)^{30}",
    "powers of powers of sums": "((((x+1)^{32}+y)^{32}))^{32}",
    "brackets": "(" * 490 + "1" + ")" * 490,
    "fractions in fractions": r"\frac{1}{1+" * 60 + "x" + "}" * 60,
    "roots in roots": r"\sqrt{1+" * 31 + "x" + "}" * 31,
    "many denominators": "+".join(f"1/(x+{at})" for at in range(60)),
    "many digits": "+".join(f"1/{10**60 + 7 * at + 1}" for at in range(14)),
    "a long list": ",".join(f"x^{at % 10}" for at in range(64)),
    "many variables": "(" + "+".join(f"x_{at}" for at in range(70)) + ")^2",
    "commands": "\\" * 999,
    "terms of many variables": rf"(({LETTERS} \alpha\beta\gamma+{LETTERS} a^2+1)^{{11}})^2",
    "roots without braces": "\N{SQUARE ROOT}" * 330 + " 2",
    "fractions without braces": r"\frac" * 150 + " 2",
    "logarithms to logarithms": r"\log_" * 150 + " 2",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_costs_nothing(bomb: str) -> None:
    assert len(BOMBS[bomb]) <= 1000
    began = time.process_time()
    assert reward("7", BOMBS[bomb]) == 0.0
    assert reward(BOMBS[bomb], "7") == 0.0
    assert time.process_time() - began < 2


def test_a_reward_does_not_depend_on_how_deep_the_caller_is() -> None:
    """A verifier grades from other frames than an auditor; RecursionError in one of them would part the two."""

    def below(frames: int) -> float:
        return below(frames - 1) if frames else reward("1", "\N{SQUARE ROOT}" * 330 + "1")

    assert below(0) == below(400) == 0.0
    assert reward("1", "\N{SQUARE ROOT}" * 10 + "1") == 1.0


def test_numbers_side_by_side_are_not_one_number() -> None:
    for answer, given in (("11/2", "1 1/2"), ("23", "2 3"), ("1.5", "1 .5"), (r"\frac{1}{23}", r"\frac{1}{2 3}")):
        assert reward(answer, given) == reward(given, answer) == 0.0


def test_anagrams_are_not_products_of_the_same_letters() -> None:
    assert reward("listen", "silent") == reward("listen", "s*ilent") == reward("no", "on") == 0.0
    assert reward("ab", r"b \cdot a") == 1.0


def test_the_question_is_no_answer_where_a_run_wants_it_worked_out() -> None:
    assert reward("56088", "123*456") == 1.0
    for given in (
        *("123*456", r"123 \times 456", r"\frac{112176}{4/2}", "50000+6088", "x = 123*456", "56088!/56087!"),
        *("123(456)", "(123)(456)", "(123(456))", "{123}{456}", r"\{123(456)\}", "x = 123(456)", "1(2) = 123(456)"),
        *(r"2\frac{56088}{2}", r"2\frac{84132}3", "123*456 = 56088", "x = 123*456 = 56088", "x_2*28044 = 56088"),
    ):
        assert reward("56088", given, evaluated=True) == 0.0
    for given in (
        "56088",
        "56,088",
        r"\frac{112176}{2}",
        "x = 56088",
        "56088.0",
        "(56088)",
        "{56088}",
        "= 56088",
        "f(x) = 56088",
        r"x_{n+1} = 56088",
    ):
        assert reward("56088", given, evaluated=True) == 1.0
    for given in (r"3\frac12", r"\frac{7}2", "3 1/2", r"350\%", r"\frac{-7}{-2}"):
        assert reward("7/2", given, evaluated=True) == 1.0
    assert reward("1/3", r"0.\overline{3}", evaluated=True) == 1.0
    assert reward(r"\{56088\}", r"\{123(456)\}", evaluated=True) == 0.0
    assert reward(r"2\sqrt2", r"\sqrt8", evaluated=True) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "$41$ or $42$", "The answer is $41$, $42$.", r"Answer: \(41\) and \(42\)", "$41$, OR $42$", "41 or $42$",
        "$42$ or 41", "$42$, or", "$40$, $41$ and $42$",
    ],
)  # fmt: skip
def test_a_choice_of_answers_is_not_the_last_of_them(text: str) -> None:
    """A policy would name all that may be right, and earn as if it knew."""
    assert grade(MathGrader(), "42", text) == 0.0


def test_pairs_of_marks_that_a_list_joins_are_a_list() -> None:
    for text in ("$x=1$ or $x=2$", "The answer is $1$, $2$.", r"So \(1\) and \(2\)", "either $1$, or $2$"):
        assert grade(MathGrader(), "1, 2", text) == 1.0
    for text in ("From $a$ and $b$ we get $42$", "For $n = 2$ $42$", "for $n=1$ the floor is $42$ of them", r"\(42\)"):
        assert grade(MathGrader(), "42", text) == 1.0
