"""Shell completion as the shells ask for it: importing nothing heavy, which a key press would wait for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from locations import ROOT

from node import cli
from node.commands.completion import VARIABLE


@pytest.fixture
def program(tmp_path):
    """`swarmproof` in a folder of its own, on the PATH."""
    path = tmp_path / "bin" / "swarmproof"
    path.parent.mkdir()
    start = 'from node.cli import main; main(prog_name="swarmproof")'
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{start}' \"$@\"\n")
    path.chmod(0o755)
    return {**os.environ, "PATH": f"{path.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}


def script(shell):
    result = CliRunner().invoke(cli.main, ["completion", shell], prog_name="swarmproof")
    assert result.exit_code == 0, result.output
    return result.output


COMPLETE_IN_BASH = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_swarmproof_completion swarmproof
printf '%s\\n' "${COMPREPLY[@]}"
complete -p swarmproof >&2
"""


@pytest.mark.parametrize(
    ("words", "found", "missing"),
    [
        (("wor",), {"worker"}, {"relay"}),
        (("",), {"worker", "status", "doctor", "completion", "coordinator"}, set()),
        (("worker", "--engine", ""), {"torch", "vllm"}, set()),
        (("worker", "--pub"), {"--public-url"}, {"--slots"}),
        (("keys", "n"), {"new"}, {"show"}),
        (("completion", ""), {"bash", "zsh", "fish"}, set()),
    ],
    ids=lambda values: " ".join(sorted(values) if isinstance(values, set) else values),
)
def test_bash_completes(tmp_path, program, words, found, missing):
    (tmp_path / "completion").write_text(script("bash"))
    # `compopt` works only inside a completion that a key press began; values of this test need none.
    command = ["bash", "-c", COMPLETE_IN_BASH, "bash", str(tmp_path / "completion"), "swarmproof", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=program, timeout=60, check=True)
    offered = set(done.stdout.split())
    assert found <= offered, done.stderr
    assert not missing & offered
    assert "-F _swarmproof_completion swarmproof" in done.stderr


@pytest.mark.parametrize(
    ("shell", "words", "expected"),
    [
        ("zsh", "swarmproof sta", "status"),
        ("fish", "swarmproof sta", "status"),
        ("bash", "swarmproof sta", "status"),
    ],
)
def test_the_shells_questions_are_answered(program, shell, words, expected):
    """By the protocol that the printed scripts use, for shells that are not installed here."""
    asked = {VARIABLE: f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": "sta" if shell == "fish" else "1"}
    done = subprocess.run(["swarmproof"], capture_output=True, text=True, env=program | asked, timeout=60, check=True)
    assert expected in done.stdout
    assert done.stderr == ""
    assert VARIABLE in script(shell)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_is_one_that_the_shell_reads(tmp_path, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script(shell))
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=60)


IMPORTED = """
import os, sys
os.environ.update(_SWARMPROOF_COMPLETE="bash_complete", COMP_WORDS="swarmproof {words}", COMP_CWORD="{at}")
from node.cli import main
try:
    main([], prog_name="swarmproof")
except SystemExit:
    pass
print([name for name in ("torch", "transformers", "vllm", "numba", "pyarrow", "fastapi") if name in sys.modules])
"""


@pytest.mark.parametrize(("words", "at"), [("wor", 1), ("worker --", 2), ("coordinator --", 2)])
def test_completing_imports_nothing_heavy(words, at):
    command = [sys.executable, "-c", IMPORTED.format(words=words, at=at)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout
    assert len(done.stdout.splitlines()) > 1, "nothing was completed"
