"""Refuse a run whose first policy or rules cannot work, before anything of it is signed, logged or trained."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from coordinator.errors import Uncalibrated, UnfitModel
from coordinator.run.chat import resolve_chat
from coordinator.run.definition import UNCALIBRATED, is_calibrated
from node.doctor.model import check_first_policy, check_fit, check_submission_size
from node.doctor.report import Check, Level
from node.policy.inspection import FirstPolicy
from node.protocol.run import RunSpec

log = logging.getLogger(__name__)


def startable(spec: RunSpec, *, model_elsewhere: bool, uncalibrated: bool) -> RunSpec:
    """Return the rules that a run begins with, the chat template of its model as data.

    Raises UnfitModel unless a run with these rules can begin; a folder on another machine is not looked at, but for a
    chat template that the rules name. Raises Uncalibrated for rules without levels, unless they may be `uncalibrated`.
    """
    if not uncalibrated and not is_calibrated(spec):
        raise Uncalibrated(UNCALIBRATED)
    _require([check_submission_size(spec), *([] if model_elsewhere else check_first_policy(spec))])
    return resolve_chat(spec)


def require_fit(policy: FirstPolicy, spec: RunSpec) -> None:
    """Raise UnfitModel if the run cannot begin with `policy`; warn where a trainer's memory is short."""
    _require(check_fit(policy, spec))


def _require(checks: Iterable[Check]) -> None:
    for check in checks:
        if check.level is Level.PROBLEM:
            raise UnfitModel(f"{check.sentence} {check.advice}")
        if check.level is Level.WARNING:
            log.warning("%s %s", check.sentence, check.advice)
