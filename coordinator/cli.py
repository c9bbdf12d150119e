"""The operator's commands: coordinator, leader, verifier, trainer, calibration, and what keeps a run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from coordinator.commands.backup import backup, restore
from coordinator.commands.calibrate import calibrate
from coordinator.commands.check import check
from coordinator.commands.dataset import dataset
from coordinator.commands.evaluate import evaluate
from coordinator.commands.export import export
from coordinator.commands.importing import importing
from coordinator.commands.init import init
from coordinator.commands.join_string import LOOPBACK, join_string
from coordinator.commands.options import (
    HOME_WAIT_SECONDS,
    contact_options,
    data_options,
    keep_evidence_option,
    limit_options,
    own_state_option,
    run_file_option,
    run_key_option,
)
from coordinator.commands.plan import plan
from coordinator.commands.problems import problems
from coordinator.commands.roles import RoleCommand, role_option
from coordinator.commands.sft import sft
from coordinator.commands.stakes import stakes
from coordinator.commands.trainer import trainer
from coordinator.run.definition import is_calibrated, keep_locks, read_run_file
from coordinator.run.home import Home, create_home, open_home
from coordinator.run.peer_setup import open_to_peers
from node.commands.engine_options import (
    check_engine,
    engine_options,
    import_models,
    prefills_maker,
    refuse_vllm_options,
)
from node.commands.memory_options import policy_memory_bytes, policy_memory_option
from node.commands.options import listen_options, metrics_options, number_option
from node.datasets.folder import DATASETS
from node.keys.identity import load_key
from node.protocol.run import RunSpec
from node.relay.advice import source_url
from node.runtime.logs import name_process
from node.runtime.signals import stop_on_signals

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005
FULL_SEARCH_EVERY = 100
"""Searches for garbage among the newer objects for one among all, by default 10.

That one takes 30 to 95 ms with a thousand connections, in which no request is answered, and finds next to nothing: of
what peers send only what is no HTTP leaves cycles, 6 KiB a connection, and nearly all of those are found while new.
"""


def _warn_of_defaults(spec: RunSpec) -> None:
    if not is_calibrated(spec):
        log.warning("limits.honest is not set: the defaults know nothing of this model; run `swarmproof calibrate`")


@click.command()
@data_options
@click.option("--name", help="What the status calls it.  [default: this machine's name]")
@keep_evidence_option
@metrics_options
def leader(
    *,
    data: Path,
    database_url: str | None,
    name: str | None,
    keep_evidence: int | None,
    metrics_host: str,
    metrics_port: int | None,
) -> None:
    """Do what is to be done now and then for a whole run: end leases, sweep up, remove old files.

    \b
    Example:
      swarmproof leader --data run/ --database-url postgresql://...

    One leads at a time; others stand by, and take over when it is gone.
    """
    from coordinator.metrics.roles import leader_registry
    from coordinator.run.leader import Leader
    from coordinator.run.release_watch import release_watch
    from node.runtime.metrics import serving_metrics
    from node.runtime.service_manager import ALIVE, READY, notify

    home = open_home(data, database_url=database_url, wait_seconds=HOME_WAIT_SECONDS)
    name_process(run=home.run_id, name=name or "leader")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    offering = Leader(home, name=name, keep_evidence_days=keep_evidence)
    registry = leader_registry(home, leads=lambda: offering.leading)
    with serving_metrics(registry, metrics_host, metrics_port), release_watch(home):
        offering.run(stop, polled=lambda: notify(READY, ALIVE))


@click.command()
@data_options
@own_state_option
@click.option("--name", default="verifier-1", show_default=True, help="Unique among the verifiers of a run.")
@click.option(
    "--source", "sources", multiple=True, required=True, metavar="URL", help="An origin or relay; repeatable."
)
@number_option(
    "--evidence-tokens",
    "Most tokens of a submission whose measurements are kept for its page; 0 keeps none.",
    least=0,
    default=16_384,
)
@engine_options
@policy_memory_option
@metrics_options
def verifier(
    *,
    data: Path,
    database_url: str | None,
    state: Path,
    name: str,
    sources: tuple[str, ...],
    evidence_tokens: int,
    engine: str,
    device: str,
    threads: int | None,
    policy_memory: float | None,
    metrics_host: str,
    metrics_port: int | None,
    **settings: Any,
) -> None:
    """Judge submissions by a prefill under their policy.

    \b
    Example:
      swarmproof verifier --data run/ --state verifier-1/ \\
        --source http://127.0.0.1:8710

    Start as many as the queue needs; each wants its own --name and --state. --engine torch prefills with
    transformers, the reference; vllm is for policies that only vLLM can hold.
    """
    refuse_vllm_options(engine)
    check_engine(engine, device)
    import_models()
    from coordinator.integrity.start import check_start
    from coordinator.metrics.roles import VerifierMetrics, role_registry
    from coordinator.run.heartbeat import Condition, heartbeat
    from coordinator.run.release_watch import release_watch
    from coordinator.storage.heartbeats import Role
    from coordinator.verifier.daemon import Verifier, VerifierSettings
    from coordinator.verifier.evidence import EvidenceLimits
    from node.runtime.metrics import serving_metrics
    from shardcast.serve.metrics import DiskCollector

    make_prefills = prefills_maker(engine, device=device, threads=threads, state=state, **settings)
    home = open_home(data, database_url=database_url, wait_seconds=HOME_WAIT_SECONDS)
    check_start(home, state)
    _warn_of_defaults(home.spec)
    chosen = VerifierSettings(
        name=name,
        state=state,
        sources=sources,
        threads=threads or 1,
        policy_memory=policy_memory_bytes(policy_memory, engine=engine, device=device),
        make_prefills=make_prefills,
        evidence=EvidenceLimits(tokens=evidence_tokens),
    )
    name_process(run=home.run_id, name=name)
    registry = role_registry("verifier", home, state=state)
    registry.register(DiskCollector(state))

    condition = Condition()

    async def work() -> None:
        await Verifier(home, chosen, VerifierMetrics(registry), condition).run(stop_on_signals())

    served = serving_metrics(registry, metrics_host, metrics_port)
    with served, heartbeat(home, Role.VERIFIER, name, condition), release_watch(home):
        asyncio.run(work())


@click.command(cls=RoleCommand)
@role_option
@run_file_option("run.toml: the model, the problems, the batch and the limits of the run.")
@click.option(
    "--check", is_flag=True, help="Look at run.toml, key, data and first policy, create nothing, and end with 0 or 2."
)
@click.option(
    "--model-elsewhere",
    is_flag=True,
    help="The folder of model.initial is on the trainer's machine alone: begin without looking at it.",
)
@click.option(
    "--uncalibrated",
    is_flag=True,
    help="Begin a run whose limits nobody has calibrated, to try things out: they cannot change later.",
)
@run_key_option
@data_options
@click.option(
    "--blobs",
    "blobs_url",
    metavar="URL",
    help="s3://BUCKET/PREFIX: an object store for submissions and evidence, fixed by the first start.  "
    "[default: blobs/ in --data]",
)
@listen_options(8700)
@click.option("--relay", "relays", multiple=True, metavar="URL", help="A relay to tell nodes about; repeatable.")
@click.option(
    "--witness",
    "witnesses",
    multiple=True,
    metavar="VKEY@URL",
    help="A witness that signs the log's checkpoints: its key and address; repeatable.",
)
@keep_evidence_option
@contact_options
@limit_options
@click.pass_context
def coordinator(
    ctx: click.Context,
    /,
    *,
    role: str,
    run_file: Path,
    check: bool,
    model_elsewhere: bool,
    uncalibrated: bool,
    key: Path,
    data: Path,
    database_url: str | None,
    blobs_url: str | None,
    host: str,
    port: int,
    relays: tuple[str, ...],
    witnesses: tuple[str, ...],
    keep_evidence: int | None,
    requests_per_minute: int,
    node_requests_per_minute: int,
    max_connections: int,
    connections_per_address: int,
    leases_per_address: int,
    proxies: tuple[str, ...],
    **contact: Any,
) -> None:
    """Serve a run: give out work, take submissions, keep the log.

    \b
    Example, a new run:
      swarmproof init
      swarmproof calibrate --run run.toml
      swarmproof coordinator --run run.calibrated.toml --key run.key --data run/

    Then start `swarmproof verifier` and `swarmproof trainer` on the same --data. For more than one machine, start
    each --role by itself, any number of each, with --database-url postgresql://...
    """
    if check:
        from coordinator.commands.preflight import preflight_checks, show_checks

        found = preflight_checks(
            run_file,
            key,
            data,
            database_url=database_url,
            blobs_url=blobs_url,
            model_elsewhere=model_elsewhere,
            uncalibrated=uncalibrated,
        )
        ctx.exit(show_checks(found))
    from coordinator.app import create_app
    from coordinator.http.connections import ConnectionLimits, allow_connections, listening_socket, server_config
    from coordinator.http.service import RequestLimits
    from coordinator.http.shutdown import Server
    from coordinator.metrics.roles import watch_leadership
    from coordinator.run.leader import Leader, leader_thread
    from coordinator.run.release_watch import release_watch
    from coordinator.run.service import Coordinator
    from coordinator.run.witnesses import witnessing_thread
    from node.client.witness import reachable_witnesses

    asked = reachable_witnesses(witnesses)
    _, spec = read_run_file(run_file, datasets=data / DATASETS)
    keep_locks(spec, data / DATASETS)
    run_key = load_key(key)
    relays = tuple(map(source_url, relays))
    limits = allow_connections(
        ConnectionLimits(connections=max_connections, connections_per_address=connections_per_address, proxies=proxies)
    )
    listening = listening_socket(host, port)
    home = _open_or_create(
        data,
        listening,
        public_key=run_key.public_key().public_bytes_raw(),
        spec=spec,
        database_url=database_url,
        blobs_url=blobs_url,
        model_elsewhere=model_elsewhere,
        uncalibrated=uncalibrated,
    )
    name_process(run=home.run_id, name=role)
    _warn_of_defaults(home.spec)
    bound = listening.getsockname()[1]
    click.echo(f"run id  {home.run_id}")
    if role == "api" and contact["with_peer"] is None:
        contact["with_peer"] = False  # one of several, of which at most one runs the peer
    opened = open_to_peers(host, bound, run_id=home.run_id, data=data, **contact)
    service = Coordinator(
        home, key=run_key, relay_urls=relays, leases_per_address=leases_per_address, contacts=opened.contacts
    )
    service.descriptor(now=time.time())  # for `swarmproof join-string`, from the first moment on
    click.echo(f"serving at http://{host}:{bound}; workers join by")
    if (joining := service.joining) is not None:
        click.echo(f"  {joining.command}")
        if joining.is_loopback:
            click.echo(LOOPBACK)
    request_limits = RequestLimits(per_address=requests_per_minute, per_node=node_requests_per_minute)
    app = create_app(service, limits=request_limits)
    offering = Leader(home, keep_evidence_days=keep_evidence)
    if role == "all":
        watch_leadership(app.state.service.metrics.registry, leads=lambda: offering.leading)
    # A thread that has a database connection's lock must not wait 5 ms for the interpreter's after each statement.
    sys.setswitchinterval(SWITCH_SECONDS)
    # What modules define stays: a search of it for garbage takes 0.1 s, in which no request is answered.
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], FULL_SEARCH_EVERY)
    leading = leader_thread(offering) if role == "all" else contextlib.nullcontext()
    with opened.peer, leading, witnessing_thread(service, asked), release_watch(home):
        Server(server_config(app, limits), app.state.service.shutdown).serve_on(listening)


def _open_or_create(
    data: Path, listening: socket.socket, *, model_elsewhere: bool, uncalibrated: bool, **run: Any
) -> Home:
    """Return the home of `run`, what `create_home` takes; closes the socket where it is refused."""
    from coordinator.integrity.start import check_start
    from coordinator.run.first_policy import startable

    with contextlib.ExitStack() as refused:
        refused.callback(listening.close)
        looked_at = partial(startable, model_elsewhere=model_elsewhere, uncalibrated=uncalibrated)
        home = create_home(data, wait_seconds=HOME_WAIT_SECONDS, before_first=looked_at, **run)
        check_start(home)
        refused.pop_all()
    home.blobs.clear_leftovers()
    return home


COMMANDS = [init, coordinator, leader, verifier, trainer, calibrate, stakes, join_string]
COMMANDS += [dataset, plan, sft, evaluate, problems, export, importing, backup, restore, check]
"""What the entry point `swarmproof.commands` offers to the command line."""
