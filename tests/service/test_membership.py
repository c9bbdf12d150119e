"""Workers that join a run which asks something of new keys, by themselves, in a real swarm."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarm import RUN_KEY, Swarm, running, small_spec, worker_thread
from waiting import until

from coordinator.commands.stakes import stakes
from node import cli
from node.keys.identity import node_id, write_key
from node.protocol.membership import MembershipSpec, parse_invite_token

POLICIES = [
    MembershipSpec(policy="invite"),
    MembershipSpec(policy="stake", stake=1000),
    MembershipSpec(policy="work", bits=12, most_bits=16),
]


@pytest.mark.parametrize("rules", POLICIES, ids=lambda rules: rules.policy)
def test_a_worker_joins_by_itself_and_is_never_asked_again(
    tmp_path: Path, tiny_policy_path: Path, rules: MembershipSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    key, state, invite = Ed25519PrivateKey.generate(), tmp_path / "worker", None
    if rules.policy == "invite":
        write_key(tmp_path / "run.key", RUN_KEY)
        made = CliRunner().invoke(cli.main, ["invite", "--key", str(tmp_path / "run.key"), "--node", node_id(key)])
        invite = parse_invite_token(made.output.strip())
    with running(tmp_path, tiny_policy_path, spec=small_spec(membership=rules), key=RUN_KEY) as swarm:
        with worker_thread(swarm.url, swarm.home.run_id, state, key=key, invite=invite) as status:
            if rules.policy == "stake":
                until(lambda: f"Node {node_id(key)} has 0 at stake, 1000 are asked for." in caplog.text)
                note_stake(swarm, node_id(key))
            until(lambda: status().get("admitted", 0) >= 1)
        before = status()["admitted"]
        with worker_thread(swarm.url, swarm.home.run_id, state, key=key) as status:  # again, with nothing to show
            until(lambda: status().get("admitted", 0) > before)
    solved = [record for record in caplog.records if "Proof of work of 12 bits found" in record.getMessage()]
    assert len(solved) == (1 if rules.policy == "work" else 0)
    if invite is not None:
        assert base64.urlsafe_b64encode(invite).decode()[:40] not in caplog.text


def note_stake(swarm: Swarm, node: str) -> None:
    command = ["enter", "--data", str(swarm.home.folder), "--why", "transfer 1", node, "1000"]
    assert CliRunner().invoke(stakes, command, catch_exceptions=False).exit_code == 0
