"""deploy/images/compose.yaml comes up, by its own commands, and each of its services is killed with -9.

What an operator would lose: rollouts that were admitted, or the run itself, because a process does not come back as its
container would. The object store's stand-in is not killed, since it keeps nothing on disk.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from compose_host import ContainerHost, Host
from object_store import object_store
from run_files import small_run_toml
from run_log import check_entries, read_leaves
from waiting import is_quiet, until

from node.runtime.service_manager import ALIVE, READY

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3400), pytest.mark.usefixtures("forked_commands")]

STEPS, GROUPS_PER_STEP = 24, 2
START_SECONDS = FINISH_SECONDS = 300.0


@pytest.fixture(params=["processes", "containers"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    run_toml = small_run_toml("compose", steps=STEPS, groups_per_step=GROUPS_PER_STEP)
    with object_store() as store, tempfile.TemporaryDirectory(prefix="compose-") as folder:
        Path(folder).chmod(0o755)
        if request.param == "processes":
            host = Host(Path(folder), store, run_toml=run_toml)
        else:
            host = ContainerHost(Path(folder), store, run_toml=run_toml, images=request.getfixturevalue("images"))
        try:
            yield host
        finally:
            host.end()


def test_the_services_come_up_a_worker_outside_joins_and_none_that_is_killed_loses_anything(host: Host) -> None:
    def wait_for(service: str) -> None:
        until(lambda: host.answers(service), seconds=START_SECONDS, meanwhile=host.keep_running, what=host.said)

    def come_up(service: str) -> None:
        host.start(service)
        wait_for(service)
        assert host.is_healthy(service)

    with host.connect() as connection:
        roles = dict(connection.execute("SELECT rolname, rolsuper FROM pg_roles WHERE rolcanlogin").fetchall())
    assert roles == {"postgres": True, "swarmproof": False}, "who breaks into a verifier may do what PostgreSQL may"
    assert not host.takes_connections("postgres"), "the program's password is the superuser's"
    assert not host.is_healthy("coordinator"), "nobody listens there yet"
    for service in ("coordinator", "trainer", "verifier", "relay"):
        come_up(service)
    database = ["--data", "/var/lib/swarmproof/data", "--database-url", "postgresql://swarmproof@postgresql/swarmproof"]
    joining = re.search(r"swarmproof://\S+", host.do("join-string", *database))
    assert joining is not None
    host.start_outside("--join", joining[0])
    until(lambda: host.steps() >= 1, seconds=START_SECONDS, meanwhile=host.keep_running, what=host.said)
    come_up("worker")
    url = host.health_url("coordinator").removesuffix("/health")
    leaves: list[bytes] = []
    for number, service in enumerate(("coordinator", "trainer", "verifier", "relay", "worker", "postgresql"), start=1):
        until(lambda: host.steps() >= number, seconds=START_SECONDS, meanwhile=host.keep_running, what=host.said)  # noqa: B023
        before, leaves = leaves, read_leaves(url)
        assert leaves[: len(before)] == before, "the log was rewritten"
        host.kill(service)
        host.start(service)
        if service == "postgresql":
            until(host.takes_connections, meanwhile=host.keep_running, what=host.said)
        else:
            wait_for(service)
    until(
        lambda: bool(host.status().get("finished")), seconds=FINISH_SECONDS, meanwhile=host.keep_running, what=host.said
    )
    until(lambda: is_quiet(host.status()), meanwhile=host.keep_running, what=host.said)

    before, leaves = leaves, read_leaves(url)
    assert leaves[: len(before)] == before, "the log was rewritten"
    check_entries(leaves, steps=STEPS)
    if type(host) is Host:
        for service, manager in host.managers.items():
            heard = manager.heard()
            assert (heard[0], ALIVE in heard) == (READY, True), f"systemd would end {service}, or not start it"
    assert not (host.home / "data" / "blobs").exists()
