"""What a command loads before it does anything: ten processes on a small machine wait for it ten times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from locations import ROOT
from ports import free_port
from run_files import small_run_toml
from waiting import until

from node.keys.identity import create_key
from node.sampling import cpu

# What `swarmproof worker --engine torch` has imported once it works.
WORKER = """
import gc, json, sys, node.cli
from node.commands.engine_options import import_models
import_models()
from node.engines.torch import TorchEngine
from node.sampling import cpu
from node.worker.daemon import run_worker

unused = {"accelerate", "datasets", "matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "torchvision", "vllm"}
print(json.dumps({
    "unused": sorted(unused & sys.modules.keys()),
    "kernels_from_disk": sum(cpu._rows.stats.cache_hits.values()),
    "collects": gc.isenabled(),
    "left_out": gc.get_freeze_count(),
    "searches": gc.get_stats()[2]["collections"],
}))
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what numba compiles."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    return tmp_path


def compiled_again() -> int:
    """Do what the next process's import of the kernels does; give how many of them it found on disk."""
    rows = cpu._compiled(cpu._rows.py_func)
    return sum(rows.stats.cache_hits.values())


def test_a_worker_finds_its_kernels_and_searches_no_modules_for_garbage(kept: Path) -> None:
    """Compiling took every worker, verifier and auditor two seconds of a processor, and the searches another one."""
    assert compiled_again() == 0
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        env=os.environ | {"NUMBA_CACHE_DIR": str(kept)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(done.stdout)
    assert (found["unused"], found["kernels_from_disk"], found["collects"]) == ([], 1, True)
    assert found["left_out"] > 100_000
    assert found["searches"] < 15
    assert done.stderr == "", "extension modules say at the end what is left over"


def test_kernels_that_a_crash_cut_short_are_compiled_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose machine lost its power would otherwise not start until somebody finds the file."""
    assert compiled_again() == 0
    assert compiled_again() == 1
    for path in kept.rglob("*.nb?"):
        path.write_bytes(b"")
    logits, words, where = torch.arange(6.0).reshape(1, 6), np.zeros((1, 4), np.uint32), np.zeros(1, np.uint32)
    wanted = cpu.peaks(logits, words, where, 1.0)
    monkeypatch.setattr(cpu, "_rows", cpu._compiled(cpu._rows.py_func))
    assert cpu.peaks(logits, words, where, 1.0) == wanted


def test_kernels_are_compiled_where_nothing_can_be_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service whose whole disk is read-only must work all the same."""
    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    assert compiled_again() == 0
    assert [path for path in kept.rglob("*") if path.is_file()] == []


def refused(**_: object) -> None:
    raise OSError(30, "Read-only file system")


def test_a_coordinator_and_a_relay_load_no_model_library(tmp_path: Path) -> None:
    """They compute nothing with a model, and would take half a gigabyte each for it."""
    (tmp_path / "run.toml").write_text(small_run_toml("start", steps=1, groups_per_step=1))
    create_key(tmp_path / "run.key")
    run = ("--run", str(tmp_path / "run.toml"), "--key", str(tmp_path / "run.key"), "--data", str(tmp_path / "data"))
    run += ("--uncalibrated",)
    with started(tmp_path / "coordinator.log", "coordinator", *run, "--port", "0") as (coordinator, said):
        words = until(lambda: "swarmproof worker" in said() and said().split(), what=said)
        where = ("--coordinator", words[words.index("at") + 1].rstrip(";"), "--run-id", words[words.index("id") + 1])
        own = ("--state", str(tmp_path / "relay"), "--port", str(free_port()))
        with started(tmp_path / "relay.log", "relay", *where, *own) as (relay, relay_said):
            until(lambda: "relaying run" in relay_said(), what=relay_said)
            for process in (coordinator, relay):
                loaded = Path(f"/proc/{process.pid}/maps").read_text()
                assert "/cryptography/" in loaded
                # Not all of torch/: vLLM names its OpenMP in LD_PRELOAD, for every process that a test starts later.
                libraries = ("/libtorch", "/llvmlite/", "/tokenizers/", "/pyarrow/")
                assert [name for name in libraries if name in loaded] == []


@contextmanager
def started(log: Path, *command: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """A command of swarmproof as a process, and what it has said."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "node.cli", *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process, log.read_text
    finally:
        process.kill()
        process.wait()
