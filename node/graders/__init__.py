"""Rewards that are fixed in the protocol: a completion's answer, compared with the expected one (section 5.4).

Pure, and bounded in time and memory whatever a stranger wrote: nothing here reads a clock, a file or the network, and
nothing evaluates text, except for `unit-tests/1`, whose programs run in `node.sandbox`.
"""

from __future__ import annotations

from node.graders.errors import BadAnswer, GraderFault
from node.graders.json_values import check_json, grade_json
from node.graders.math import check_math, grade_math
from node.graders.regex import check_regex, grade_regex
from node.graders.simple import check_choice, check_number, grade_choice, grade_exact, grade_number
from node.graders.text import MAX_TEXT_CHARS, WHITE_SPACE, graded_text
from node.graders.unit_tests import check_machine, check_unit_tests, grade_unit_tests
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
from node.sandbox import Sandbox

MAX_ANSWER_CHARS = MAX_TEXT_CHARS
MAX_CASES_CHARS = 1024 * 1024


def grade(spec: GraderSpec, answer: str, completion: str) -> float:  # noqa: PLR0911  (one for each grader)
    """Return the reward in [0, 1] of a completion whose expected answer is `answer`.

    Never raises on account of the completion's text; an answer that `check_answer` refuses earns nothing. Raises
    GraderFault or SandboxFailed where this machine cannot tell, which happens for `unit-tests/1` alone.
    """
    text = graded_text(completion)
    if text is None:
        return 0.0
    match spec:
        case ExactGrader():
            return grade_exact(spec, answer, text)
        case ChoiceGrader():
            return grade_choice(spec, answer, text)
        case NumberGrader():
            return grade_number(spec, answer, text)
        case MathGrader():
            return grade_math(spec, answer, text)
        case JsonGrader():
            return grade_json(answer, text)
        case RegexGrader():
            return grade_regex(spec, answer, text)
        case UnitTestsGrader():
            return grade_unit_tests(spec, answer, text)


def check_answer(spec: GraderSpec, answer: str) -> None:
    """Raise BadAnswer where no completion could ever match `answer`."""
    if not answer.strip(WHITE_SPACE):
        raise BadAnswer("the answer is empty", code="empty_answer")
    most = MAX_CASES_CHARS if isinstance(spec, UnitTestsGrader) else MAX_ANSWER_CHARS
    if len(answer) > most:
        raise BadAnswer(f"the answer has {len(answer)} characters, more than {most}", code="long_answer")
    match spec:
        case ChoiceGrader():
            check_choice(spec, answer)
        case NumberGrader():
            check_number(answer)
        case MathGrader():
            check_math(answer)
        case JsonGrader():
            check_json(answer)
        case RegexGrader():
            check_regex(spec, answer)
        case UnitTestsGrader():
            check_unit_tests(answer)


def check_grader(spec: GraderSpec) -> None:
    """Raise GraderFault or SandboxFailed where this machine cannot grade; who computes no rewards need not ask."""
    if isinstance(spec, UnitTestsGrader):
        check_machine(spec)
        Sandbox().check()


__all__ = ["BadAnswer", "GraderFault", "check_answer", "check_grader", "grade"]
