"""The rules by which calibration's cheats sample: one that is not what it is named after fits the wrong limits."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import problem

from coordinator.calibration.cheats import greedy, nucleus, runner_up, tempered
from node.sampling.forced import choose


def test_a_rule_picks_the_same_whatever_is_picked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of an engine over a vocabulary of 262,144 would take gigabytes together."""
    logits, seeds, positions = problem(7, 50)
    rules = [greedy(), tempered(0.5), nucleus(0.9), runner_up(0.5)]
    whole = [rule(logits, seeds, positions, temperature=0.7) for rule in rules]
    monkeypatch.setattr("coordinator.calibration.cheats.MAX_PICKED", 100)
    for rule, expected in zip(rules, whole, strict=True):
        found = rule(logits, seeds, positions, temperature=0.7)
        assert found.tokens.equal(expected.tokens)
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_a_rule_that_takes_the_runs_temperature_picks_what_is_forced() -> None:
    logits, seeds, positions = problem(7, 50)
    forced = choose(logits, seeds, positions, temperature=0.7)
    assert tempered(1.0)(logits, seeds, positions, temperature=0.7).tokens.equal(forced.tokens)
    assert not greedy()(logits, seeds, positions, temperature=0.7).tokens.equal(forced.tokens)
