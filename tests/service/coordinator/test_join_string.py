"""The line by which workers join, long after it has scrolled out of the coordinator's terminal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from stocked_runs import SPEC

from coordinator.commands.join_string import join_string
from coordinator.run.descriptors import Contacts
from coordinator.run.home import create_home
from coordinator.run.service import Coordinator

PEER = "/ip4/192.0.2.1/tcp/8701/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.mark.parametrize(
    ("contacts", "line", "loopback"),
    [
        (Contacts(endpoints=("http://192.0.2.1:8700",)), "--coordinator http://192.0.2.1:8700 --run-id RUN", False),
        (Contacts(endpoints=("http://127.0.0.1:8700",)), "--coordinator http://127.0.0.1:8700 --run-id RUN", True),
        (Contacts(endpoints=("http://127.0.0.1:8700",), peers=(PEER,)), f"--join swarmproof://RUN{PEER}", False),
    ],
)
def test_the_line_is_printed_again_and_a_loopback_address_is_called_one(
    tmp_path: Path, contacts: Contacts, line: str, loopback: bool
) -> None:
    key = Ed25519PrivateKey.generate()
    home = create_home(tmp_path / "run", public_key=key.public_key().public_bytes_raw(), spec=SPEC)
    coordinator = Coordinator(home, key=key, contacts=contacts)
    before = CliRunner().invoke(join_string, ["--data", str(tmp_path / "run")])
    assert "start it first" in str(before.exception)
    coordinator.descriptor(now=time.time())
    home.database.close()
    said = CliRunner().invoke(join_string, ["--data", str(tmp_path / "run")])
    assert said.stdout == f"swarmproof worker {line.replace('RUN', home.run_id)}\n"
    assert ("loopback" in said.stderr) == loopback
    assert coordinator.joining is not None
    assert said.stdout.strip() == coordinator.joining.command
