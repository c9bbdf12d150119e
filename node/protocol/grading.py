"""How a completion's answer is compared with the expected one: the graders of docs/protocol.md, section 5.4.

A grader's name carries its version. What `math/1` calls equal never changes: another rule is another name, so that a
reward can be derived again for as long as the run's log is kept.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shardcast.wire import Wire

MAX_STEPS = 2_000_000

Tolerance = Annotated[float, Meta(ge=0, le=1e9)]


class ExactGrader(Wire, frozen=True, tag_field="kind", tag="exact/1"):
    """The answer itself, with white space trimmed; `ignore_case` folds the letters A-Z."""

    ignore_case: bool = False


class ChoiceGrader(Wire, frozen=True, tag_field="kind", tag="choice/1"):
    """The letter of one of `choices` options, A being the first."""

    choices: Annotated[int, Meta(ge=2, le=26)] = 4


class NumberGrader(Wire, frozen=True, tag_field="kind", tag="number/1"):
    """A number within `absolute`, or within `relative` times the expected one's size, whichever is wider."""

    absolute: Tolerance = 0.0
    relative: Tolerance = 0.0


class MathGrader(Wire, frozen=True, tag_field="kind", tag="math/1"):
    """An expression, set, tuple, interval or equation that equals the expected one, in LaTeX or plain text.

    `evaluated`: where a number is expected, what still has something to work out (`6*7`) earns nothing.
    """

    evaluated: bool = False


class JsonGrader(Wire, frozen=True, tag_field="kind", tag="json/1"):
    """The same JSON value, in whatever order and spacing."""


class RegexGrader(Wire, frozen=True, tag_field="kind", tag="regex/1"):
    """A text that the expected answer, a regular expression, matches from beginning to end."""

    ignore_case: bool = False


class UnitTestsGrader(Wire, frozen=True, tag_field="kind", tag="unit-tests/1"):
    """A Python program that gives the expected outputs; the answer holds the cases.

    `partial` rewards the share of cases that are right, otherwise all or none are. `steps`: instructions of the
    interpreter for all cases together. `python` is the version that judges, as programs may mean something else in
    another.
    """

    partial: bool = False
    steps: Annotated[int, Meta(ge=1000, le=MAX_STEPS)] = 500_000
    python: Annotated[str, Meta(pattern=r"^3\.[0-9]{1,2}\Z")] = "3.11"


GraderSpec = ExactGrader | ChoiceGrader | NumberGrader | MathGrader | JsonGrader | RegexGrader | UnitTestsGrader
"""A grader with its settings; on the wire `kind`, the name with its version, comes first."""
