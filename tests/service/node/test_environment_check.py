"""What an author hears of an environment that would make honest nodes differ, before a run does."""

from __future__ import annotations

import textwrap

import packages
import pytest

from node.environments.isolated.check import check
from node.environments.isolated.process import GUEST_PROGRAM
from node.environments.isolated.store import EnvironmentStore
from node.protocol.environment_spec import EnvironmentSpec

ENTRY = "[swarmproof.environments]\nprobe = probe:Probe\n"
CLASS = """
import os, time

class Probe:
    def problem(self, index):
        return {"prompt": f"{index}"}

    def reward(self, problem, completion):
        return 1.0
"""


@pytest.fixture
def findings(tmp_path):
    def found(code):
        store = EnvironmentStore(tmp_path)
        installed = packages.install(
            store, "probe", {"probe.py": CLASS + textwrap.indent(textwrap.dedent(code), "    ")}, entry_points=ENTRY
        )

        def command(variables):
            settings = [f"{name}={value}" for name, value in variables.items()]
            return ["/usr/bin/env", *settings, str(installed.python), "-P", "-s", "-B", "-u", str(GUEST_PROGRAM)]

        return check(command, EnvironmentSpec(name="probe"), problems=2)

    return found


def test_a_pure_function_has_no_findings(findings):
    assert findings("") == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ('def problem(self, index): return {"prompt": str(hash("a"))}', ("problem 0 is", "PYTHONHASHSEED=1", "a set")),
        ("def reward(self, problem, text): return time.localtime(0).tm_hour / 24", ("the reward of", "TZ=")),
        ("def reward(self, problem, text): return float(os.environ['OMP_NUM_THREADS'] == '1')", ("OMP_NUM_THREADS=2",)),
        (
            "def reply(self, problem, turns): return 'x' * 70_000\ndef reward_turns(self, problem, turns): return 0.0",
            ("48 questions failed", "70000 characters"),
        ),
        ("def reward(self, problem, text): return float(time.sleep(0.6 * (text == '')) or 0)", ("took more than",)),
        ("def reward(self, problem, text): text and os._exit(1)", ("questions failed", "ended unexpectedly")),
    ],
)  # fmt: skip
def test_what_would_differ_or_fail_is_named_with_what_to_change(findings, code, said):
    text = "\n".join(findings(code))
    assert all(part in text for part in said), text
