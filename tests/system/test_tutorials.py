"""Every command of the tutorials is typed as it stands there: a newcomer's first hour must not end in an error."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
import venv
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from locations import ROOT
from tutorials import Substitution, read_page, reader

from coordinator.lab.processes.layout import free_ports

PAGES = ROOT / "docs" / "tutorials"
CLONED = ("toploc", "shardcast", "node", "coordinator", "tests")
SCRIPT = """#!{python}
import sys
from node.cli import main
sys.exit(main())
"""
PORTS = {"SWARMPROOF_COORDINATOR_PORT": 8700, "SWARMPROOF_COORDINATOR_PEER_PORT": 8701, "SWARMPROOF_TRAINER_PORT": 8710,
         "SWARMPROOF_RELAY_PORT": 8720}  # fmt: skip
"""The ports that the pages show are the defaults, which no command names: the environment changes them."""

BEING_WRITTEN = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")

INSTALLATION = dict.fromkeys(
    ("make install", "python3 -m venv .venv", 'pip install -e ".[worker,p2p]"', 'pip install -e ".[audit]"'), ":"
)


def make_clone(folder):
    """What a clone is after `make install`, with the dependencies of the Python that runs the tests."""
    for name in CLONED:
        shutil.copytree(ROOT / name, folder / name, ignore=BEING_WRITTEN)  # with what is compiled: it has their times
    for name in ("pyproject.toml", "Makefile", "README.md"):
        shutil.copy(ROOT / name, folder)
    venv.EnvBuilder(symlinks=True).create(folder / ".venv")
    (packages,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    (packages / "clone.pth").write_text(f"{folder}\n{sysconfig.get_path('purelib')}\n")
    script = folder / ".venv" / "bin" / "swarmproof"
    script.write_text(SCRIPT.format(python=folder / ".venv" / "bin" / "python"))
    script.chmod(0o755)


@dataclass
class Desk:
    """Where somebody sits: a clone, a home and ports of their own."""

    folder: Path
    ports: dict[int, int]

    def __post_init__(self):
        for name in ("clone", "home", "logs"):
            (self.folder / name).mkdir(parents=True)
        make_clone(self.folder / "clone")

    def follow(self, stack, page, **texts):
        """Do what `page` says, until the test ends; gives the reader, at whose terminals things go on."""
        env = {
            "HOME": str(self.folder / "home"),
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            **{name: str(self.ports[port]) for name, port in PORTS.items()},
            # Where this machine has packages from: an environment is built and installed.
            **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        }
        substitution = Substitution(ports=self.ports, texts=texts, commands=INSTALLATION)
        somebody = stack.enter_context(
            reader(self.folder / "clone", env, logs=self.folder / "logs", substitution=substitution)
        )
        somebody.follow(read_page(page))
        return somebody


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def new_desk(folder):
    return Desk(folder, dict(zip(PORTS.values(), free_ports(len(PORTS)), strict=True)))


def page(name, *, until=None):
    text = (PAGES / name).read_text()
    return text if until is None else text[: text.index(f"\n## {until}\n")]


def operate(stack, folder, *, until):
    """An operator who has followed their tutorial up to a heading. Gives what they would tell others."""
    desk = new_desk(folder)
    operator = desk.follow(stack, page("operator.md", until=until))
    if "Terminal 6" in operator.terminals:
        operator.terminals["Terminal 6"].press_ctrl_c()  # a worker that goes on would keep the machine busy
    said, _ = operator.terminals["Terminal 2"].output()
    (join,) = re.findall(r"swarmproof://\S+", said)
    (run_id,) = re.findall(r"^run id  (\S+)$", said, re.MULTILINE)
    return {
        "swarmproof://RUN_ID/ip4/192.0.2.1/tcp/8701/p2p/PEER_ID": join,
        "http://192.0.2.1:8700": f"http://127.0.0.1:{desk.ports[8700]}",
        "http://192.0.2.1:8710": f"http://127.0.0.1:{desk.ports[8710]}",
        "RUN_ID": run_id,
    }


@pytest.mark.timeout(580)
def test_an_operator_makes_a_run_and_gets_it_back(stack, tmp_path):
    new_desk(tmp_path).follow(stack, page("operator.md"))


@pytest.mark.timeout(580)
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt install bubblewrap")
def test_an_author_trains_on_problems_of_their_own(stack, tmp_path):
    new_desk(tmp_path).follow(stack, page("environment-author.md"))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What an operator tells others whose run has had a worker, and goes on."""
    with ExitStack() as stack:
        yield operate(stack, tmp_path_factory.mktemp("operator"), until="Audit it")


@pytest.mark.timeout(580)
@pytest.mark.skipif(find_spec("libp2p") is None, reason="libp2p is not installed: make install")
def test_a_contributor_joins_by_the_string_and_keeps_a_key(stack, tmp_path, told):
    new_desk(tmp_path).follow(stack, page("contributor.md"), **told)


@pytest.mark.timeout(580)
def test_an_auditor_checks_a_run_with_the_command_and_by_hand(stack, tmp_path, told):
    new_desk(tmp_path).follow(stack, page("auditor.md"), **told)
