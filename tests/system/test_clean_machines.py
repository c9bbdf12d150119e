"""A run among machines that have nothing but a wheel: whoever installs as the page says takes part.

What would break for whom: a contributor without a clone would miss a package or a file, an operator's machine would
need what only developers have, or the string on the page would lead to an address that others do not reach.
"""

from __future__ import annotations

import html
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clean_machine import CleanMachine, clean_machine
from distributions import built_wheel
from namespaces import OPERATOR, Internet, internet, needs_namespaces
from sandboxing import needs_sandbox
from waiting import until

pytest.importorskip("libp2p", reason="libp2p is not installed: pip install -e '.[p2p]'")

COORDINATOR, ORIGIN = 8700, 8710
ADDRESS = f"http://{OPERATOR}:{COORDINATOR}"
WORK_SECONDS = 200.0
# The place of each machine in the namespaces, and what is installed on it.
EXTRAS = {"operator": ("operator", "p2p"), "home": ("worker", "p2p"), "street": ("audit",)}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CleanMachine]:
    folder = tmp_path_factory.mktemp("clean")
    wheel = built_wheel(folder)
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda place: clean_machine(folder / place, wheel, *EXTRAS[place]), EXTRAS)
        return dict(zip(EXTRAS, made, strict=True))


def begin_run(net: Internet) -> str:
    """Make a run on the operator's machine, start its processes, and return its id."""
    made = net.ask("operator", "init", "--name", "clean", "--model", "random-tiny")
    assert made.returncode == 0, made.stderr
    (run_id,) = re.findall(r"(?m)^run id  (\w+)$", made.stdout)
    run = ("--data", "run/", "--key", "run.key", "--host", OPERATOR)
    net.start("coordinator", "operator", "coordinator", "--run", "run.toml", "--uncalibrated", *run)
    net.start("trainer", "operator", "trainer", "--state", "trainer/", *run)
    source = ("--source", f"http://{OPERATOR}:{ORIGIN}")
    net.start("verifier", "operator", "verifier", "--data", "run/", "--state", "verifier/", *source)
    return str(run_id)


def joining_line(net: Internet) -> list[str]:
    """Return the words of the line that a browser at the contributor's shows, without the program's name."""
    page = net.get("home", f"{ADDRESS}/").decode()
    shown = re.findall(r'<code id="join">(.*?)</code>', page, re.DOTALL)
    return html.unescape(shown[0]).split()[1:] if shown else []


@needs_sandbox
@needs_namespaces
@pytest.mark.timeout(600)
def test_a_wheel_on_three_machines_is_a_run_with_a_worker_and_an_audit(
    machines: dict[str, CleanMachine], tmp_path: Path
) -> None:
    with internet(tmp_path / "logs") as net:
        net.programs = {place: (*machine.command, "swarmproof") for place, machine in machines.items()}

        def said() -> str:
            return "\n".join(f"-- {name}\n{net.log(name)}" for name in net.processes)

        run_id = begin_run(net)
        words = until(lambda: joining_line(net), what=said)
        net.start("worker", "home", *words)

        def admitted() -> bool:
            states = machines["home"].folder.glob(".swarmproof/*/worker/status.json")
            return any(json.loads(state.read_bytes())["admitted"] for state in states)

        until(admitted, seconds=WORK_SECONDS, what=said)
        source = ("--source", f"http://{OPERATOR}:{ORIGIN}")
        audit = net.ask("street", "audit", ADDRESS, "--run-id", run_id, "--sample", "2", *source, seconds=240.0)
        assert audit.returncode == 0, audit.stdout + audit.stderr
        assert "agree: " in audit.stdout


def test_no_machine_has_the_checkout_or_a_developers_packages(machines: dict[str, CleanMachine]) -> None:
    """Else the others would pass whatever the wheel lacked."""
    look = (
        "import os, importlib.util as u, node; print(node.__file__, os.getuid(), [n for n in {!r} if u.find_spec(n)])"
    )
    others = {"operator": ["pytest", "mypy"], "home": ["pytest", "fastapi", "sqlalchemy"]}
    for place, names in others.items():
        where, uid, found = machines[place].run("python", "-c", look.format(names)).split(maxsplit=2)
        assert where.startswith("/home/somebody/venv/")
        assert (uid, found.strip()) == ("1000", "[]")
