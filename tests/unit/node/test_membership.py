"""What a new key shows: prices that an operator can foresee, and invites and work that fit one run and one key."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node import cli
from node.keys.identity import create_key
from node.protocol.membership import (
    MAX_INVITE_TEXT,
    MembershipSpec,
    check_invite,
    find_work,
    open_invite,
    parse_invite_token,
    price_bits,
    work_bits,
    work_seed,
)
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec, parse_run_toml, run_id_of
from shardcast.errors import Malformed
from shardcast.wire import decode, encode

RUN_TOML = 'name = "x"\n[[environments]]\nname = "arithmetic"\n'
NODE = "cd" * 32


def test_a_run_without_the_table_has_the_rules_and_the_digest_that_it_had_before_there_was_one() -> None:
    """Else every run that exists would be refused its own run.toml by the next release."""
    spec = parse_run_toml(RUN_TOML)
    assert b"membership" not in encode(spec)
    chosen = parse_run_toml(RUN_TOML + '[membership]\npolicy = "work"\n')
    assert chosen.digest != spec.digest
    assert decode(RunSpec, encode(chosen), max_bytes=2**16) == chosen


@pytest.mark.parametrize(
    "table",
    [
        "",
        'policy = "open"',
        'policy = "stake"\nstake = 0',
        'policy = "work"\nbits = 0',
        'policy = "work"\nmost_bits = 29',
        'policy = "work"\nbits = 21\nmost_bits = 20',
    ],
)
def test_rules_that_let_everybody_in_or_nobody_are_refused(table: str) -> None:
    with pytest.raises(Malformed):
        parse_run_toml(f"{RUN_TOML}[membership]\n{table}\n")


def test_the_price_rises_with_the_queue_up_to_the_stated_bound_and_falls_with_it() -> None:
    rules = MembershipSpec(policy="work", bits=20, most_bits=26)
    queue = [0, 23, 24, 47, 48, 95, 96, 767, 768, 10**9]
    assert [price_bits(rules, waiting=n, capacity=24) for n in queue] == [20, 20, 21, 21, 22, 22, 23, 25, 26, 26]
    assert price_bits(rules, waiting=1, capacity=1) == 21
    never = MembershipSpec(policy="work", bits=3, most_bits=3)
    assert price_bits(never, waiting=10**9, capacity=1) == 3


def test_work_is_for_one_run_one_key_and_one_salt() -> None:
    own = {"run_id": "ab" * 32, "node": NODE, "salt": "ef" * 32}
    seed = work_seed(**own)
    counter = find_work(seed, bits=12, start=0, attempts=2**17)
    assert counter is not None
    assert work_bits(seed, counter) >= 12
    for name in own:
        assert work_bits(work_seed(**own | {name: "00" * 32}), counter) < 12, name


def test_a_search_ends_after_its_attempts() -> None:
    """However high the price: a worker that is stopped ends, and one whose puzzle is over asks for the next."""
    assert find_work(work_seed(run_id=NODE, node=NODE, salt=NODE), bits=28, start=0, attempts=1000) is None


# -- the operator's command


def swarmproof_invite(*arguments: str) -> str:
    result = CliRunner().invoke(cli.main, ["invite", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.strip()


def test_the_command_makes_an_invite_that_the_run_takes(tmp_path: Path) -> None:
    key = create_key(tmp_path / "run.key")
    run_key = key.public_key().public_bytes_raw()
    token = swarmproof_invite("--key", str(tmp_path / "run.key"), "--keys", "3", "--days", "0.5")
    made = open_invite(parse_invite_token(token), run_key=run_key, run_id=run_id_of(run_key))
    assert (made.keys, made.node, made.expires_at - made.issued_at) == (3, None, 43_200)
    check_invite(made, node=NODE, used=2, now=time.time())
    bound = swarmproof_invite("--key", str(tmp_path / "run.key"), "--node", NODE)
    assert bound != swarmproof_invite("--key", str(tmp_path / "run.key"), "--node", NODE), "each is counted for itself"
    only = open_invite(parse_invite_token(bound), run_key=run_key, run_id=run_id_of(run_key))
    with pytest.raises(Refusal) as caught:
        check_invite(only, node="ab" * 32, used=0, now=time.time())
    assert caught.value.reason is Reason.FOREIGN_INVITE


def test_an_invite_for_one_node_and_many_keys_is_not_made(tmp_path: Path) -> None:
    create_key(tmp_path / "run.key")
    arguments = ["invite", "--key", str(tmp_path / "run.key"), "--node", NODE, "--keys", "2"]
    assert CliRunner().invoke(cli.main, arguments).exit_code == 2


@pytest.mark.parametrize("token", ["not base64url!", "é", "AAA", "A" * (MAX_INVITE_TEXT + 4)])
def test_what_is_no_invite_is_not_repeated_to_the_terminal(token: str) -> None:
    secret = token + secrets.token_hex(4)
    arguments = ["worker", "--coordinator", "http://127.0.0.1:1", "--run-id", NODE, "--invite", secret]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert "swarmproof invite" in result.output
    assert secret not in result.output


def test_another_runs_invite_is_bad_whatever_it_names() -> None:
    key = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    with pytest.raises(Refusal) as caught:
        open_invite(b"VSW1", run_key=key, run_id=run_id_of(key))
    assert caught.value.reason is Reason.BAD_INVITE
