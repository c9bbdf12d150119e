"""Somebody's own package offers an environment: found without a patch of this one, and never a way to break a run."""

from __future__ import annotations

import sys

import pytest

from node.environments import EnvironmentFault, installed, load_environment
from node.protocol.run import EnvironmentSpec

MODULE = """
from typing import ClassVar

import msgspec

from node.environments.base import Problem


class Largest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: ClassVar[str] = "largest"
    count: int = 3

    def problem(self, index):
        return Problem(f"{index} of {self.count}")

    def reward(self, problem, completion):
        return 1.0


class Nameless(msgspec.Struct):
    def problem(self, index): ...
    def reward(self, problem, completion): ...


class Unrewarding(msgspec.Struct):
    name: ClassVar[str] = "largest"
    def problem(self, index): ...


def function(): ...
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with one module and one entry point, as pip would leave it."""

    def installed_package(package, *, name="largest", target="Largest", module=MODULE):
        folder = tmp_path / package
        metadata = folder / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[swarmproof.environments]\n{name} = {package}:{target}\n")
        (folder / f"{package}.py").write_text(module)
        monkeypatch.syspath_prepend(folder)
        installed._entries.cache_clear()

    yield installed_package
    installed._entries.cache_clear()
    for package in [name for name in sys.modules if name.startswith("pkg_of_")]:
        del sys.modules[package]


def load(name="largest", **arguments):
    return load_environment(EnvironmentSpec(name=name, arguments=arguments))


def code_of(name="largest", **arguments):
    with pytest.raises(EnvironmentFault) as caught:
        load(name, **arguments)
    return caught.value.code


def test_an_installed_environment_is_loaded_with_its_arguments(install):
    install("pkg_of_a")
    assert load(count=4).problem(7).prompt == "7 of 4"
    assert code_of(count="four") == "bad_arguments"
    with pytest.raises(EnvironmentFault, match="largest"):
        load("smallest")


def test_a_name_that_two_packages_claim_is_neither_ones(install):
    """Else which problems a worker computes would depend on the order in which it installed them."""
    install("pkg_of_a")
    install("pkg_of_b")
    with pytest.raises(EnvironmentFault, match="pkg_of_a and pkg_of_b") as caught:
        load()
    assert caught.value.code == "claimed_twice"


def test_nobody_takes_the_place_of_an_environment_of_this_package(install):
    install("pkg_of_a", name="arithmetic")
    assert code_of("arithmetic") == "claimed_twice"
    assert load("reverse").name == "reverse"


@pytest.mark.parametrize("module", ["1 / 0", "import no_such_module", "def", "Other = 1"])
def test_a_package_that_cannot_be_imported_is_named(install, module):
    install("pkg_of_a", module=module)
    with pytest.raises(EnvironmentFault, match="pkg_of_a cannot be imported") as caught:
        load()
    assert caught.value.code == "broken_environment"
    assert load("arithmetic").name == "arithmetic", "a package is imported only for a run that names its environment"


@pytest.mark.parametrize("target", ["function", "Nameless", "Unrewarding"])
def test_what_is_no_environment_is_refused_before_any_slot(install, target):
    install("pkg_of_a", target=target)
    assert code_of() == "not_an_environment"
