"""`swarmproof trainer`: one process, or several that `torchrun` started."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.commands.options import (
    HOME_WAIT_SECONDS,
    data_options,
    evaluation_options,
    execution_options,
    own_state_option,
    run_key_option,
    tracker_options,
)
from coordinator.errors import BadConfiguration
from coordinator.run.home import Home, open_home
from node.commands.engine_options import import_models
from node.commands.options import listen_options, metrics_options, number_option, threads_option
from node.commands.serving_options import server_limits, serving_options
from node.keys.identity import load_key
from node.protocol.run import run_id_of
from node.runtime.logs import name_process

if TYPE_CHECKING:
    from coordinator.training.trackers import Tracker
    from coordinator.training.trainer import TrainerSettings
    from shardcast import Origin, OriginServer


@click.command()
@data_options
@run_key_option
@own_state_option
@listen_options(8710)
@threads_option("CPU threads: torch's, 1 by default; and those that hash and encode policies, by default every core.")
@execution_options
@number_option(
    "--checkpoint-every",
    "Steps between two checkpoints; a killed trainer trains those since the last one again.",
    default=1,
    metavar="STEPS",
)
@tracker_options
@evaluation_options
@number_option("--keep-versions", "Newest policies that stay on disk whole; older ones as deltas.  [default: all]")
@serving_options
@metrics_options
def trainer(
    *,
    data: Path,
    database_url: str | None,
    key: Path,
    state: Path,
    threads: int | None,
    metrics_host: str,
    metrics_port: int | None,
    row_tokens: int,
    recompute: bool,
    device: str,
    autocast: str | None,
    checkpoint_every: int,
    tensorboard: Path | None,
    no_tensorboard: bool,
    wandb: str | None,
    evaluate_every: int,
    evaluate_problems: int,
    keep_versions: int | None,
    **serving: Any,
) -> None:
    """Train on what was admitted, and publish each policy.

    \b
    Example:
      swarmproof trainer --data run/ --key run.key --state trainer/ --port 8710

    It serves the policies, too, as the run's origin. Relays take that as their upstream:
    swarmproof relay --upstream http://HOST:8710 ...

    \b
    Several processes hold a model and its optimizer together (FSDP2):
      torchrun --nproc-per-node 4 -m node.cli trainer --data run/ ...
    """
    import_models()
    import torch

    from coordinator.integrity.start import check_start
    from coordinator.training.distributed_learner import Team
    from coordinator.training.evaluation import EvaluationSettings
    from coordinator.training.grpo import Execution
    from coordinator.training.trackers import make_tracker, tracker_settings
    from coordinator.training.trainer import TrainerSettings
    from coordinator.training.world import open_world
    from node.engines.device import find_device
    from node.engines.torch import TorchEngine

    dtype = torch.bfloat16 if autocast else None
    with open_world(device=find_device(device).type, gathered_in=dtype) as world:
        torch_threads = threads or 1
        make_engine = partial(TorchEngine, device=world.device, threads=torch_threads)
        settings = TrainerSettings(
            state=state,
            threads=torch_threads,
            execution=Execution(world=world, row_tokens=row_tokens, autocast=dtype, recompute=recompute),
            checkpoint_every=checkpoint_every,
            evaluate_every=evaluate_every,
            evaluation=EvaluationSettings(problems=evaluate_problems, make_engine=make_engine),
        )
        if not world.is_first:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # the first process says when it is over
            torch.set_num_threads(torch_threads)
            Team(state, settings.execution).follow()
            return
        home = open_home(data, database_url=database_url, wait_seconds=HOME_WAIT_SECONDS)
        check_start(home, state)
        watched = tracker_settings(state=state, tensorboard=tensorboard, no_tensorboard=no_tensorboard, wandb=wandb)
        tracker = make_tracker(watched, run_id=home.run_id, name=home.spec.name, config=home.spec, state=state)
        try:
            _train(
                home,
                _run_key(home, key),
                settings,
                tracker=tracker,
                metrics_at=(metrics_host, metrics_port),
                serving=serving,
                broadcast={"keep_whole": keep_versions, "threads": threads},
            )
        finally:
            tracker.close()


def _train(
    home: Home,
    run_key: Ed25519PrivateKey,
    settings: TrainerSettings,
    *,
    tracker: Tracker,
    metrics_at: tuple[str, int | None],
    serving: dict[str, Any],
    broadcast: dict[str, Any],
) -> None:
    """Train, and serve what is trained, until SIGTERM or SIGINT."""
    from coordinator.metrics.roles import TrainerMetrics, role_registry
    from coordinator.run.heartbeat import Condition, heartbeat
    from coordinator.run.release_watch import release_watch
    from coordinator.storage.heartbeats import Role
    from coordinator.storage.training import newest_version
    from coordinator.training.distributed_learner import FIRST_POLICY
    from coordinator.training.trainer import Trainer
    from node.runtime.metrics import serving_metrics

    with home.database.read() as connection:
        recorded = newest_version(connection)
    with _serving(home, run_key, settings.state, recorded=recorded, serving=serving, broadcast=broadcast) as served:
        if recorded is None and not (settings.state / FIRST_POLICY).exists():
            served.announce()  # making the first policy may take a while
        name_process(run=home.run_id, name="trainer")
        registry = role_registry("trainer", home, state=settings.state)
        condition = Condition()
        work = Trainer(
            home,
            origin=served.origin,
            server=served.server,
            settings=settings,
            metrics=TrainerMetrics(registry),
            tracker=tracker,
            announce=served.announce,
            condition=condition,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: work.stop())
        beating = heartbeat(home, Role.TRAINER, socket.gethostname(), condition)
        with serving_metrics(registry, *metrics_at), beating, release_watch(home):
            work.run()


class _Served(NamedTuple):
    """The origin, the server that it is served by, and what tells the run where that is."""

    origin: Origin
    server: OriginServer
    announce: Callable[[], None]


@contextlib.contextmanager
def _serving(
    home: Home,
    run_key: Ed25519PrivateKey,
    state: Path,
    *,
    recorded: int | None,
    serving: dict[str, Any],
    broadcast: dict[str, Any],
) -> Iterator[_Served]:
    """Serve the run's policies, of which the log has those up to `recorded`, and its datasets while the block runs."""
    from coordinator.run.peer_child import bracketed
    from coordinator.storage.facts import ORIGIN, put_fact
    from node.discovery.addresses import reachable_hosts
    from node.runtime.service_manager import report_serving
    from shardcast import Origin, OriginServer

    origin = Origin(
        state / "origin",
        run_key,
        home.run_id,
        # A policy that is stored but not in the log yet must not be heard of.
        announced=-1 if recorded is None else recorded,
        **broadcast,
    )
    host, port = serving.pop("host"), serving.pop("port")
    contents = _publish_datasets(home, run_key, state, threads=broadcast["threads"])
    limits = server_limits(**serving)
    server = OriginServer(origin, host, port, limits=limits, contents=contents, beside=report_serving)
    port = server.start()
    click.echo(f"origin  http://{host}:{port}")

    def announce() -> None:
        with home.database.write() as connection:
            put_fact(connection, ORIGIN, f"http://{bracketed(reachable_hosts(host)[0])}:{port}")

    try:
        yield _Served(origin, server, announce)
    finally:
        server.stop()
        for each in (origin, *contents.values()):
            each.close()


def _publish_datasets(home: Home, run_key: Ed25519PrivateKey, state: Path, *, threads: int | None) -> dict[str, Origin]:
    """Sign the run's datasets for whoever joins; raises BadConfiguration for one that is not in the data folder."""
    from node.datasets.folder import DATASETS, dataset_name
    from shardcast import publish_content

    published: dict[str, Origin] = {}
    for dataset in home.spec.files:
        if (path := home.datasets.get(dataset.digest)) is None:
            raise BadConfiguration(
                f"the {dataset_name(home.spec, dataset.digest)} ({dataset.digest[:16]}…) is not in "
                f"{home.folder / DATASETS}: copy it there from the coordinator's --data"
            )
        published[dataset.digest] = publish_content(
            path,
            digest=dataset.digest,
            folder=state / DATASETS,
            key=run_key,
            run_id=home.run_id,
            name=dataset_name(home.spec, dataset.digest),
            threads=threads,
        )
    return published


def _run_key(home: Home, path: Path) -> Ed25519PrivateKey:
    key = load_key(path)
    if run_id_of(key.public_key().public_bytes_raw()) != home.run_id:
        raise BadConfiguration(f"{path} is not the key of the run in {home.folder}")
    return key
