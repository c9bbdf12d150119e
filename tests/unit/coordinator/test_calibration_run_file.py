"""The operator's run.toml comes back with limits in it, and with everything else as it was."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.calibration.write_limits import calibrated_text
from coordinator.errors import BadConfiguration
from node.protocol.run import HonestSpec, LevelSpec, parse_run_toml

LEVEL = LevelSpec(mean=-0.25, variance=0.01, largest=1.5, shared_variance=2e-7)
PLAIN = """\
# Why this run is as it is.
name = "mine"   # ours, really

[[environments]]
name = "arithmetic"   # digits come later

[proofs]
scheme = "sketch/1"   # four bytes

[limits]   # guesses
token_margin = 0.7   # a guess
# the end of limits

[training]
steps = 10   # few
"""
BARE = """\
name = "mine"
[[environments]]
name = "arithmetic"
"""
INLINE = """\
name = "mine"
environments = [{name = "arithmetic"}]
limits = {token_margin = 0.7, honest = {margin = {mean = 0.0, variance = 1.0, largest = 1.0}}}
[training]
steps = 3
"""
DOTTED = """\
name = "mine"
limits.token_margin = 0.7
limits.honest.sketch.mean = 0.0
limits.honest.sketch.variance = 1.0
limits.honest.sketch.largest = 3.0
[[environments]]
name = "arithmetic"
"""
SCATTERED = """\
name = "mine"
[limits.honest.margin]
mean = 0.0
variance = 1.0
largest = 1.0
[[environments]]
name = "arithmetic"
[limits]
token_margin = 0.7
[proofs]
top_k = 64
"""


def found(text, **honest):
    spec = parse_run_toml(text)
    limits = msgspec.structs.replace(
        spec.limits, token_margin=1e-3, logprob_error=2.5e-7, mantissa_mean=1.8, honest=HonestSpec(**honest)
    )
    proofs = msgspec.structs.replace(spec.proofs, sketch_step=0.0061)
    return msgspec.structs.replace(spec, limits=limits, proofs=proofs)


@pytest.mark.parametrize("text", [PLAIN, BARE], ids=["plain", "bare"])
def test_the_file_says_what_was_found(text):
    spec = found(text, sketch=LEVEL, margin=LEVEL)
    assert parse_run_toml(calibrated_text(text, spec, remarks=["By nobody."])) == spec


@pytest.mark.parametrize("text", [INLINE, DOTTED, SCATTERED], ids=["inline", "dotted", "scattered"])
def test_a_file_of_another_style_says_what_was_found_or_is_refused(text):
    """Never a file that says something else."""
    spec = found(text, sketch=LEVEL)
    try:
        written = calibrated_text(text, spec, remarks=["By nobody."])
    except BadConfiguration as error:
        assert "tables of their own" in str(error)
    else:
        assert parse_run_toml(written) == spec


def test_the_operators_lines_and_remarks_stay_in_their_order():
    written = calibrated_text(PLAIN, found(PLAIN, sketch=LEVEL), remarks=["By nobody."]).splitlines()
    changed = "token_margin = 0.7   # a guess"
    kept = [line for line in PLAIN.splitlines() if line and line != changed]
    places = [written.index(line) for line in kept]
    assert places == sorted(places)
    assert "token_margin = 0.001   # a guess" in written


def test_what_was_not_sought_is_not_written():
    written = calibrated_text(PLAIN, found(PLAIN, sketch=LEVEL), remarks=[])
    assert "max_submission_bytes" not in written
    assert "exponent_mismatches" not in written


def test_a_calibrated_file_is_calibrated_again_without_a_trace_of_the_first_time():
    first = calibrated_text(PLAIN, found(PLAIN, sketch=LEVEL, margin=LEVEL), remarks=["The first time."])
    spec = found(first, sketch=msgspec.structs.replace(LEVEL, mean=0.5))
    second = calibrated_text(first, spec, remarks=["The second time."])
    assert parse_run_toml(second) == spec
    assert "The first time." not in second
    assert second.count("The second time.") == 1
    assert calibrated_text(second, spec, remarks=["The second time."]) == second


def test_the_remarks_stand_above_the_levels():
    written = calibrated_text(PLAIN, found(PLAIN, sketch=LEVEL), remarks=["By nobody.", "On no day."]).splitlines()
    place = written.index("[limits.honest]")
    assert written[place + 1 : place + 3] == ["# By nobody.", "# On no day."]
    assert written.index("[limits.honest.sketch]") > place
