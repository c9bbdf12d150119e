"""What a person types to join: a string that was copied badly must be named in one sentence, not joined by half."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.client.endpoints import MAX_ENDPOINTS
from node.commands.click_ext import Commands
from node.commands.config import default_map, load_config
from node.commands.joining_options import calling_options, introducing_options, joining_options, parse_join_options
from node.errors import ConfigError
from node.joining.options import JoinOptions, host_and_port
from node.protocol.peers import Address, parse_address, peer_id_of

RUN, OTHER_RUN = "5f" * 32, "6a" * 32
NODE = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw()
KEY = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
OWN = KEY.public_key().public_bytes_raw()
AT = f"/ip4/192.0.2.1/tcp/8701/p2p/{peer_id_of(NODE)}"
ALSO = f"/dns/b.example/tcp/2/p2p/{peer_id_of(OWN)}"
JOIN = f"swarmproof://{RUN}{AT}"
URL = "http://192.0.2.1:8700"


def join(*joins: str, coordinators: tuple[str, ...] = (), run_id: str | None = None, **listen: object) -> JoinOptions:
    return parse_join_options(joins=joins, coordinators=coordinators, run_id=run_id, **listen)


def test_one_string_is_enough() -> None:
    said = join(JOIN)
    assert (said.run_id, said.peers, said.coordinators) == (RUN, (parse_address(AT),), ())
    assert (said.listen, said.reached) == (("0.0.0.0", 0), ())


def test_what_was_copied_with_white_space_is_joined() -> None:
    assert join(f" {JOIN}\n") == join(JOIN)
    assert join(f" {AT} ", run_id=RUN) == join(JOIN)


def test_several_ways_are_one() -> None:
    said = join(JOIN, f"swarmproof://{RUN}{ALSO},{AT}", ALSO, coordinators=(URL + "/",), run_id=RUN)
    assert said.peers == (parse_address(AT), parse_address(ALSO)), "each is called once, in the order given"
    assert said.coordinators == (URL,)


def test_a_coordinator_and_the_runs_id_are_enough() -> None:
    said = join(coordinators=(URL,), run_id=RUN)
    assert (said.run_id, said.peers, said.coordinators) == (RUN, (), (URL,))


def test_where_others_reach_a_node_is_named_with_its_own_key() -> None:
    said = join(JOIN, peer_listen="[::]:8701", peer_addresses=("203.0.113.5:9", "[2001:db8::7]:8", "a.example:7"))
    entry = said.settings(KEY)
    assert (entry.run_id, entry.peers, entry.host, entry.port) == (RUN, (parse_address(AT),), "::", 8701)
    assert entry.addresses == (
        Address("ip4", "203.0.113.5", 9, OWN),
        Address("ip6", "2001:db8::7", 8, OWN),
        Address("dns", "a.example", 7, OWN),
    )


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "nothing": ({}, "Say which run"),
    "a run and nobody who knows it": ({"run_id": RUN}, "Say who knows the run"),
    "somebody and no run": ({"coordinators": (URL,)}, "Say which run"),
    "an address and no run": ({"joins": (AT,)}, "Say which run"),
    "two runs": ({"joins": (JOIN,), "run_id": OTHER_RUN}, "more than one run"),
    "two strings of two runs": ({"joins": (JOIN, f"swarmproof://{OTHER_RUN}{AT}")}, "more than one run"),
    "half a string": ({"joins": (JOIN[:-3],)}, "not the PeerId of an Ed25519 key; copy it whole"),
    "no peer": ({"joins": (f"swarmproof://{RUN}",)}, "no address of a peer"),
    "a short run's id": ({"joins": (f"swarmproof://{RUN[:-1]}{AT}",)}, "64 hexadecimal digits"),
    "a URL": ({"joins": (URL,), "run_id": RUN}, "no address of a peer"),
    "no URL": ({"coordinators": ("192.0.2.1:8700",), "run_id": RUN}, "is no URL of a server"),
    "many URLs": ({"coordinators": (URL,) * (MAX_ENDPOINTS + 1), "run_id": RUN}, "at most 16"),
    "a name to listen on": ({"joins": (JOIN,), "peer_listen": "localhost:1"}, "'localhost' is no IP address"),
    "no port to listen on": ({"joins": (JOIN,), "peer_listen": "0.0.0.0"}, "give HOST:PORT"),
    "a wrong port to listen on": ({"joins": (JOIN,), "peer_listen": "0.0.0.0:65536"}, "give HOST:PORT"),
    "no host to be reached at": ({"joins": (JOIN,), "peer_addresses": (":8701",)}, "give HOST:PORT"),
}


@pytest.mark.parametrize(("given", "sentence"), WRONG.values(), ids=WRONG)
def test_a_way_that_leads_nowhere_is_one_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises((click.UsageError, ConfigError)) as caught:
        parse_join_options(**({"joins": (), "coordinators": (), "run_id": None} | given))  # type: ignore[arg-type]
    said = caught.value.format_message() if isinstance(caught.value, click.UsageError) else str(caught.value)
    assert sentence in said
    assert "\n" not in said
    assert len(said) < 200


@pytest.mark.parametrize(
    "reached", ["192.0.2.300:1", "192.0.2.1:0", "0.0.0.0:1", "a b:1", "a/b:1", "[::]:1", "127.1:1"]
)
def test_an_address_that_nobody_could_call_is_not_spread(reached: str) -> None:
    with pytest.raises(click.BadParameter, match="cannot be called"):
        join(JOIN, peer_addresses=(reached,)).settings(KEY)


@pytest.mark.parametrize(
    "text",
    ["", ":", "1", "a:", ":1", "a:b", "a:1:2", "::1:8701", "[::1]", "[::1]1", "[a]:1:", "a:\u0661", "a:" + "9" * 9999],
)
def test_what_is_no_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        host_and_port(text, hint="--peer-address")


@pytest.mark.parametrize(
    ("text", "pair"),
    [("a.example:1", ("a.example", 1)), ("[::1]:65535", ("::1", 65535)), ("0.0.0.0:0", ("0.0.0.0", 0))],
)
def test_hosts_and_ports_are_read(text: str, pair: tuple[str, int]) -> None:
    assert host_and_port(text, hint="") == pair


# -- as options of a command


@click.group(cls=Commands)
@click.option("--config", type=click.Path(path_type=Path))
@click.pass_context
def main(ctx: click.Context, config: Path | None) -> None:
    if config is not None:
        ctx.default_map = default_map(load_config(config), main, ctx)


def show(join: JoinOptions) -> None:
    click.echo(f"{join.run_id[:4]} {len(join.peers)} {list(join.coordinators)} {join.listen}")


@main.command()
@joining_options
@click.option("--slots", default=1)
def work(*, join: JoinOptions, slots: int) -> None:
    show(join)


@main.command()
@calling_options
def call(*, join: JoinOptions) -> None:
    show(join)


@main.command()
@introducing_options
def introduce(*, join: JoinOptions) -> None:
    show(join)


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, arguments, env=environment)
    return done.exit_code, done.stdout.strip(), done.stderr


def test_a_command_is_told_the_way() -> None:
    assert run("work", "--join", JOIN, "--slots", "2") == (0, "5f5f 1 [] ('0.0.0.0', 0)", "")
    assert run("call", "--coordinator", URL, "--run-id", RUN) == (0, f"5f5f 0 ['{URL}'] ('0.0.0.0', 0)", "")


def test_a_peer_that_others_begin_with_keeps_its_port() -> None:
    """Its address is in others' strings: after a restart at another port nobody would find it."""
    assert run("introduce", "--join", JOIN)[1].endswith("('0.0.0.0', 8701)")


def test_a_command_that_nobody_calls_listens_nowhere() -> None:
    code, _, said = run("call", "--join", JOIN, "--peer-listen", "0.0.0.0:1")
    assert code == 2
    assert "No such option" in said


def test_the_way_may_stand_in_the_environment_and_in_a_file(tmp_path: Path) -> None:
    assert run("work", SWARMPROOF_WORK_JOIN=f"{JOIN} {ALSO}")[1].startswith("5f5f 2 []")
    (tmp_path / "one.toml").write_text(f'[work]\njoin = "{JOIN}"\n')
    (tmp_path / "two.toml").write_text(f'[work]\njoin = ["{JOIN}", "{ALSO}"]\npeer_listen = "127.0.0.1:5"\n')
    assert run("--config", str(tmp_path / "one.toml"), "work")[1].startswith("5f5f 1 []")
    assert run("--config", str(tmp_path / "two.toml"), "work")[1] == "5f5f 2 [] ('127.0.0.1', 5)"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--join", JOIN[:-1]),
        ("--join", JOIN, "--run-id", OTHER_RUN),
        ("--join", JOIN, "--run-id", RUN.upper()),
        ("--join", JOIN, "--peer-listen", "here:1"),
        ("--coordinator", "ftp://192.0.2.1", "--run-id", RUN),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_a_mistake_is_one_sentence_on_the_command_line(arguments: tuple[str, ...]) -> None:
    code, out, said = run("work", *arguments)
    assert code in {1, 2}
    assert out == ""
    assert len([line for line in said.splitlines() if line.startswith("Error: ")]) == 1
    assert "Traceback" not in said
