"""`swarmproof authority` and `swarmproof control`: a right to ask nodes, made by the run, and asking them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import click
import msgspec

from node.client.http import checked_url
from node.commands.joining_options import calling_options
from node.commands.options import FILE, F, all_of, json_option, key_option, state_option
from node.control.report import challenge_lines, lines_of
from node.errors import ConfigError, NodeError
from node.joining.way import Way
from node.keys.identity import load_key
from node.protocol.control import (
    FREE_PURPOSES,
    MAX_AUTHORITY_BYTES,
    MAX_AUTHORITY_SECONDS,
    MAX_LOG_LINES,
    MAX_SAMPLE_TOKENS,
    MAX_SAMPLES,
    PURPOSES,
    Ask,
    AskChallenge,
    AskDrain,
    AskInvite,
    AskLogs,
    AskRestart,
    AskStatus,
    Authority,
    ChallengeBody,
    Purpose,
    open_authority,
    sign_authority,
)
from node.protocol.peers import Address, parse_address, public_key_of
from node.protocol.run import run_id_of
from shardcast.errors import Malformed, PeerFault
from shardcast.files import read_bounded
from shardcast.wire import is_digest

MAX_GRANT_BYTES: Final = 2 * MAX_AUTHORITY_BYTES
NOTHING: Final = "nothing"


def _node(_ctx: click.Context, _param: click.Parameter, value: str | None) -> bytes | None:
    """Return a node's public key, from its id or its PeerId; raises BadParameter."""
    if value is None:
        return None
    try:
        return bytes.fromhex(value) if is_digest(value) else public_key_of(value)
    except Malformed as error:
        raise click.BadParameter("give a node's id (64 hexadecimal digits) or its peer id (12D3Koo…)") from error


def control_options(command: F) -> F:
    """Give a worker's command the option that says what the run's operator may ask of it, as `control`."""

    @functools.wraps(command)
    def run(*, allow_control: tuple[str, ...], **given: Any) -> Any:
        if NOTHING in allow_control and len(allow_control) > 1:
            raise click.UsageError(f"--allow-control {NOTHING} allows nothing else.")
        return command(control=frozenset(allow_control) - {NOTHING}, **given)

    option = click.option(
        "--allow-control",
        multiple=True,
        type=click.Choice([*PURPOSES, NOTHING]),
        default=sorted(FREE_PURPOSES, reverse=True),
        show_default=True,
        help="What the run's operator may ask of this worker by peers; repeatable. logs shows them its log.",
    )
    return option(cast("F", run))


@click.command()
@key_option("The run's key file: only the run gives authority.", required=True)
@click.option("--node", metavar="NODE", required=True, callback=_node, help="Who may ask: the id of the asker's key.")
@click.option(
    "--purpose", "purposes", multiple=True, required=True, type=click.Choice(PURPOSES), help="For what; repeatable."
)
@click.option(
    "--hours",
    type=click.FloatRange(min=0, min_open=True, max=MAX_AUTHORITY_SECONDS / 3600),
    required=True,
    help="For how long.",
)
@click.option("--subject", metavar="NODE", callback=_node, help="Only of this node.  [default: of any node of the run]")
def authority(*, key: Path, node: bytes, purposes: tuple[Purpose, ...], hours: float, subject: bytes | None) -> None:
    """Let somebody ask the run's nodes, for named purposes and a while.

    \b
    Example, then given to whoever has operator.key:
      swarmproof authority --key run.key --node $(swarmproof keys show operator.key) \\
        --purpose status --purpose logs --hours 8 > grant

    It is of no use without the other's key. To end it early, name that key to `swarmproof coordinator --revoke`.
    """
    run_key = load_key(key)
    now = int(time.time())
    granted = Authority(
        run_id=run_id_of(run_key.public_key().public_bytes_raw()),
        node=node.hex(),
        purposes=tuple(dict.fromkeys(purposes)),
        subject=None if subject is None else subject.hex(),
        issued_at=now,
        expires_at=now + max(1, int(hours * 3600)),
    )
    click.echo(base64.b64encode(sign_authority(granted, key=run_key)).decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asking:
    """Whom to ask, how, and how to show the answer."""

    node: bytes
    way: Way
    key: Path
    authority: Path | None
    state: Path | None
    address: Address | None
    seconds: float
    as_json: bool


_ASKING = all_of(
    click.argument("node", metavar="NODE", callback=_node),
    key_option("The asker's key file: the one that the authority was given to, or the run's own.", required=True),
    click.option(
        "--authority",
        type=FILE,
        help="The file that `swarmproof authority` made. Not needed with the run's key.",
    ),
    click.option("--address", metavar="MULTIADDR", help="Where the node is, if no peer is to be asked for it."),
    click.option(
        "--seconds",
        type=click.FloatRange(0, 600),
        default=45.0,
        show_default=True,
        help="For how long the node is looked for.",
    ),
    state_option("A folder in which to remember peers.  [default: under ~/.swarmproof]"),
    json_option(),
)


def _asking(command: F) -> F:
    """Give a command what all that ask have, as `asking`."""

    @functools.wraps(command)
    def run(*, way: Way, address: str | None, **given: Any) -> Any:
        try:
            at = None if address is None else parse_address(address)
        except Malformed as error:
            raise click.BadParameter(f"{error}.", param_hint="--address") from error
        names = ("node", "key", "authority", "state", "seconds", "as_json")
        said = {name: given.pop(name) for name in names}
        if at is not None and at.node != said["node"]:
            raise click.BadParameter("that is the address of another node.", param_hint="--address")
        return command(asking=_Asking(way=way, address=at, **said), **given)

    return calling_options(_ASKING(cast("F", run)))


@click.group()
def control() -> None:
    """Ask a node of the run: how it is, its log, to drain, to restart, to show its speed.

    \b
    Example:
      swarmproof control status 8c1f... --join swarmproof://5f3c... --key operator.key --authority grant

    A worker answers status and invite, and what its owner allows with --allow-control.
    """


@control.command("status")
@_asking
def ask_status(*, asking: _Asking) -> None:
    """Say what a worker is doing.

    \b
    Example:
      swarmproof control status 8c1f... \\
        --join swarmproof://5f3c... --key operator.key --authority grant
    """
    _show(asking, AskStatus())


@control.command("invite")
@click.option("--endpoint", metavar="URL", help="A coordinator that the run names.  [default: the one in use]")
@_asking
def ask_invite(*, asking: _Asking, endpoint: str | None) -> None:
    """Tell a worker that there is work: it asks its coordinator now, and is not drained any more.

    \b
    Example:
      swarmproof control invite 8c1f... \\
        --join swarmproof://5f3c... --key operator.key --authority grant
    """
    _show(asking, AskInvite(endpoint=None if endpoint is None else checked_url(endpoint)))


@control.command("drain")
@_asking
def ask_drain(*, asking: _Asking) -> None:
    """Let a worker finish its slots and take no more, until it is invited or started again.

    \b
    Example:
      swarmproof control drain 8c1f... \\
        --join swarmproof://5f3c... --key operator.key --authority grant
    """
    _show(asking, AskDrain())


@control.command("restart")
@_asking
def ask_restart(*, asking: _Asking) -> None:
    """Have a worker hand its slots back and start its engine anew.

    \b
    Example:
      swarmproof control restart 8c1f... \\
        --join swarmproof://5f3c... --key operator.key --authority grant
    """
    _show(asking, AskRestart())


@control.command("logs")
@click.option("--lines", type=click.IntRange(1, MAX_LOG_LINES), default=50, show_default=True, help="How many.")
@_asking
def ask_logs(*, asking: _Asking, lines: int) -> None:
    """Print the last lines of a worker's log, if its owner shows it.

    \b
    Example:
      swarmproof control logs 8c1f... \\
        --join swarmproof://5f3c... --key operator.key --authority grant
    """
    _show(asking, AskLogs(lines=lines))


@control.command("challenge")
@click.option(
    "--samples",
    type=click.IntRange(1, MAX_SAMPLES),
    default=MAX_SAMPLES,
    show_default=True,
    help="How many completions it draws.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, MAX_SAMPLE_TOKENS),
    default=MAX_SAMPLE_TOKENS,
    show_default=True,
    help="The most tokens of each; the run's own limit holds, too.",
)
@click.option(
    "--policy",
    type=FILE,
    help="The policy file that the worker has loaded, to check the answer as a verifier does.",
)
@_asking
def ask_challenge(*, asking: _Asking, samples: int, tokens: int, policy: Path | None) -> None:
    """Time a measured sample of work: what hardware the node has at its command.

    \b
    Example:
      swarmproof control challenge 8c1f... \\
        --join swarmproof://5f3c... --key operator.key --authority grant

    Drain it first for its whole speed. Without --policy only the answer's form is checked.
    """
    _show(asking, AskChallenge(samples=samples, max_tokens=tokens), policy=policy)


def _show(asking: _Asking, ask: Ask, *, policy: Path | None = None) -> None:
    """Ask, and print the answer."""
    lines, raw = asyncio.run(_ask(asking, ask, policy))
    if asking.as_json:
        click.echo(msgspec.json.encode(raw).decode())
    else:
        click.echo("\n".join(lines))


async def _ask(asking: _Asking, ask: Ask, policy: Path | None) -> tuple[list[str], Any]:
    from node.control.caller import calling, explain_fault

    key = load_key(asking.key)
    state = asking.state or Path.home() / ".swarmproof" / asking.way.run_id[:16] / "control"
    grant = None if asking.authority is None else _read_grant(asking.authority)
    async with calling(asking.way, key=key, authority=grant, state=state) as caller:
        # Before the clock runs: what measures the answer has to know the run.
        spec = await caller.spec(seconds=asking.seconds) if isinstance(ask, AskChallenge) else None
        try:
            answered = await caller.ask(asking.node, ask, address=asking.address, find_seconds=asking.seconds)
        except PeerFault as error:
            raise NodeError(explain_fault(error, asking.node), code=error.code) from error
    if isinstance(answered.body, ChallengeBody) and isinstance(ask, AskChallenge) and spec is not None:
        from node.control.challenge import appraise_challenge
        from node.verification.readings import read_by_transformers

        prefill = None if policy is None else await asyncio.to_thread(read_by_transformers, policy, spec=spec)
        shown = await asyncio.to_thread(
            appraise_challenge,
            answered.body,
            ask,
            spec=spec,
            run_id=asking.way.run_id,
            node=asking.node,
            nonce=answered.nonce,
            seconds=answered.seconds,
            prefill=prefill,
        )
        return challenge_lines(shown), {**dataclasses.asdict(shown), "tokens_per_s": shown.tokens_per_second}
    return lines_of(answered.body), answered.body


def _read_grant(path: Path) -> bytes:
    try:
        grant = base64.b64decode(read_bounded(path, max_bytes=MAX_GRANT_BYTES).strip(), validate=True)
        open_authority(grant)
    except (binascii.Error, PeerFault) as error:
        raise ConfigError(f"{path} is no authority; have one made with `swarmproof authority`.") from error
    return grant
