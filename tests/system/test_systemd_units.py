"""The units of deploy/systemd, as systemd and as the command line read them: an operator copies them as they are."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_lines import parameters, variables
from locations import ROOT
from sandboxing import needs_sandbox

from node import cli
from node.commands.click_ext import ENVIRONMENT
from node.joining.options import address_at
from node.protocol.peers import Invitation

FOLDER = ROOT / "deploy" / "systemd"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
VERIFIER, WORKER = "swarmproof-verifier@.service", "swarmproof-worker.service"
PROGRAM = "/opt/swarmproof/bin/swarmproof"
JOIN = str(Invitation("ab" * 32, (address_at("192.0.2.1", 8701, b"\x01" * 32),)))
FROM_FILES = {"relay": ("--join", JOIN), "worker": ("--join", JOIN)}
"""What the units' EnvironmentFile= has to say."""


def settings(unit: str) -> dict[str, list[str]]:
    """What a unit's [Service] sets, each as often as it does."""
    section, found = "", defaultdict[str, list[str]](list)
    text = (FOLDER / unit).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[key].append(value)
    return found


def only(unit: str, key: str) -> str:
    (value,) = settings(unit)[key]
    return value


def test_there_is_a_unit_for_each_role():
    roles = ("api", "leader", "verifier@", "trainer", "relay", "worker")
    assert set(UNITS) == {f"swarmproof-{role}.service" for role in roles}


@pytest.mark.parametrize("unit", UNITS)
def test_the_command_line_takes_what_the_unit_gives_it(unit: str, tmp_path: Path):
    """Every flag is there, and nothing required is missing but what the environment's file has to say."""
    program, name, *arguments = shlex.split(only(unit, "ExecStart"))
    assert program == PROGRAM
    (tmp_path / "run.toml").touch()
    arguments = [part.replace("%d", str(tmp_path)).replace("%i", "1") for part in arguments]
    arguments = [part.replace("/etc/swarmproof", str(tmp_path)) for part in arguments]
    assert parameters([name, *arguments, *FROM_FILES.get(name, ())])


@pytest.mark.parametrize("unit", UNITS)
def test_variables_that_a_unit_names_are_variables_of_its_command(unit: str):
    text = (FOLDER / unit).read_text()
    name = shlex.split(only(unit, "ExecStart"))[1]
    assert set(re.findall(rf"{ENVIRONMENT}_[A-Z_]+", text)) <= variables(name)


def test_variables_that_the_operators_page_names_for_units_are_variables_of_those_commands():
    page = (FOLDER.parents[1] / "docs" / "operating.md").read_text()
    section = page[page.index("\n## systemd") : page.index("\n## vLLM")]
    group = click.Context(cli.main, info_name="swarmproof")
    known = set()
    for name in cli.main.list_commands(group):
        command = cli.main.get_command(group, name)
        known |= {option.envvar for option in command.params if isinstance(option, click.Option)}
    named = set(re.findall(rf"{ENVIRONMENT}_[A-Z_]+", section))
    assert len(named) >= 4
    assert named <= known
    for role in ("LEADER", "VERIFIER", "TRAINER"):
        assert f"{ENVIRONMENT}_{role}_DATABASE_URL" in known


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_has_nothing_to_complain_about(unit: str, tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt install systemd")
    name = unit.replace("@.", "@1.")
    # systemd looks whether the program is there.
    (tmp_path / name).write_text((FOLDER / unit).read_text().replace(PROGRAM, sys.executable))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = [line for line in found.stderr.splitlines() if name in line or "swarmproof" in line]
    assert (found.returncode, said) == (0, []), found.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_a_process_that_hangs_is_started_again_and_one_that_waits_for_its_run_is_not(unit: str):
    """A relay or worker says that it serves once it has met the run, whose coordinator may be away for hours."""
    assert only(unit, "Type") == "notify"
    assert float(only(unit, "WatchdogSec")) >= 60, "loading a policy may keep the event loop for seconds"
    assert only(unit, "Restart") == "on-failure"
    assert only(unit, "TimeoutStartSec") == "infinity"


@pytest.mark.parametrize("unit", UNITS)
def test_a_process_that_was_taken_over_gets_nothing_but_its_own_folder(unit: str):
    for setting in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID"):
        assert only(unit, setting) == "yes"
    assert only(unit, "ProtectSystem") == "strict"
    assert only(unit, "CapabilityBoundingSet") == ""
    assert only(unit, "UMask") == "0077"
    assert settings(unit)["MemoryMax"]
    assert settings(unit)["StateDirectory"], "where else could it write?"
    assert "User" in settings(unit) or only(unit, "DynamicUser") == "yes", "it runs as root"


def test_the_verifiers_hardening_lets_bubblewrap_make_its_sandbox():
    """Else no answer that is a program would ever be judged: indeterminate, for ever."""
    allowed = set(only(VERIFIER, "RestrictNamespaces").split())
    assert allowed >= {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"}
    assert "SystemCallFilter" not in settings(VERIFIER), "@system-service has no mount and no pivot_root"
    assert "ProtectHostname" not in settings(VERIFIER), "which forbids sethostname, even in a namespace of its own"
    assert "AF_NETLINK" in only(VERIFIER, "RestrictAddressFamilies"), "bubblewrap brings the loopback up by it"


def is_open_to_all(program: str) -> bool:
    path = Path(program).resolve()
    return path.exists() and all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))


@pytest.fixture
def packages_for_all() -> Iterator[Path]:
    """A folder with the package `node` that every user may read; the checkout may lie in somebody's home."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(ROOT / "node", Path(folder, "node"), ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chmod", "--recursive", "a+rX", folder], check=True, timeout=60)
        yield Path(folder)


@needs_sandbox
def test_bubblewrap_works_without_any_right_that_the_unit_takes_away(packages_for_all: Path):
    """An ordinary user who can gain nothing by executing anything: what of the unit can be tried without systemd."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can give up rights here, with setpriv installed")
    script = "from node.sandbox import Sandbox; Sandbox().check()"
    # This Python may lie where others cannot read, such as in root's home; the sandbox needs no installed package.
    python = next((each for each in (sys.executable, "/usr/bin/python3") if is_open_to_all(each)), None)
    if python is None:
        pytest.skip("there is no Python that an ordinary user may run")
    limits = ("--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--bounding-set=-all")
    found = subprocess.run(
        ["setpriv", *limits, "--inh-caps=-all", python, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=packages_for_all,
    )
    assert found.returncode == 0, found.stderr


def test_a_worker_has_time_to_hand_its_slots_back():
    arguments = shlex.split(only(WORKER, "ExecStart"))
    grace = float(arguments[arguments.index("--grace") + 1])
    # As long again for what is generated to be uploaded.
    assert float(only(WORKER, "TimeoutStopSec")) >= 2 * grace + 10
    assert only(WORKER, "KillMode") == "mixed", "its engine's processes must not end before it"


@pytest.mark.parametrize("unit", UNITS)
def test_the_runs_key_is_given_to_those_alone_who_sign(unit: str):
    signs = unit in {"swarmproof-api.service", "swarmproof-trainer.service"}
    assert ("run.key" in (FOLDER / unit).read_text()) == signs
    assert settings(unit)["LoadCredential"] == (["run.key:/etc/swarmproof/run.key"] if signs else [])


def test_no_two_processes_of_a_host_want_one_port():
    wanted = defaultdict[str, list[str]](list)
    for unit in UNITS:
        for name in ("1", "2") if "@" in unit else ("",):
            for flag, port in re.findall(r"--(port|metrics-port) (\S+)", only(unit, "ExecStart")):
                wanted[port.replace("%i", name)].append(f"{unit} {flag}")
    assert {port: who for port, who in wanted.items() if len(who) > 1} == {}
    for port in wanted:
        assert port in (FOLDER.parent / "prometheus" / "prometheus.yml").read_text(), "nobody would look at it"
