"""The benchmark of proofs, without the peer that it compares with and with another package in the peer's place.

What would break for whom: whoever has no compiler or no network gets no figures at all; or a ratio is printed that
compares this package with itself, with null proofs, or with another version.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import sysconfig
import venv

import pytest
import torch
from locations import ROOT

from benchmarks.peers import PeerUnavailable
from benchmarks.toploc import PEER_KEYS, beyond_published_limits
from benchmarks.toploc_peer import VERSION, Peer, installed


@pytest.fixture
def interpreter(tmp_path):
    """Makes an environment with this torch and, as toploc of a given version, a package."""

    def make(package, version=VERSION):
        folder = tmp_path / "environment"
        venv.create(folder, with_pip=False, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
        (packages / "toploc").symlink_to(package)
        about = packages / f"toploc-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toploc\nVersion: {version}\n")
        return folder / "bin" / "python"

    return make


def run(*options):
    command = [sys.executable, "-m", "benchmarks.toploc", "--json", "--rounds", "1", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = json.loads(ended.stdout.splitlines()[-1])
    assert line["benchmark"] == "toploc"
    return line["figures"], line["notes"]


def test_without_the_peer_its_figures_are_null_with_the_reason_and_the_others_are_measured():
    figures, notes = run("--no-peer")
    assert [figures.pop(key) for key in PEER_KEYS] == [None] * len(PEER_KEYS)
    assert all(notes[key] == "not asked for (--no-peer)" for key in PEER_KEYS)
    assert all(math.isfinite(figure) for figure in figures.values())
    assert figures["build_over_bare_topk"] >= figures["build_over_bare_topk_h5120"] > 0
    assert figures["verify_ms_per_chunk_h5120"] > 0
    assert figures["honest_chunks"] == 256
    assert figures["honest_chunks_rejected"] == 0


def test_with_a_peer_every_ratio_is_measured(interpreter):
    """This project's own package in the peer's place, which rejects no honest chunk."""
    figures, notes = run("--peer-python", str(interpreter(ROOT / "toploc")))
    assert all(math.isfinite(figure) for figure in figures.values())
    assert figures["build_speedup_vs_peer"] == min(figures[f"build_speedup_vs_peer_h{size}"] for size in (4096, 5120))
    assert figures["honest_chunks_rejected_peer"] == 0
    assert notes["peer"] == f"toploc {VERSION}, torch {torch.__version__}"


def test_another_version_is_not_taken_for_the_peer(interpreter):
    python = interpreter(ROOT / "toploc", version="0.1.5")
    with pytest.raises(PeerUnavailable, match=r"has toploc 0\.1\.5 and torch"):
        Peer(python, threads=1)


def test_null_proofs_are_not_timed(interpreter, tmp_path):
    """The peer's answer to any error, and faster than a proof."""
    package = tmp_path / "null"
    package.mkdir()
    (package / "__init__.py").write_text("def build_proofs_bytes(*_, **__): return [bytes(258)]")
    peer = Peer(interpreter(package), threads=1)
    try:
        with pytest.raises(PeerUnavailable, match="ended with exit status 1"):
            peer.load(torch.zeros(32, 64, dtype=torch.bfloat16), tokens=32, topk=128)
    finally:
        peer.close()


def test_no_compiler_is_a_reason_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(PeerUnavailable, match="needs the C\\+\\+ compiler no-such-compiler"):
        installed(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("result", "rejected"),
    [((38, 10.0, 8.0), False), ((39, 0.0, 0.0), True), ((0, 10.1, 0.0), True), ((0, 0, 9), True)],
)
def test_the_published_limits_are_the_last_that_pass(result, rejected):
    assert beyond_published_limits(result) is rejected
