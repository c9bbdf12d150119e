"""Every fuzz target for a moment, and that a campaign notices what it is there to notice.

What would break for whom: an operator whose process a stranger's bytes can end, hang or fill; and whoever trusts the
zeros of `python -m benchmarks.fuzz`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack

import pytest
from locations import ROOT

from benchmarks.fuzzing.campaign import run_target
from benchmarks.fuzzing.target import Kind, attempt
from benchmarks.fuzzing.targets import AREAS, all_targets, find
from benchmarks.fuzzing.worker import Fuzzer

INPUTS = 150
TARGETS = [target.name for target in all_targets()]


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_bytes_end_in_a_typed_error_within_the_budget(name):
    target = find(name)
    with ExitStack() as stack:
        fuzzer = Fuzzer(target, target.prepare(stack), seed="test")
        stack.callback(fuzzer.close)
        fuzzer.begin()
        found = [one for number in range(INPUTS) for one in fuzzer.feed(fuzzer.make(number))]
    assert not found
    assert fuzzer.tally.inputs == INPUTS


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_what_honest_peers_send_and_makes_something_else_of_it(name):
    """A target that refuses everything, or tries one input over and over, finds nothing for ever."""
    target = find(name)
    with ExitStack() as stack:
        harness = target.prepare(stack)
        fuzzer = Fuzzer(target, harness, seed="test")
        stack.callback(fuzzer.close)
        fuzzer.begin()
        made = {fuzzer.make(number) for number in range(50)}
        again = [fuzzer.make(number) for number in range(3)]
        assert again == [fuzzer.make(number) for number in range(3)], "a seed does not repeat a campaign"
        assert len(made - set(harness.seeds)) > 25
        assert all(attempt(harness, seed).kind is Kind.ACCEPTED for seed in harness.seeds[:2])


def test_each_area_has_targets_and_each_name_is_one():
    assert {name.partition(".")[0] for name in TARGETS} == set(AREAS)
    assert len(set(TARGETS)) == len(TARGETS)
    with pytest.raises(KeyError):
        find("nothing.of_the_kind")


# What a campaign must notice.


@pytest.mark.parametrize(
    ("name", "kind", "detail"),
    [
        ("untyped", "crash", "KeyError"),
        ("lenient", "crash", "it encodes to other bytes"),
        ("segfault", "crash", "SIGSEGV"),
        ("endless", "hang", "did not end"),
        ("slow", "over_budget", "ms of processor time"),
        ("greedy", "over_budget", "MiB of memory"),
    ],
)
def test_a_broken_parser_is_noticed_and_the_campaign_goes_on_to_its_end(name, kind, detail, monkeypatch):
    monkeypatch.setattr("benchmarks.fuzzing.campaign.WALL_OVER_CPU", 8.0)
    monkeypatch.setattr("benchmarks.fuzzing.campaign.MAX_DEATHS", 2)
    result = run_target(find(f"broken.{name}"), 200, seed="7")
    assert result.count(kind) >= 1
    assert {one.kind for one in result.found} == {kind}
    assert all(detail in one.detail for one in result.found)
    assert result.deaths == 2 or result.inputs == 200
    if name != "lenient":
        assert all(b"!" in one.data for one in result.found), "blamed on another input"


def test_the_benchmark_prints_its_figures_and_keeps_what_it_found(tmp_path):
    arguments = ["--json", "--inputs", "60", "--seed", "1", "--save", str(tmp_path), "--target", "messages.lease"]
    command = [sys.executable, "-m", "benchmarks.fuzz", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = json.loads(ended.stdout.splitlines()[-1])
    assert line["benchmark"] == "fuzz"
    figures = line["figures"]
    assert figures["inputs"] >= 60
    assert (figures["crashes"], figures["hangs"], figures["over_budget"]) == (0, 0, 0)
    assert figures["inputs_messages.lease_request"] == figures["inputs_messages.lease_reply"] == 30
    assert line["notes"]["seed"] == "1"
    assert not list(tmp_path.iterdir())
