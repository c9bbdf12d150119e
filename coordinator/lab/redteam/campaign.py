"""A red team's run from beginning to end: a real swarm, hostile processes in it, an audit, and who got how far."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from coordinator.lab.processes.journal import JOURNAL, read_nodes
from coordinator.lab.processes.layout import BAD_RELAY, Hostile, Swarm, lay_out
from coordinator.lab.processes.local_http import get_json
from coordinator.lab.processes.run import SwarmRun, discard_state, new_folder
from coordinator.lab.processes.summary import AuditRow
from coordinator.lab.processes.supervisor import Supervisor
from coordinator.lab.redteam.attack import Attack
from coordinator.lab.redteam.attacks import ATTACKS
from coordinator.lab.redteam.relay import NAME as CORRUPT_RELAY
from coordinator.lab.redteam.rules import redteam_run_toml
from coordinator.lab.redteam.tally import SCHEMA, AttackResult, AttackRow, attack_rows, read_journals
from node.protocol.admission import Outcome

KEPT = frozenset({"logs", "redteam.json", "run.toml", "journals"})
PROCESSES = 2
SLOTS_AT_ONCE = 1
"""Of an honest worker: with more, its batches are so much cheaper for each slot that attackers cannot keep up."""

DOOR_SECONDS = 5.0
_STATUS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class CampaignSettings:
    """What the command line says. `hostile` is the share of submitted slots that the attackers aim at; 0 for none.

    `attacks` are names, none for all of them; `run_toml` are other rules than a red team's own.
    """

    hostile: float = 0.33
    steps: int = 30
    workers: int = 2
    seed: int = 2
    attacks: tuple[str, ...] = ()
    out: Path = Path("runs")
    run_toml: str | None = None
    headless: bool = False
    as_json: bool = False

    @property
    def chosen(self) -> list[type[Attack]]:
        """The attacks, in the order in which they are listed."""
        return [attack for name, attack in ATTACKS.items() if not self.attacks or name in self.attacks]


class Campaign:
    """One run with hostile processes in it."""

    def __init__(self, settings: CampaignSettings) -> None:
        self._settings = settings
        rules = settings.run_toml or redteam_run_toml(steps=settings.steps, seed=settings.seed)
        self._swarm = lay_out(
            new_folder(settings.out),
            rules,
            honest=settings.workers,
            worker_options=("--slots", str(SLOTS_AT_ONCE)),
            hostile=_parties(settings) if settings.hostile else (),
            bad_relay=settings.hostile > 0,
        )
        self.console = Console(stderr=settings.as_json)
        self._run = SwarmRun(self._swarm, self.console, title="swarmproof redteam", headless=settings.headless)

    @property
    def folder(self) -> Path:
        """Where the result is."""
        return self._swarm.folder

    def run(self) -> AttackResult:
        """Do all of it; raises DemoError, and KeyboardInterrupt for a signal, when every process has ended."""
        run, folder = self._run, self._swarm.folder
        try:
            with run.started() as supervisor, run.watched(supervisor):
                run.until_trained(supervisor)
                relay = self._relay_row()
                audit = run.audit(supervisor)
                result = self._result(supervisor, audit, relay)
            self._keep_journals()
            (folder / "redteam.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
        finally:
            discard_state(folder, kept=KEPT)
        return result

    def _result(self, supervisor: Supervisor, audit: AuditRow, relay: Sequence[AttackRow]) -> AttackResult:
        run, swarm = self._run, self._swarm
        places = [place for place in swarm.workers if not place.honest]
        entries = read_journals(place.state for place in places)
        ledger, observed = run.watcher.ledger, run.observed(supervisor)
        rows = attack_rows(self._settings.chosen, entries, ledger, elsewhere=relay) if places else ()
        released = frozenset().union(*(place.nodes for place in swarm.workers if place.honest))
        verdicts = ledger.verdicts
        honest = [verdict for verdict in verdicts.values() if verdict.node in released]
        hostile = sum(row.slots for row in rows)
        return AttackResult(
            schema=SCHEMA,
            run_id=swarm.run_id,
            seconds=observed.ended_at - observed.started_at,
            steps=run.watcher.snapshot.finished_steps,
            slots=len(verdicts),
            hostile_slots=hostile,
            hostile_share=hostile / len(verdicts) if verdicts else 0.0,
            hostile_admitted=sum(row.admitted for row in rows),
            succeeded=sum(row.succeeded for row in rows),
            honest_slots=len(honest),
            honest_rejected=sum(verdict.outcome is Outcome.REJECTED for verdict in honest),
            honest_by_attackers=sum(row.honest for row in rows),
            identities=sum(len(read_nodes(place.state)) for place in places),
            rewards=tuple(run.watcher.snapshot.rewards),
            attacks=rows,
            audit=audit,
            restarts=observed.restarts,
        )

    def _keep_journals(self) -> None:
        """What the attackers say that they did: without it nobody could check the result."""
        kept = self._swarm.folder / "journals"
        kept.mkdir()
        for path in self._swarm.folder.glob(f"*/{JOURNAL}"):
            shutil.copyfile(path, kept / f"{path.parent.name}.ndjson")

    def _relay_row(self) -> list[AttackRow]:
        """How far the corrupting relay got: what its victims say of it, and what it says that it sent."""
        if not self._settings.hostile:
            return []
        entries = read_journals([self._swarm.folder / BAD_RELAY])
        stopped: Counter[str] = Counter()
        sound = {self._swarm.origin_url, *self._swarm.relays.values()}
        for url in self._swarm.relays.values():
            status = get_json(f"{url}/v1/status", seconds=_STATUS_SECONDS) or {}
            for upstream in status.get("upstreams", []):
                if upstream["url"] not in sound and upstream["offences"]:
                    stopped[f"quarantined ({upstream['code']})"] += upstream["offences"]
        return [
            AttackRow(
                attack=CORRUPT_RELAY,
                about="serves every chunk of every policy with a bit flipped",
                stands_for="corrupt or swapped chunks, of the policy or of a delta",
                tries=sum(entry.count for entry in entries),
                slots=0,
                admitted=0,
                succeeded=0,
                stopped=dict(stopped),
                unexpected=(),
                honest=0,
            )
        ]


def _parties(settings: CampaignSettings) -> tuple[Hostile, ...]:
    """The attacks dealt out to a few processes; each comes from an address of its own."""
    names = [attack.name for attack in settings.chosen]
    count = min(PROCESSES, len(names))
    return tuple(
        Hostile(
            f"party-{index + 1}",
            tuple(names[index::count]),
            (
                *("--share", f"{settings.hostile / count:.6f}"),
                *("--door-seconds", str(DOOR_SECONDS)),
                *("--address", f"127.0.1.{index + 1}"),
            ),
        )
        for index in range(count)
    )


__all__ = ["Campaign", "CampaignSettings", "Swarm"]
