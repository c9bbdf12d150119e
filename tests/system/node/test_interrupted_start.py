"""Ctrl-C in the first moments of a command, while it imports: one line, not the middle of somebody's package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from locations import ROOT

# Interrupts itself when the named module is first looked for: a moment that no clock could name.
SCRIPT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = {argv!r}
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by who starts the tests in the background
from node.start import main
main()
"""
EVALUATE = ["swarmproof", "evaluate", "--run", os.devnull]


@pytest.mark.parametrize(("module", "argv"), [("aiohttp", ["swarmproof", "models"]), ("torch._C", EVALUATE)])
def test_an_interrupted_import_is_one_line(module: str, argv: list[str]) -> None:
    command = [sys.executable, "-c", SCRIPT.format(module=module, argv=argv)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "Interrupted.\n")
