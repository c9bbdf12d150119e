"""A trial of this machine's engine: one group drawn as a worker draws it, and measured by the reference verifier.

It runs in a process of its own (`node.commands.trial_process`), since an engine may take its process down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from node.doctor.report import Check, fine, problem, size, warning
from node.policy.child import NoAnswer
from node.protocol.admission import Figures, Outcome, Verdict
from node.protocol.run import LimitsSpec

SECONDS: Final = 1800.0
"""For a trial: an engine that compiles its kernels takes minutes to start."""
COMPARED: Final = (
    ("exponent_mismatches", "exponent_mismatches"),
    ("mantissa_mean", "mantissa_mean"),
    ("sketch_distance", "sketch_distance"),
    ("token_margin", "token_margin"),
    ("margin_mean", "rollout_margin_mean"),
    ("logprob_error", "logprob_error"),
)
"""Figures that a person is shown, and what each is compared with in the run's limits."""
NARROW: Final = 0.8
"""Share of a limit from which a figure deserves a word: the next group's may be over it."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial measured; with `failure`, a sentence for people, nothing else counts.

    Of `tokens` drawn in `seconds`, once the engine was warm; `starting_seconds` before that. `memory_bytes` is the
    largest that the process and those that it started took. `verdict` is the reference's, by the run's `limits`.
    """

    engine: str
    device: str
    failure: str = ""
    tokens: int = 0
    seconds: float = 0.0
    starting_seconds: float = 0.0
    memory_bytes: int = 0
    verdict: Verdict | None = None
    limits: LimitsSpec = LimitsSpec()


def check_trial(run: Callable[[], Trial]) -> Check:
    """Run a trial and say what its result means for whoever wants to contribute."""
    try:
        found = run()
    except NoAnswer as error:
        return problem("trial", f"The engine's process {error}", advice="See its log above; or take another --engine.")
    where = f"The {found.engine} engine" + ("" if found.device == "auto" else f" on {found.device}")
    if found.failure or found.verdict is None:
        return problem("trial", f"{where} failed: {found.failure}", advice="See that this is mended before joining.")
    speed = (
        f"{where} drew {found.tokens} tokens at {found.tokens / max(found.seconds, 1e-9):,.0f} a second, after "
        f"{found.starting_seconds:.0f} s to start, in {size(found.memory_bytes)} of memory. "
    )
    return _judged(found.verdict, found.limits, speed)


def _judged(verdict: Verdict, limits: LimitsSpec, speed: str) -> Check:
    if verdict.outcome is not Outcome.ADMITTED or verdict.figures is None:
        why = f"{verdict.reason}: {verdict.detail}" if verdict.reason else "no reason was given"
        return problem(
            "trial",
            f"{speed}The reference verifier does not admit it, {why}",
            advice="The run would reject this machine's work: take the run's dtype and another --engine, or ask the "
            "run's operator to calibrate with this kind of machine.",
        )
    measured = _compared(verdict.figures, limits)
    said = f"{speed}The reference verifier admits it: " + ", ".join(
        f"{name.replace('_', ' ')} {value:.3g} of {limit:.3g}" for name, value, limit in measured
    )
    narrow = [name for name, value, limit in measured if value > NARROW * limit]
    if narrow:
        return warning(
            "trial",
            f"{said}.",
            advice=f"{narrow[0].replace('_', ' ').capitalize()} is near its limit, so that now and then a group may "
            "be rejected: ask the run's operator to calibrate with this kind of machine.",
        )
    return fine("trial", f"{said}.")


def _compared(figures: Figures, limits: LimitsSpec) -> list[tuple[str, float, float]]:
    """Return name, value and limit of each figure that the run's scheme has."""
    pairs = [(name, getattr(figures, name), getattr(limits, limit)) for name, limit in COMPARED]
    return [(name, value, limit) for name, value, limit in pairs if value > 0 or name == "token_margin"]
