"""The rules of a red team's run: the demonstration's, with leases that end soon; and a run that checks next to nothing.

The second one is for measuring what the first is worth. It needs no switch: limits that are wide enough admit anything.
"""

from __future__ import annotations

from coordinator.lab.processes.layout import demo_run_toml

LEASE_SECONDS = 20.0
PROBATION = 4
"""Short, so that attackers who wait for its end do it often."""

_WIDE_OPEN = {
    "exponent_mismatches": 1e9,
    "mantissa_mean": 1e9,
    "mantissa_median": 1e9,
    "token_margin": 1e9,
    "rollout_margin_mean": 1e9,
    "logprob_error": 1e9,
    "sketch_distance": 1e9,
}
_NOTHING_IS_FAR = """
[limits.honest.far]
mean = 1.0
variance = 1.0
largest = 2.0
"""


def redteam_run_toml(*, steps: int, seed: int, wide_open: bool = False, floor: float = 1.0) -> str:
    """Return the red team's run.toml; with `wide_open`, with limits that no figure exceeds.

    `floor` is the least share of a proven node's slots that is measured in full.
    """
    limits = _WIDE_OPEN if wide_open else {}
    text = demo_run_toml(name='"redteam"', steps=steps, seed=seed, lease_seconds=LEASE_SECONDS, **limits)
    text += f"\n[standing]\nprobation = {PROBATION}\nfull_rate_floor = {floor}\n"
    if not wide_open:
        return text
    alone = "max_submission_bytes"
    return text.replace(alone, f"suspects = []\nsecond_looks = 0.0\n{alone}") + _NOTHING_IS_FAR
