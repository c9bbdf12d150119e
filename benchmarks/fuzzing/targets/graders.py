"""Graders: completions of whoever generates, against expected answers that a dataset has."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from benchmarks.fuzzing.mutation import bytes_mutator
from benchmarks.fuzzing.target import Harness, Target
from node.graders import grade
from node.protocol.grading import (
    ChoiceGrader,
    ExactGrader,
    GraderSpec,
    JsonGrader,
    MathGrader,
    NumberGrader,
    RegexGrader,
)

MATHS = (r"\frac{\sqrt{2}+1}{3}", r"x^{2}+2x+1", r"\{1,-2\}", r"(-\infty,1]\cup(2,3)", r"y=2^{n+1}", "50%")
TOKENS = (
    r"\frac", r"\sqrt", r"\boxed{", r"\text{", r"\pm", r"\infty", r"\cup", r"\begin{pmatrix}", r"\overline{", r"\log_",
    r"\sin", r"\binom", "^{", "}^{9", "{", "}", "(", ")", "|", "!", "%", ",", "=", "<", "/", "9" * 40, "1e9",
    "</think>", "answer is ", "$",
    "```", "```json\n", "[", '"', '{"a":', "true", "NaN",
    "\N{SUPERSCRIPT TWO}", "\N{SQUARE ROOT}",
)  # fmt: skip


def _grader(_: ExitStack, *, cases: tuple[tuple[GraderSpec, str], ...]) -> Harness:
    """Feed one completion to each case; only a right text may earn anything, and none may raise."""

    def run(data: bytes) -> tuple[float, ...]:
        text = data.decode(errors="surrogateescape")
        rewards = tuple(grade(spec, answer, text) for spec, answer in cases)
        assert set(rewards) <= {0.0, 1.0}, "a reward between 0 and 1"
        return rewards

    seeds = [form.format(answer).encode() for _, answer in cases for form in ("{}", "Hm.</think>\\boxed{{{}}}", "${}$")]
    return Harness(seeds, run, (), bytes_mutator(*(token.encode() for token in TOKENS)))


SHORT = (
    (ExactGrader(ignore_case=True), "Paris"),
    (ChoiceGrader(), "B"),
    (NumberGrader(relative=0.01), "1,234.5"),
    (JsonGrader(), '{"a":[1,true,"x"]}'),
    (RegexGrader(), r"(a|b)*[^c-e]{1,3}\d+"),
)

TARGETS = (
    Target("graders.short", "whoever generates", 10, partial(_grader, cases=SHORT)),
    Target(
        "graders.math",
        "whoever generates",
        20,
        partial(_grader, cases=tuple((MathGrader(), answer) for answer in MATHS)),
        cpu_ms=250.0,
        hang_seconds=5.0,
    ),
)
