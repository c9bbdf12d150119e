"""A worker of a run with an environment that it lacks: told how to get it, and given nothing unasked."""

from __future__ import annotations

import logging

import packages
import pytest

from node.environments import EnvironmentFault, load_environments, missing_environments
from node.environments.isolated.store import VARIABLE, EnvironmentStore
from node.protocol.environment_spec import EnvironmentSpec
from node.protocol.run import RunSpec
from node.worker.environments import prepare_environments

ENTRY = "[swarmproof.environments]\nlargest = largest:Largest\n"
FILES = {"largest.py": "class Largest:\n    problem = reward = lambda *_: 1.0\n"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's rules with a packaged environment, and its lock as this node fetched it; nothing is installed here."""
    operator = EnvironmentStore(tmp_path / "operator")
    lock = packages.install(operator, "largest", FILES, entry_points=ENTRY).lock
    monkeypatch.setenv(VARIABLE, str(tmp_path / "worker"))
    file = tmp_path / "lock"
    file.write_bytes(lock.encode())
    packaged = EnvironmentSpec(name="largest", package=lock.package)
    spec = RunSpec(name="t", environments=(EnvironmentSpec(name="arithmetic"), packaged))
    return spec, {lock.file.digest: file}


def test_it_works_on_what_it_has_and_is_told_the_command(run, caplog):
    spec, files = run
    with caplog.at_level(logging.WARNING):
        prepare_environments(spec, files, may_install=False)
    (file,) = files.values()
    assert f"swarmproof env install --lock {file}" in caplog.text
    assert missing_environments(load_environments(spec, some=True)) == (1,)
    with pytest.raises(EnvironmentFault, match="not installed here"):
        load_environments(spec)


def test_one_that_could_do_nothing_does_not_start(run):
    spec, files = run
    with pytest.raises(EnvironmentFault, match="none of the run's environments"):
        prepare_environments(RunSpec(name="t", environments=spec.environments[1:]), files, may_install=False)


@pytest.mark.system
def test_with_leave_it_installs_exactly_what_the_lock_says(run, tmp_path, monkeypatch):
    """Another wheel of the same name and version, on an index that somebody else controls, is refused."""
    spec, files = run
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for folder, content in (("evil", {"largest.py": "import os\n"}), ("good", FILES)):
        (tmp_path / folder).mkdir()
        packages.wheel(tmp_path / folder, "largest", content, entry_points=ENTRY)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "evil"))
    with pytest.raises(EnvironmentFault, match=r"the files of largest==1\.0 differ") as fault:
        prepare_environments(spec, files, may_install=True)
    assert fault.value.code == "other_lock"
    assert EnvironmentStore.default().installed() == []
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "good"))
    prepare_environments(spec, files, may_install=True)
    (installed,) = EnvironmentStore.default().installed()
    assert installed.lock.package == spec.environments[1].package
