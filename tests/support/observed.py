"""A small swarm of real processes as an operator watches one: each logs JSON in every detail, and shows metrics.

Of every role there is one at least: the coordinator's parts in one process and a leader that stands by, a trainer, a
verifier, two relays, a worker that serves what it fetches, and a peer.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from run_files import small_run_toml
from waiting import is_quiet, until

from coordinator.lab.processes.layout import Swarm, free_ports, lay_out
from coordinator.lab.processes.local_http import get, get_json
from coordinator.lab.processes.supervisor import Command, Supervisor

HOST = "127.0.0.1"
RUN_TOML = small_run_toml("watched", steps=3, groups_per_step=2)
PRINTED = re.compile(r"run id  |This address is |serving at |  swarmproof worker |origin  |swarmproof://")
START_SECONDS, FINISH_SECONDS = 300.0, 300.0
PRIVATE = {
    "trainer": "trainer",
    "verifier": "verifier",
    "leader": "leader",
    "relay-root": "relay",
    "honest-1": "worker",
}
"""Which processes get --metrics-port, and what they are."""


@dataclass
class Observed:
    """What was seen of the swarm: metrics by role and name, and the log of each process, line by line.

    The role "broadcast" is the port on which policies are served: by the origin, a relay and a worker.
    """

    swarm: Swarm
    exposed: dict[str, dict[str, list[Metric]]] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)

    def values(self, role: str, name: str, **labels: str) -> list[float]:
        """The values of all samples of a role with this name and these labels, and maybe others."""
        return [
            sample.value
            for metrics in self.exposed[role].values()
            for metric in metrics
            for sample in metric.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def records(self, process: str) -> list[dict[str, Any]]:
        """A process's log, without what it prints for people on stdout, which the supervisor keeps with it."""
        return [json.loads(line) for line in self.lines[process] if not PRINTED.match(line)]


def logging_all(command: Command, *more: str) -> Command:
    """The same process, with every detail in its log."""
    module, name, *rest = command.arguments
    assert (module, name) == ("-m", "node.cli")
    return replace(command, arguments=(module, name, "-v", "--log-format", "json", *rest, *more))


def scrape(url: str) -> dict[str, Metric]:
    """The metrics there, by name."""
    text = get(url, seconds=10.0).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


@contextmanager
def watched_swarm(folder: Path) -> Iterator[tuple[Swarm, Supervisor, dict[str, str]]]:
    """The swarm, running, and where each role shows its metrics."""
    swarm = lay_out(folder, RUN_TOML, honest=1, hostile=(), leaves=1)
    ports = dict(zip((*PRIVATE, "peer", "serving"), free_ports(len(PRIVATE) + 2), strict=True))
    urls = {role: f"http://{HOST}:{ports[name]}/metrics" for name, role in PRIVATE.items()}
    urls |= {"api": f"{swarm.coordinator_url}/metrics", "peer": f"http://{HOST}:{ports['peer']}/metrics"}
    serving = (swarm.origin_url, swarm.relays["relay-root"], f"http://{HOST}:{ports['serving']}")
    urls |= {f"broadcast {number}": f"{url}/metrics" for number, url in enumerate(serving)}
    commands = list(swarm.commands)
    join = next(command for command in commands if command.name == "honest-1").arguments
    where = join[join.index("--join") + 1]
    peer = ("-m", "node.cli", "peer", "--join", where, "--peer-listen", f"{HOST}:0", "--state", str(folder / "peer-2"))
    leader = ("-m", "node.cli", "leader", "--data", str(folder / "data"))
    commands += [Command("leader", leader, wave=1), Command("peer", peer, wave=1)]

    def with_metrics(command: Command) -> Command:
        asked = ("--metrics-port", str(ports[command.name])) if command.name in ports else ()
        serving = ("--serve", f"{HOST}:{ports['serving']}") if command.name == "honest-1" else ()
        return logging_all(command, *asked, *serving)

    with Supervisor(folder / "logs", grace_seconds=8.0) as supervisor:
        supervisor.start([with_metrics(command) for command in commands])
        yield swarm, supervisor, urls


def observe(folder: Path) -> Observed:
    """Run a swarm to its last step, ask it something wrong on the way, and keep what it showed."""
    with watched_swarm(folder) as (swarm, supervisor, urls):

        def status() -> dict[str, Any]:
            return get_json(f"{swarm.coordinator_url}/v1/status", seconds=60.0) or {}

        def tails() -> dict[str, str]:
            return {name: supervisor.log_tail(name, lines=4) for name in supervisor.pids}

        poll = supervisor.poll
        until(lambda: status().get("finished_steps", 0) >= 1, seconds=START_SECONDS, meanwhile=poll, what=tails)
        ask_wrongly(swarm.coordinator_url)
        until(lambda: bool(status().get("finished")), seconds=FINISH_SECONDS, meanwhile=poll, what=tails)
        until(lambda: is_quiet(status()), seconds=120.0, meanwhile=poll, what=tails)
        time.sleep(1.1)  # what an API shows is up to a second old
        observed = Observed(swarm)
        for role, url in urls.items():
            of_role = observed.exposed.setdefault(role.split()[0], {})
            for name, metric in scrape(url).items():
                of_role.setdefault(name, []).append(metric)
    for path in sorted((folder / "logs").iterdir()):
        observed.lines[path.name.removesuffix(".log")] = path.read_text().splitlines()
    return observed


def ask_wrongly(url: str) -> None:
    """A request with a header that is no signature, from somebody who would like to be quoted."""
    request = urllib.request.Request(
        f"{url}/v1/leases", data=b"{}", headers={"Authorization": "Swarmproof not-a-signature"}, method="POST"
    )
    try:
        urllib.request.urlopen(request, timeout=10)
    except urllib.error.HTTPError as error:
        error.close()
        assert error.code == 401
