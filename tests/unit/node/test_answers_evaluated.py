"""Answers of strangers that reasoning-gym's scorers would evaluate: a completion must not run, nor pay itself."""

from __future__ import annotations

import ast

import pytest

from node.environments.guest.reasoning_gym import _EvaluationGuard, is_formula

GUARD = _EvaluationGuard()  # an audit hook stays for good

FORMULAS = ("", "42", "-1.5e3", "2*x**2 + sin(x)", "(3 + 4) / 5", "[[1, 2], [3, 4]]", "sqrt(2) * pi", "x = 3", "_ _ Q")
CODE = (
    "__import__('os')._exit(1)",
    "().__class__.__mro__[-1].__subclasses__()",
    "exec(chr(112))",
    "x.real",
    "x . real",
    "1 .real",
    "lambda x: x",
    "[e for e in (1,)]",
    "f'{x}'",
    '"a"',
    "`a`",
    "print",
    "x := 1",
    "a;b",
    "#",
    "__debug__",
    "\N{DOUBLE-STRUCK ITALIC SMALL I}mport(x)",  # Python reads names without their letters' forms
    "1exec(x)",
    "1.real",
    "\\",
    "@x",
)


@pytest.mark.parametrize("answer", FORMULAS)
def test_what_only_calculates_is_a_formula(answer: str) -> None:
    assert is_formula(answer)


@pytest.mark.parametrize("answer", CODE)
def test_what_could_run_anything_is_none(answer: str) -> None:
    assert not is_formula(answer)


def test_a_scorer_evaluates_formulas_and_reads_literals_and_nothing_else() -> None:
    """By `eval`, by `compile` and by what sympy makes of a text, which is the same call below."""
    with GUARD.admitting(formula=True):
        assert eval("1 + 1") == 2
    with GUARD.admitting(formula=False):
        assert ast.literal_eval("['a', 1]") == ["a", 1]
        for evaluate in (eval, exec, lambda text: compile(text, "<string>", "eval"), ast.parse):
            with pytest.raises(PermissionError, match="not evaluated"):
                evaluate("1 + 1")
    assert eval("1 + 1") == 2
