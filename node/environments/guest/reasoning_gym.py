"""Datasets of the reasoning-gym package (arXiv 2505.24760): a problem is the only item of a dataset with its seed.

Many scorers evaluate the answer, as Python or by way of sympy. A completion could so give itself a reward, and change
the scorer for all that come after it; the sandbox around this process keeps neither apart. So an answer is evaluated
only where it is a formula or a list of numbers: without attributes or texts, and without names but letters and
functions of mathematics.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .adapter import Json, RecentValues, Turn, Unusable, versions, within_bounds

MAX_ANSWER_CHARACTERS = 4096
"""A longer answer earns nothing."""

END_OF_THOUGHT = "</think>"
INSTRUCTION = f"Think first, end your thoughts with {END_OF_THOUGHT}, and then give the answer and nothing else."

_SETS = "its problems follow the order of a set of strings, which differs between processes"
_NUMBERS = "its scorer expands numbers such as 1e999999999 without a limit"
WHY_REFUSED = {
    **dict.fromkeys(
        (
            "isomorphic_strings",
            "knight_swap",
            "list_functions",
            "polynomial_multiplication",
            "ransom_note",
            "word_ladder",
        ),
        _SETS,
    ),
    "coin_flip": _NUMBERS,
}
"""Refused datasets, with what `swarmproof env check` or a review found; version 0.1.25."""

_FUNCTIONS = frozenset(
    {"Abs", "abs", "acos", "asin", "atan", "cos", "cosh", "exp", "ln", "log", "pi", "sec", "sin", "sinh", "sqrt", "tan"}
    | {"tanh", "csc", "cot", "erf", "oo"}
)
_FORMULA = re.compile(r"[A-Za-z0-9\s+\-*/^%=<>|(),.\[\]{}_]*")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]")
_NUMBER = re.compile(r"\d+(\.\d*)?([eE][+-]?\d+)?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EVALUATED = ("<string>", "<unknown>")
"""What `compile` is told as the file of a text that is evaluated."""


class Gym:
    """One dataset."""

    def __init__(self, load: Json) -> None:
        self._dataset: str = load["target"]
        self._settings: Json = load["arguments"]
        if self._dataset in WHY_REFUSED:
            raise Unusable("refused_environment", WHY_REFUSED[self._dataset])
        reserved = sorted(self._settings.keys() & {"seed", "size"})
        if reserved:
            raise Unusable("bad_arguments", f"{reserved} follow from the slot")
        try:
            self._package: Any = importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise Unusable("package_missing", f"its interpreter has no package reasoning-gym: {error}") from error
        self._guard = _EvaluationGuard()
        self._entries = RecentValues(self._make)
        source, entry = self._entries[0]
        # What a scorer imports when it is first asked is compiled now, and not as part of an answer.
        for answer in (entry["answer"], ""):
            source.score_answer(answer, entry)

    def loaded(self) -> Json:
        return {
            "problems": None,
            "several_turns": False,
            "speaks": "text",
            "versions": versions("reasoning_gym", "reasoning_gym"),
        }

    def problem(self, index: int) -> Json:
        _, entry = self._entries[index]
        return {"prompt": f"{entry['question']}\n{INSTRUCTION}\n"}

    def reply(self, *_: Any) -> Json:
        return {}

    def reward(self, index: int, turns: list[Turn]) -> float:
        source, entry = self._entries[index]
        _, mark, answer = turns[-1].rpartition(END_OF_THOUGHT)
        answer = answer.strip()
        if not mark or len(answer) > MAX_ANSWER_CHARACTERS:
            return 0.0
        with self._guard.admitting(is_formula(answer)):
            return within_bounds(source.score_answer(answer, entry))

    def _make(self, seed: int) -> tuple[Any, Any]:
        try:
            source = self._package.create_dataset(self._dataset, seed=seed, size=1, **self._settings)
        except Exception as error:
            raise Unusable("bad_arguments", f"it does not accept its arguments: {error!r}") from error
        return source, source[0]


def is_formula(answer: str) -> bool:
    """Return whether to evaluate an answer is to calculate, and nothing else."""
    words = _NUMBER.sub("0", answer)
    names = _NAME.findall(words)
    return (
        _FORMULA.fullmatch(answer) is not None
        and _ATTRIBUTE.search(words) is None
        and all(len(name) == 1 or name in _FUNCTIONS for name in names)
    )


class _EvaluationGuard:
    """Refuses that a text is compiled while an answer is scored that is no formula; literals are only read."""

    def __init__(self) -> None:
        self._refuses = False
        sys.addaudithook(self._audit)

    @contextmanager
    def admitting(self, formula: bool) -> Iterator[None]:
        """Score an answer; one that is no `formula` is not evaluated."""
        self._refuses = not formula
        try:
            yield
        finally:
            self._refuses = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._refuses and event == "compile" and arguments[1] in (*_EVALUATED, None) and not _reads_literal():
            raise PermissionError("an answer that is no formula is not evaluated")


def _reads_literal() -> bool:
    """Return whether the text is compiled for `ast.literal_eval`, which runs nothing."""
    frame = sys._getframe(2)  # noqa: SLF001  (there is no other way to the caller)
    names = []
    while frame is not None and frame.f_code.co_filename == _AST_FILE:
        names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return "literal_eval" in names


_AST_FILE = importlib.import_module("ast").parse.__code__.co_filename
