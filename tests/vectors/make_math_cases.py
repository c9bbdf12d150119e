"""Write `math_cases.json`: 500 answers and completions, with what math-verify says of each.

    python -m venv reference && reference/bin/pip install math-verify==0.9.0 antlr4-python3-runtime==4.13.2
    reference/bin/python tests/vectors/make_math_cases.py

math-verify is a reference, and no dependency: the tests read the file. `equal` is what mathematics says, as each form
is written below; docs/graders.md lists where `math/1` or math-verify says something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

FILE = Path(__file__).parent / "math_cases.json"
PATIENCE_SECONDS = 120
Case = tuple[str, str, str, bool]
"""Form, expected answer, given answer, and whether they are equal."""

STYLES = cycle(
    [
        r"We compute step by step. So the result is \boxed{{{}}}.",
        r"<think>Maybe 17? No.</think> The answer is $\boxed{{{}}}$.",
        r"The final answer is ${}$.",
        r"Therefore, \[\boxed{{{}}}\]",
    ]
)


def numbers() -> Iterator[Case]:
    for n in (3, 12, 45, 160, 999):
        yield "integer", str(n), str(n), True
        yield "integer", str(n), f"-{n}", False
        yield "integer", str(n), f"{n}.0", True
    for thousands in (1234, 45678, 1000000, 250000, 98765):
        yield "thousands", str(thousands), f"{thousands:,}", True
        yield "thousands", str(thousands), f"{thousands:,}".replace(",", "{,}"), True
        yield "thousands", f"{thousands:,}", str(thousands), True
    for top, bottom, decimal in ((1, 2, "0.5"), (3, 4, "0.75"), (7, 8, "0.875"), (-2, 5, "-0.4"), (9, 20, "0.45")):
        sign = "-" if top < 0 else ""
        fraction = rf"{sign}\frac{{{abs(top)}}}{{{bottom}}}"
        yield "decimal", fraction, decimal, True
        yield "decimal", decimal, fraction, True
        yield "decimal", decimal, f"{top}/{bottom}", True
        yield "decimal", fraction, decimal + "1", False
        yield "decimal", fraction, rf"{sign}\dfrac{{{2 * abs(top)}}}{{{2 * bottom}}}", True
        yield "fraction", fraction, rf"{sign}\frac{{{abs(top)}}}{{{bottom + 1}}}", False
    for a, b in ((1, 2), (3, 5), (2, 7), (4, 9), (5, 6)):
        yield "short fraction", rf"\frac{{{a}}}{{{b}}}", rf"\frac{a}{b}", True
        yield "short fraction", rf"\frac{{{a}}}{{{b}}}", rf"\tfrac{b}{a}", False
    for whole, a, b in ((3, 1, 2), (1, 3, 4), (2, 2, 5), (5, 1, 3), (10, 5, 8)):
        improper = rf"\frac{{{whole * b + a}}}{{{b}}}"
        yield "mixed number", improper, rf"{whole}\frac{{{a}}}{{{b}}}", True
        yield "mixed number", improper, f"{whole} {a}/{b}", True
        yield "mixed number", improper, rf"{whole + 1}\frac{{{a}}}{{{b}}}", False
    for percent in (5, 25, 50, 80, 150):
        yield "percent", str(percent), rf"{percent}\%", True
        yield "percent", rf"{percent}\%", str(percent), True
        yield "percent", rf"{percent}\%", f"{percent / 100:.2f}", True
        yield "percent", rf"{percent}\%", rf"{percent + 1}\%", False
    for n, power in ((15, 3), (2, 6), (33, 2), (71, 4), (9, -2)):
        value = str(n * 10**power) if power > 0 else "0.09"
        yield "scientific", value, rf"{n} \times 10^{{{power}}}", True
        yield "scientific", value, rf"{n} \times 10^{{{power + 1}}}", False
    for digits, a, b in (("3", 1, 3), ("6", 2, 3), ("1", 1, 9), ("27", 3, 11), ("142857", 1, 7)):
        yield "recurring decimal", rf"\frac{{{a}}}{{{b}}}", rf"0.\overline{{{digits}}}", True
        yield "rounded decimal", rf"\frac{{{a}}}{{{b}}}", f"{a / b:.4f}", False


def expressions() -> Iterator[Case]:
    for a, b in ((2, 3), (5, 2), (3, 7), (4, 5), (6, 11)):
        yield "root", rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}", True
        yield "root", rf"\frac{{1}}{{\sqrt{{{b}}}}}", rf"\frac{{\sqrt{{{b}}}}}{{{b}}}", True
        yield "root", rf"{a}\sqrt{{{b}}}", rf"{b}\sqrt{{{a}}}", False
        yield "root", rf"{a}+\sqrt{{{b}}}", rf"\sqrt{{{b}}}+{a}", True
        yield "root", rf"\sqrt[3]{{{a**3}}}", str(a), True
        yield "rationalised", rf"\frac{{1}}{{{a}+\sqrt{{{b}}}}}", rf"\frac{{{a}-\sqrt{{{b}}}}}{{{a * a - b}}}", True
        yield "rationalised", rf"\frac{{1}}{{{a}+\sqrt{{{b}}}}}", rf"\frac{{{a}+\sqrt{{{b}}}}}{{{a * a - b}}}", False
        yield "nested root", rf"\sqrt{{{a}+\sqrt{{{b}}}}}", rf"\sqrt{{\sqrt{{{b}}}+{a}}}", True
        yield "denested root", rf"1+\sqrt{{{b}}}", rf"\sqrt{{{1 + b}+2\sqrt{{{b}}}}}", True
        yield "power", rf"{a}^{{{b}}}", str(a**b), True
        yield "power", rf"{a}^{{{b}}}", str(a * b), False
        yield "power", rf"2^{{{a}}} \cdot 2^{{{b}}}", rf"2^{{{a + b}}}", True
        yield "pi", rf"{a}\pi", rf"\pi \cdot {a}", True
        yield "pi", rf"\frac{{{a}\pi}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}\pi", True
        yield "pi", rf"{a}\pi", rf"{a * 3.14:.2f}", False
        yield "pi", rf"{a}\pi", str(a), False
        yield "polynomial", rf"(x+{a})(x-{b})", rf"x^2+{a - b}x-{a * b}".replace("+-", "-"), True
        yield "polynomial", rf"(x+{a})^2", rf"x^2+{2 * a}x+{a * a}", True
        yield "polynomial", rf"{a}x+{b}y", rf"{b}y+{a}x", True
        yield "polynomial", rf"{a}x+{b}y", rf"{b}x+{a}y", False
        yield "rational function", rf"\frac{{x^2-{a * a}}}{{x-{a}}}", rf"x+{a}", True
        yield "rational function", rf"\frac{{{a}}}{{x}}+\frac{{{b}}}{{y}}", rf"\frac{{{a}y+{b}x}}{{xy}}", True
        yield "rational function", rf"\frac{{{a}}}{{x}}+\frac{{{b}}}{{y}}", rf"\frac{{{a + b}}}{{x+y}}", False
        yield "symbolic power", rf"2^{{n+{a}}}", rf"{2**a} \cdot 2^{{n}}", True
        yield "symbolic power", rf"e^{{{a}x}}", rf"(e^x)^{a}", True
        yield "symbolic power", rf"2^{{n+{a}}}", rf"2^n+{2**a}", False
        yield "logarithm", rf"\ln {a**2}", rf"2\ln {a}", True
        yield "logarithm", rf"\log_{{{a}}} {a**3}", "3", True
        yield "complex", rf"{a}+{b}i", rf"{b}i+{a}", True
        yield "complex", rf"{a}+{b}i", rf"{a}-{b}i", False
        yield "complex", str(a * a + b * b), rf"({a}+{b}i)({a}-{b}i)", True
    for n in (3, 4, 5, 6, 7):
        product = 1
        for factor in range(2, n + 1):
            product *= factor
        yield "factorial", str(product), rf"{n}!", True
        yield "binomial", str(n * (n - 1) // 2), rf"\binom{{{n}}}{{2}}", True
    for angle, sine in (("6", r"\frac12"), ("4", r"\frac{\sqrt2}{2}"), ("3", r"\frac{\sqrt{3}}{2}")):
        yield "trigonometry", sine, rf"\sin\frac{{\pi}}{{{angle}}}", True
        yield "trigonometry", rf"\sin {angle}x", rf"\sin({angle}x)", True
        yield "trigonometry", rf"\sin {angle}x", rf"\cos({angle}x)", False


def collections() -> Iterator[Case]:
    for a, b, c in ((1, 2, 3), (-4, 0, 7), (5, 9, 11), (2, 8, 32), (-3, -1, 6)):
        yield "set", rf"\{{{a},{b},{c}\}}", rf"\{{{c}, {a}, {b}\}}", True
        yield "set", rf"\{{{a},{b},{c}\}}", rf"{a}, {b}, {c}", True
        yield "list", rf"{a},{b}", rf"{b}, {a}", True
        yield "list", rf"{a},{b}", rf"{a} \text{{ and }} {b}", True
        yield "several answers", str(a), rf"{a} \text{{ or }} {b}", False
        yield "several answers", str(a), rf"{a}, {b}, {c}", False
        yield "tuple", f"({a},{b})", rf"\left({a}, {b}\right)", True
        yield "tuple", f"({a},{b})", f"({b}, {a})", False
        yield "tuple", f"({a},{b},{c})", f"({a}.0,{b},{c})", True
        yield "interval", f"[{b},{c})", rf"\left[{b}, {c}\right)", True
        yield "interval", f"[{b},{c})", f"[{b},{c}]", False
        yield "interval", rf"[{b},\infty)", rf"x \ge {b}", True
        yield "interval", rf"({a},{c})", rf"{a} < x < {c}", True
        yield "interval", rf"({a},{c}]", rf"{a} < x < {c}", False
        yield "union", rf"(-\infty,{a})\cup({c},\infty)", rf"({c},\infty) \cup (-\infty,{a})", True
        yield "union", rf"(-\infty,{a})\cup({c},\infty)", rf"(-\infty,{a}]\cup({c},\infty)", False
        yield "assignment", str(a), rf"x = {a}", True
        yield "assignment", rf"x={a}", str(a), True
        yield "assignment", rf"x={a}", f"x={b}", False
        yield "assignment", rf"\{{{a},{b}\}}", rf"x={a} \text{{ or }} x={b}", True
        yield "equation", rf"y={b + 4}x+{c}", rf"y={c}+{b + 4}x", True
        yield "equation", rf"y={b + 4}x+{c}", rf"{b + 4}x+{c}", True
        yield "equation", rf"x+{b + 4}y={c}", rf"2x+{2 * b + 8}y={2 * c}", True
        yield "equation", rf"x+{b + 4}y={c}", rf"x+{b + 4}y={c + 1}", False
        yield (
            "matrix",
            rf"\begin{{pmatrix}}{a}&{b}\\{c}&1\end{{pmatrix}}",
            (rf"\begin{{bmatrix}} {a} & {b} \\ {c} & 1 \end{{bmatrix}}"),
            True,
        )
        yield (
            "matrix",
            rf"\begin{{pmatrix}}{a}&{b}\\{c}&1\end{{pmatrix}}",
            (rf"\begin{{pmatrix}} {a} & {c} \\ {b} & 1 \end{{pmatrix}}"),
            False,
        )
    for n in (2, 3, 5):
        yield "plus or minus", rf"\{{{n},-{n}\}}", rf"\pm {n}", True
        yield "plus or minus", rf"\{{1+\sqrt{{{n}}},1-\sqrt{{{n}}}\}}", rf"1 \pm \sqrt{{{n}}}", True
        yield "plus or minus", str(n), rf"\pm {n}", False


def words() -> Iterator[Case]:
    for n in (4, 15, 120):
        yield "unit", str(n), rf"{n} \text{{ cm}}", True
        yield "unit", str(n), rf"{n}\,\mathrm{{cm}}^2", True
        yield "unit", str(n), rf"{n} square units", True
        yield "unit", str(n), rf"{n}^\circ", True
        yield "unit", str(n), rf"\${n}", True
        yield "unit", rf"{n} \text{{ meters}}", str(n), True
        yield "unit", str(n), rf"{n + 1} \text{{ cm}}", False
    for one, other in (("Monday", "Friday"), ("even", "odd"), ("listen", "silent"), ("yes", "no")):
        yield "word", rf"\text{{{one}}}", one, True
        yield "word", rf"\text{{{one}}}", rf"\text{{{other}}}", False
    yield "word", "Tuesday", "tuesday", True
    for one, other in (("A", "B"), ("C", "D")):
        yield "letter", one, rf"\text{{{one}}}", True
        yield "letter", one, rf"(\text{{{one}}})", True
        yield "letter", one, other, False


def boxes() -> Iterator[Case]:
    for first, last in ((3, 4), (10, 12), (-1, 1), (0, 5), (7, 8)):
        yield "several boxes", str(last), rf"\boxed{{{first}}} ... no: \boxed{{{last}}}", True
        yield "several boxes", str(first), rf"\boxed{{{first}}} ... no: \boxed{{{last}}}", False


def hostile() -> Iterator[Case]:
    for answer in ("1", "0"):
        for given in (r"\infty-\infty", r"\frac{0}{0}", r"\frac{1}{0}", "NaN", r"\infty", r"x-y", "1/x", r"0^{0^{x}}"):
            yield "undefined", answer, given, False


def cases() -> list[Case]:
    """Return the cases in order, none twice."""
    found = dict.fromkeys(
        case for group in (words, boxes, hostile, numbers, collections, expressions) for case in group()
    )
    return list(found)


def math_verify_says(answer: str, completion: str) -> bool:
    """Return the verdict of math-verify, with its own settings but for the patience that a busy machine needs."""
    from math_verify import parse, verify

    expected, given = (
        parse(text, parsing_timeout=PATIENCE_SECONDS) for text in (f"${answer}$", completion.rpartition("</think>")[2])
    )
    return bool(verify(expected, given, timeout_seconds=PATIENCE_SECONDS))


def main() -> None:
    rows = []
    for form, answer, given, equal in cases():
        completion = given if form == "several boxes" else next(STYLES).format(given)
        rows.append(
            {
                "form": form,
                "answer": answer,
                "completion": completion,
                "equal": equal,
                "math_verify": math_verify_says(answer, completion),
            }
        )
    FILE.write_text(json.dumps(rows, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    agreed = sum(row["equal"] == row["math_verify"] for row in rows)
    print(f"{len(rows)} cases, {agreed} of which math-verify decides as written here")


if __name__ == "__main__":
    main()
