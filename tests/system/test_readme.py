"""What the README shows as code is run as it stands there: a reader's first attempt must not fail."""

from __future__ import annotations

import random
import re
import subprocess
import sys

from locations import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def run(code, folder):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_library_in_ten_lines_fetches_what_it_publishes(tmp_path):
    (code,) = (block for block in BLOCKS if "shardcast" in block)
    weights = random.Random(1).randbytes(200_000)
    (tmp_path / "model.safetensors").write_bytes(weights)
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / done.stdout.strip()).read_bytes() == weights


def test_the_library_needs_no_torch(tmp_path):
    (code,) = (block for block in BLOCKS if "shardcast" in block)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    code += "\nimport sys; print('torch' in sys.modules)\n"
    done = run(code, tmp_path)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
