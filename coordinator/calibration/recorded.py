"""Which recordings a run's limits are fitted to.

A recording may be untrue: wide deviations would widen every limit, for the cheats of whoever sent them. So each is
judged as its node's slots would be, by limits that are fitted without it: to the operator's own work, and to the
recordings that the operator accepts by name. One that these reject or stop, or that would widen a limit of single
values by more than `fit.HEADROOM`, is left out until it is accepted, too. What others widen is shown. No recording
speaks for another, so that many keys gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.calibration.fit import HEADROOM, Group, single_value_limits
from coordinator.calibration.recording import ReadRecording
from coordinator.calibration.result import RecordedOutcome, outcome
from node.protocol.run import LimitsSpec, ProofSpec

FitLimits = Callable[[Sequence[Sequence[Group]]], LimitsSpec]
"""Fits limits to the groups of workers."""


def choose(
    own: Sequence[Sequence[Group]],
    recordings: Sequence[ReadRecording],
    accepted: Sequence[ReadRecording],
    *,
    fit: FitLimits,
    proofs: ProofSpec,
) -> tuple[list[Sequence[Group]], list[RecordedOutcome]]:
    """Return the groups of all workers that limits are fitted to, the operator's `own` first, and of each recorded
    worker what becomes of it, `accepted` ones first.
    """
    named = [groups for one in accepted for groups in one.workers.values()]
    taken, found = [*own, *named], []
    for each, base in ((accepted, own), (recordings, [*own, *named])):
        without = fit(base) if each else LimitsSpec()
        for one in each:
            outcomes = [_judge(one, name, base, without, fit=fit, proofs=proofs) for name in one.workers]
            is_accepted = each is accepted
            fitted = is_accepted or all(_is_within(outcome) for outcome in outcomes)
            found += [replace(outcome, accepted=is_accepted, fitted=fitted) for outcome in outcomes]
            taken += one.workers.values() if fitted and not is_accepted else ()
    return taken, found


def _is_within(found: RecordedOutcome) -> bool:
    return found.ratio <= HEADROOM and not found.judged.would_be_stopped


def _judge(
    recording: ReadRecording,
    name: str,
    base: Sequence[Sequence[Group]],
    without: LimitsSpec,
    *,
    fit: FitLimits,
    proofs: ProofSpec,
) -> RecordedOutcome:
    """Judge a worker by limits `without` it, which are fitted to `base`, and say what it would widen."""
    groups = recording.workers[name]
    widened = fit([*base, groups])
    ratio, limit = max((getattr(widened, each) / getattr(without, each), each) for each in single_value_limits(proofs))
    return RecordedOutcome(
        node=recording.node,
        machine=recording.recording.machine,
        judged=outcome(name, groups, without, second_looks=[]),
        widened=limit,
        ratio=ratio,
    )
