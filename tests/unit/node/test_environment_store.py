"""What is installed for an environment: named by its content, so that two nodes know whether they have the same."""

from __future__ import annotations

import json

import packages
import pytest
from click.testing import CliRunner

from node.cli import main
from node.environments.base import EnvironmentFault
from node.environments.isolated.install import install_package
from node.environments.isolated.lock import changed_files, lock_of, read_lock
from node.environments.isolated.offers import offers
from node.environments.isolated.store import VARIABLE, EnvironmentStore, differences
from node.protocol.environment_spec import MAX_LOCK_BYTES, FileSpec, PackageSpec

ENTRY = "[swarmproof.environments]\nlargest = largest:Largest\n[console_scripts]\nx = largest:main\n"


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "store"))
    return EnvironmentStore(tmp_path / "store")


@pytest.fixture
def largest(store):
    return packages.install(store, "largest", {"largest.py": "x = 1\n"}, entry_points=ENTRY)


def lock_after(folder, **changes):
    packages.distribution(folder, "largest", {"largest.py": "x = 1\n"}, entry_points=ENTRY, **changes)
    return lock_of(folder, python="3.11", name="largest")


def test_another_file_is_another_lock_and_what_only_says_how_it_came_here_is_not(tmp_path):
    lock = lock_after(tmp_path / "a")
    packages.distribution(tmp_path / "b", "largest", {"largest.py": "x = 2\n"}, entry_points=ENTRY)
    other = lock_of(tmp_path / "b", python="3.11", name="largest")
    assert differences(lock, other) == ["the files of largest==1.0 differ"]
    same = tmp_path / "c"
    packages.distribution(same, "largest", {"largest.py": "x = 1\n"}, entry_points=ENTRY)
    info = same / "largest-1.0.dist-info"
    record = (info / "RECORD").read_text()
    for path in ("INSTALLER", "direct_url.json", "REQUESTED"):
        record += f"largest-1.0.dist-info/{path},sha256=aaaa,1\n"
    (info / "RECORD").write_text(record + "__pycache__/largest.cpython-311.pyc,,\n")
    assert lock_of(same, python="3.11", name="largest") == lock


def test_what_has_machine_code_is_bound_by_its_version_since_its_files_differ_between_platforms(tmp_path):
    for folder, content in (("a", "for x86"), ("b", "for arm")):
        lock_after(tmp_path / folder)
        packages.distribution(tmp_path / folder, "numpy", {"numpy/core.so": content}, version="2.3.1", pure=False)
    locks = [lock_of(tmp_path / folder, python="3.11", name="largest") for folder in "ab"]
    assert locks[0] == locks[1]
    assert "native numpy==2.3.1" in locks[0].encode().decode()
    packages.distribution(tmp_path / "b", "pip", {"pip.py": ""})
    assert differences(locks[0], lock_of(tmp_path / "b", python="3.12", name="largest")) == [
        "Python 3.12 instead of 3.11",
        "pip is not in the lock",
    ]


def test_a_lock_reads_back_and_nothing_else_is_one(tmp_path):
    text = lock_after(tmp_path).encode()
    assert read_lock(text).encode() == text
    head, python, package, held, _ = text.decode().split("\n")
    upto = f"{head}\n{python}\n"
    broken = [
        text[:-1],
        text + b"\n",
        text.replace(b"\n", b"\r\n"),
        text.replace(b"environment 1", b"environment 2"),
        text.replace(b"python 3.11", b"python 2.7"),
        b"",
        b"\xff" * 100,
        b"a" * 1_000_000,
        f"{upto}{package}\n".encode(),
        f"{upto}other==1.0\n{held}\n".encode(),
        f"{upto}{package}\n{held}\n{held}\n".encode(),
        f"{upto}{package}\n{held}\nnative a==1\x00\n".encode(),
        f"{upto}{package}\n{held}\nnative -r==1\n".encode(),
        f"{upto}{package}\n{held}\nnative a==--index-url\n".encode(),
        "\n".join([head, python, package, held, *(f"native n{i}==1" for i in range(100_000)), ""]).encode(),
    ]
    for number, each in enumerate(broken):
        with pytest.raises(EnvironmentFault) as fault:
            read_lock(each)
        assert fault.value.code == "bad_lock", number


def test_an_environment_is_found_by_what_the_run_names_and_no_longer_after_a_change(store, largest):
    found = store.find(largest.lock.package)
    assert found == largest
    packages.distribution(found.site_packages, "later", {"later.py": ""})
    with pytest.raises(EnvironmentFault, match="later is not in the lock") as fault:
        store.find(largest.lock.package)
    assert fault.value.code == "environment_changed"
    store.remove(found)
    with pytest.raises(EnvironmentFault, match=r"largest 1\.0 .* is not installed here") as fault:
        store.find(largest.lock.package)
    assert fault.value.code == "not_installed"


def test_a_file_that_was_edited_in_place_is_seen_by_a_check(largest):
    assert changed_files(largest.site_packages) == []
    (largest.site_packages / "largest.py").write_text("x = 3\n")
    assert changed_files(largest.site_packages) == ["largest.py"]


def test_an_installation_that_no_lock_can_describe_is_refused_and_not_found_later(tmp_path):
    packages.distribution(tmp_path / "a", "largest", {}, version="1.0_beta")
    lock_after(tmp_path / "b")
    (record,) = (tmp_path / "b").glob("*.dist-info/RECORD")
    record.write_text("one column\n")
    for folder in ("a", "b"):
        with pytest.raises(EnvironmentFault) as fault:
            lock_of(tmp_path / folder, python="3.11", name="largest")
        assert fault.value.code == "bad_lock"


def test_a_package_offers_its_entry_points_or_its_modules_for_verifiers(store, largest):
    assert offers(largest) == ["largest"]
    wordle = packages.install(store, "prime-wordle", {"wordle/__init__.py": ""}, requires=("verifiers>=0.1.14", "nltk"))
    assert offers(wordle) == ["verifiers:wordle"]


def test_a_requirement_cannot_pass_for_an_option_of_pip(store):
    for name in ("--index-url=http://evil", "-r", "largest @ http://evil/x.whl", "largest; echo", "largest==1 --pre"):
        with pytest.raises(EnvironmentFault) as fault:
            install_package(store, name)
        assert fault.value.code == "install_failed", name
    assert not store.folder.exists(), "pip was not even started"


def test_the_commands_say_what_is_here_and_how_a_run_names_it(store, largest):
    runner = CliRunner()
    (row,) = json.loads(runner.invoke(main, ["env", "list", "--json"]).output)
    assert (row["package"], row["offers"]) == ("largest", ["largest"])
    assert row["lock"] == {"digest": largest.lock.package.lock.digest, "bytes": len(largest.lock.encode())}
    packages.install(store, "largest", {"largest.py": "x = 2\n"}, entry_points=ENTRY)
    several = runner.invoke(main, ["env", "remove", "largest"])
    assert several.exit_code == 1
    assert runner.invoke(main, ["env", "remove", row["lock"]["digest"][:12]]).exit_code == 0
    assert len(json.loads(runner.invoke(main, ["env", "list", "--json"]).output)) == 1


def test_a_lock_that_no_node_would_read_is_refused_in_run_toml():
    with pytest.raises(ValueError, match="at most"):
        PackageSpec(name="x", version="1", lock=FileSpec(digest="0" * 64, bytes=MAX_LOCK_BYTES + 1))
