"""`swarmproof authority` and `swarmproof control`: grant control rights, and send control requests."""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import click

from node.client.http import checked_url
from node.commands.joining_options import calling_options
from node.commands.options import (
    EXISTING_FOLDER,
    FILE,
    F,
    all_of,
    json_line,
    json_option,
    key_option,
    number_option,
    state_option,
)
from node.control.report import challenge_lines, lines_of
from node.errors import ConfigError, NodeError
from node.joining.options import JoinOptions
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


def parse_node(_ctx: click.Context, _param: click.Parameter, value: str | None) -> bytes | None:
    """Return a node's public key, from its id or its PeerId; raises BadParameter."""
    if value is None:
        return None
    try:
        return bytes.fromhex(value) if is_digest(value) else public_key_of(value)
    except Malformed as error:
        raise click.BadParameter("give a node's id (64 hexadecimal digits) or its peer id (12D3Koo…)") from error


def control_options(command: F) -> F:
    """Add `--allow-control` to a worker's command, passed as the set `control`."""

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
@click.option(
    "--node", metavar="NODE", required=True, callback=parse_node, help="Who may ask: the id of the asker's key."
)
@click.option(
    "--purpose", "purposes", multiple=True, required=True, type=click.Choice(PURPOSES), help="For what; repeatable."
)
@click.option(
    "--hours",
    type=click.FloatRange(min=0, min_open=True, max=MAX_AUTHORITY_SECONDS / 3600),
    required=True,
    help="For how long.",
)
@click.option(
    "--subject", metavar="NODE", callback=parse_node, help="Only of this node.  [default: of any node of the run]"
)
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
class _Target:
    """The node to ask, how to reach it, and how to print its reply."""

    node: bytes
    join: JoinOptions
    key: Path
    authority: Path | None
    state: Path | None
    address: Address | None
    seconds: float
    as_json: bool


_TARGET_OPTIONS = all_of(
    click.argument("node", metavar="NODE", callback=parse_node),
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


def _purpose(name: Purpose) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function the subcommand `name`, with the options of `_Target` as `target` and an example in its help."""
    example = "swarmproof://5f3c... --key operator.key --authority grant"

    def make(function: Callable[..., None]) -> click.Command:
        usage = f"\b\nExample:\n  swarmproof control {name} 8c1f... \\\n    --join {example}"
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{usage}"
        return control.command(name)(_target_options(function))

    return make


def _target_options(command: F) -> F:
    @functools.wraps(command)
    def run(*, join: JoinOptions, address: str | None, **given: Any) -> Any:
        try:
            at = None if address is None else parse_address(address)
        except Malformed as error:
            raise click.BadParameter(f"{error}.", param_hint="--address") from error
        names = ("node", "key", "authority", "state", "seconds", "as_json")
        said = {name: given.pop(name) for name in names}
        if at is not None and at.node != said["node"]:
            raise click.BadParameter("that is the address of another node.", param_hint="--address")
        return command(target=_Target(join=join, address=at, **said), **given)

    return calling_options(_TARGET_OPTIONS(cast("F", run)))


@click.group()
def control() -> None:
    """Ask a node of the run: how it is, its log, to drain, to restart, to show its speed.

    \b
    Example:
      swarmproof control status 8c1f... --join swarmproof://5f3c... --key operator.key --authority grant

    A worker answers status and invite, and what its owner allows with --allow-control.
    """


@_purpose("status")
def ask_status(*, target: _Target) -> None:
    """Print what a worker is doing."""
    _show(target, AskStatus())


@_purpose("invite")
@click.option("--endpoint", metavar="URL", help="A coordinator that the run names.  [default: the one in use]")
def ask_invite(*, target: _Target, endpoint: str | None) -> None:
    """Have a worker ask for work now, and end its drain."""
    _show(target, AskInvite(endpoint=None if endpoint is None else checked_url(endpoint)))


@_purpose("drain")
def ask_drain(*, target: _Target) -> None:
    """Let a worker finish its slots and take no more, until it is invited or started again."""
    _show(target, AskDrain())


@_purpose("restart")
def ask_restart(*, target: _Target) -> None:
    """Have a worker return its leases and restart its engine."""
    _show(target, AskRestart())


@_purpose("logs")
@number_option("--lines", "How many.", most=MAX_LOG_LINES, default=50)
def ask_logs(*, target: _Target, lines: int) -> None:
    """Print the last lines of a worker's log, if its owner allows it."""
    _show(target, AskLogs(lines=lines))


@_purpose("challenge")
@number_option("--samples", "How many completions it draws.", most=MAX_SAMPLES, default=MAX_SAMPLES)
@number_option(
    "--tokens",
    "The most tokens of each; the run's own limit holds, too.",
    most=MAX_SAMPLE_TOKENS,
    default=MAX_SAMPLE_TOKENS,
)
@click.option(
    "--policy",
    type=FILE,
    help="The policy file that the worker has loaded, to check the answer as a verifier does.",
)
@click.option(
    "--datasets", type=EXISTING_FOLDER, metavar="FOLDER", help="With --policy: where the run's datasets are, if any."
)
def ask_challenge(*, target: _Target, samples: int, tokens: int, policy: Path | None, datasets: Path | None) -> None:
    """Time a sample of work, to measure the hardware at the node's command.

    Drain it first for its whole speed. Without --policy only the answer's form is checked.
    """
    _show(target, AskChallenge(samples=samples, max_tokens=tokens), policy=policy, datasets=datasets)


def _show(target: _Target, ask: Ask, *, policy: Path | None = None, datasets: Path | None = None) -> None:
    """Send the request and print the reply."""
    lines, raw = asyncio.run(_ask(target, ask, policy, datasets))
    if target.as_json:
        click.echo(json_line(raw))
    else:
        click.echo("\n".join(lines))


async def _ask(target: _Target, ask: Ask, policy: Path | None, datasets: Path | None) -> tuple[list[str], Any]:
    from node.control.caller import control_client, explain_fault

    key = load_key(target.key)
    state = target.state or Path.home() / ".swarmproof" / target.join.run_id[:16] / "control"
    grant = None if target.authority is None else _read_grant(target.authority)
    async with control_client(target.join, key=key, authority=grant, state=state) as caller:
        # Before the clock runs: what measures the answer has to know the run.
        spec = await caller.spec(seconds=target.seconds) if isinstance(ask, AskChallenge) else None
        try:
            answered = await caller.ask(target.node, ask, address=target.address, find_seconds=target.seconds)
        except PeerFault as error:
            raise NodeError(explain_fault(error, target.node), code=error.code) from error
    if isinstance(answered.body, ChallengeBody) and isinstance(ask, AskChallenge) and spec is not None:
        from node.control.challenge import appraise_challenge
        from node.datasets.folder import find_datasets
        from node.verification.readings import read_by_transformers

        prefill = None if policy is None else await asyncio.to_thread(read_by_transformers, policy, spec=spec)
        shown = await asyncio.to_thread(
            appraise_challenge,
            answered.body,
            ask,
            spec=spec,
            run_id=target.join.run_id,
            node=target.node,
            nonce=answered.nonce,
            seconds=answered.seconds,
            prefill=prefill,
            datasets={} if datasets is None else find_datasets(datasets, spec.files),
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
