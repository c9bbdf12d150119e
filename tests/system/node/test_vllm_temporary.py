"""The temporary folder of one engine: a worker that restarts for weeks must not fill the machine's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from node.engines.vllm_temporary import TemporaryFolder

KILLED = (
    "import os; from node.engines.vllm_temporary import TemporaryFolder; TemporaryFolder(); os.kill(os.getpid(), 9)"
)


@pytest.fixture
def base(monkeypatch):
    """A temporary folder with a short name, as a machine's is."""
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_a_temporary_folder_with_a_long_name_does_not_keep_vllm_from_starting(base, monkeypatch):
    """Clusters give each job one; a Unix socket's path has 107 bytes at most."""
    deep = base / ("job-" * 12)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = TemporaryFolder()
    try:
        assert len(bytes(folder.path / ("x" * 36))) <= 107
    finally:
        folder.remove()


def test_what_a_killed_process_left_is_swept_at_the_next_start_and_what_is_in_use_is_not(base):
    bystander = base / "swarmproof-run"
    bystander.mkdir()
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    (left,) = set(base.iterdir()) - {bystander}
    (left / "socket").touch()
    first, second = TemporaryFolder(), TemporaryFolder()
    assert set(base.iterdir()) == {bystander, first.path, second.path}
    (first.path / "deep").mkdir()
    first.remove()
    second.remove()
    assert list(base.iterdir()) == [bystander]


def test_links_that_another_user_planted_are_not_followed(base, tmp_path_factory):
    """Everybody may write into the temporary folder: a link there must not have our files removed or written over."""
    ours = tmp_path_factory.mktemp("ours")
    (ours / "key").write_text("secret")
    (base / ".swarmproof-planted0").symlink_to(ours)
    planted = base / ".swarmproof-planted1"
    planted.mkdir()
    for name in ("lock", "key"):
        (planted / name).symlink_to(ours / "key")
    TemporaryFolder().remove()
    assert not planted.exists()
    assert (ours / "key").read_text() == "secret"


def test_processes_started_meanwhile_use_it_and_no_others(base, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = dict(os.environ)
    folder = TemporaryFolder()
    with folder.in_use():
        said = subprocess.check_output([sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"])
        assert Path(os.environ["VLLM_RPC_BASE_PATH"]) == folder.path
        assert not Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(folder.path), "compiled anew each time"
        assert tempfile.gettempdir() == str(base)
    assert Path(os.fsdecode(said).strip()) == folder.path
    assert dict(os.environ) == before
    folder.remove()


def test_where_sockets_go_is_the_contributors_to_say(base, tmp_path_factory, monkeypatch):
    chosen = tmp_path_factory.mktemp("chosen")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(chosen))
    folder = TemporaryFolder()
    assert folder.path.parent == chosen
    with folder.in_use():
        assert os.environ["VLLM_RPC_BASE_PATH"] == str(folder.path)
    assert os.environ["VLLM_RPC_BASE_PATH"] == str(chosen)
    folder.remove()
