"""What a contributor reads of a trial: who is told that all is well loses work that is rejected later."""

from __future__ import annotations

from msgspec import structs

from node.doctor.report import Level
from node.doctor.trial import Trial, check_trial
from node.policy.child import NoAnswer
from node.protocol.admission import Figures, Outcome, Verdict
from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec

FIGURES = Figures(
    exponent_mismatches=3, mantissa_mean=0.5, mantissa_median=0.5, token_margin=0.1, margin_mean=0, logprob_error=0.01
)
GOOD = Trial(
    engine="torch",
    device="cuda:0",
    tokens=512,
    seconds=0.5,
    starting_seconds=12,
    memory_bytes=2 * 10**9,
    verdict=Verdict(outcome=Outcome.ADMITTED, figures=FIGURES),
)


def test_speed_memory_and_every_figure_stand_beside_the_runs_limits() -> None:
    check = check_trial(lambda: GOOD)
    assert check.level is Level.OK
    assert check.sentence == (
        "The torch engine on cuda:0 drew 512 tokens at 1,024 a second, after 12 s to start, in 2.0 GB of memory. The "
        "reference verifier admits it: exponent mismatches 3 of 38, mantissa mean 0.5 of 10, token margin 0.1 of 1, "
        "logprob error 0.01 of 0.5."
    )


def test_a_figure_that_just_passes_is_a_warning_since_the_next_group_may_not() -> None:
    check = check_trial(lambda: structs.replace(GOOD, limits=LimitsSpec(token_margin=0.11)))
    assert check.level is Level.WARNING
    assert "Token margin is near its limit" in check.advice


def test_work_that_would_be_rejected_or_was_never_drawn_is_a_problem() -> None:
    rejected = Verdict(outcome=Outcome.REJECTED, reason=Reason.WRONG_TOKEN, detail="Row 3: token_margin is 4.2.")
    bad = [
        (structs.replace(GOOD, verdict=rejected), "does not admit it, wrong_token: Row 3: token_margin is 4.2."),
        (structs.replace(GOOD, verdict=Verdict(outcome=Outcome.INDETERMINATE)), "does not admit it"),
        (structs.replace(GOOD, failure="There is no memory for it.", verdict=None), "failed: There is no memory"),
    ]
    for trial, said in bad:
        check = check_trial(lambda trial=trial: trial)  # type: ignore[misc]
        assert check.level is Level.PROBLEM
        assert said in check.sentence
        assert check.advice


def test_an_engine_that_takes_its_process_down_is_a_problem_and_not_the_doctors_end() -> None:
    def die() -> Trial:
        raise NoAnswer("ended with: Segmentation fault")

    check = check_trial(die)
    assert check.level is Level.PROBLEM
    assert "The engine's process ended with: Segmentation fault" in check.sentence
