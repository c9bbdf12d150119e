"""A small swarm of real processes, one of which is killed with -9 while it works.

What an operator would lose is at stake: admitted rollouts that are forgotten, or trained on twice, or a log
that says something else after the crash than before it.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browsing import a_browser, needs_chromium, tab  # noqa: F401  (a fixture)
from playwright.sync_api import Browser
from run_files import small_run_toml
from waiting import is_quiet, until

from coordinator.lab.processes.layout import Swarm, lay_out
from coordinator.lab.processes.local_http import get, get_json
from coordinator.lab.processes.supervisor import Supervisor
from node.protocol import merkle
from node.protocol.admission import Outcome
from node.protocol.checkpoints import Checkpoint, open_checkpoint
from node.protocol.messages import BatchEntry, LogEntry, VerdictEntry
from node.protocol.run import open_descriptor

STEPS = 6
GROUPS_PER_STEP = 4
KINDS = (
    "coordinator",
    "verifier",
    "trainer",
    "relay-root",
    pytest.param("relay-leaf-1", marks=pytest.mark.nightly),
    pytest.param("honest-1", marks=pytest.mark.nightly),
)

pytestmark = pytest.mark.usefixtures("forked_commands")

START_SECONDS = 300.0
FINISH_SECONDS = 300.0


class Run:
    """A swarm under its supervisor, and what its public log says."""

    def __init__(self, swarm: Swarm, supervisor: Supervisor) -> None:
        self.swarm = swarm
        self.supervisor = supervisor

    @property
    def url(self) -> str:
        return self.swarm.coordinator_url

    def status(self) -> dict[str, Any]:
        return get_json(f"{self.swarm.coordinator_url}/v1/status", seconds=60.0) or {}

    def until(self, condition: Callable[[], bool], *, seconds: float) -> None:
        until(
            condition,
            seconds=seconds,
            meanwhile=self.supervisor.poll,
            what=lambda: f"status {self.status()}, logs:\n{self._logs()}",
        )

    def checkpoint(self) -> Checkpoint:
        data = get(f"{self.swarm.coordinator_url}/v1/log/checkpoint", seconds=60.0)
        told = get(f"{self.swarm.coordinator_url}/v1/run", seconds=60.0)
        _, key = open_descriptor(told, run_id=self.swarm.run_id, now=0.0)
        return open_checkpoint(data, run_id=self.swarm.run_id, signer=key)

    def leaves(self, size: int) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < size:
            page = get(f"{self.swarm.coordinator_url}/v1/log/entries?start={len(found)}&end={size}", seconds=60.0)
            assert page, "the log is shorter than its checkpoint says"
            found += page.splitlines()
        return found

    def consistency(self, first: int, second: int) -> list[bytes]:
        reply = get_json(f"{self.swarm.coordinator_url}/v1/log/consistency?first={first}&second={second}", seconds=60.0)
        return [bytes.fromhex(value) for value in reply["hashes"]]

    def _logs(self) -> str:
        return "\n".join(f"-- {name}\n{self.supervisor.log_tail(name, lines=6)}" for name in self.supervisor.pids)


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A run of STEPS steps, or of as many as the test asks for."""
    steps = getattr(request, "param", STEPS)
    rules = small_run_toml("kill test", steps=steps, groups_per_step=GROUPS_PER_STEP)
    swarm = lay_out(tmp_path / "run", rules, honest=2, hostile=(), leaves=1)
    with Supervisor(swarm.folder / "logs", grace_seconds=4.0) as supervisor:
        supervisor.start(swarm.commands)
        yield Run(swarm, supervisor)


def check_nothing_was_lost_or_used_twice(entries: list[LogEntry], *, admitted_and_unused: int) -> None:
    """By the log alone: every admitted submission is in one batch, or waits for one; batches are in order."""
    verdicts = [entry for entry in entries if isinstance(entry, VerdictEntry)]
    batches = [entry for entry in entries if isinstance(entry, BatchEntry)]
    admitted = [entry for entry in verdicts if entry.outcome is Outcome.ADMITTED]
    used = [submission for batch in batches for submission in batch.submissions]
    judged = Counter(entry.submission for entry in verdicts)
    slots = Counter((entry.version, entry.slot) for entry in admitted)
    assert {entry.outcome for entry in verdicts} == {Outcome.ADMITTED}, "an honest worker was refused"
    assert max(judged.values()) == 1, "a submission was judged twice"
    assert max(slots.values()) == 1, "a slot was admitted twice"
    assert [batch.step for batch in batches] == list(range(STEPS)), "a step was skipped or done twice"
    assert max(Counter(used).values()) == 1, "an admitted group was trained on twice"
    assert set(used) <= {entry.submission for entry in admitted}, "something was trained on that was not admitted"
    assert len(admitted) - len(used) == admitted_and_unused, "an admitted group was lost"
    assert all(len(batch.submissions) >= GROUPS_PER_STEP for batch in batches)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_killing_one_process_loses_nothing_and_the_run_finishes(run: Run, kind: str) -> None:
    run.until(lambda: run.status().get("finished_steps", 0) >= 1, seconds=START_SECONDS)
    before = run.checkpoint()
    entries_before = run.leaves(before.size)
    victim = run.supervisor.pid(kind)
    os.kill(victim, signal.SIGKILL)

    run.until(lambda: run.supervisor.pid(kind) not in {None, victim}, seconds=60.0)
    run.until(lambda: bool(run.status().get("finished")), seconds=FINISH_SECONDS)
    run.until(lambda: is_quiet(run.status()), seconds=120.0)

    after, status = run.checkpoint(), run.status()
    leaves = run.leaves(after.size)
    assert leaves[: before.size] == entries_before, "the log was rewritten"
    merkle.verify_consistency(
        first=before.size,
        second=after.size,
        first_root=before.root,
        second_root=after.root,
        proof=run.consistency(before.size, after.size),
    )
    check_nothing_was_lost_or_used_twice(
        [msgspec.json.decode(leaf, type=LogEntry) for leaf in leaves], admitted_and_unused=status["slots"]["admitted"]
    )
    assert run.supervisor.restarts == {name: int(name == kind) for name in run.supervisor.restarts}


@needs_chromium
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", [1000], indirect=True)
def test_open_pages_turn_red_within_a_minute_of_the_trainers_and_the_verifiers_end(run: Run, browser: Browser) -> None:
    """Pages were green for minutes after the trainer had stopped: nobody looks at a log that is not moving."""

    def health() -> dict[str, Any]:
        return run.status().get("health", {"state": "stopped"})

    run.until(lambda: health()["state"] != "stopped", seconds=START_SECONDS)
    with tab(browser, run) as live, tab(browser, run) as still:
        for seen, path in ((live, "/"), (still, "/audit")):
            seen.open(path)
            # A disk that is nearly full is no halt.
            assert seen.page.locator("#s-health :is(.health.works, .health.slow)").count() > 0
            assert seen.page.locator(".health.stopped").count() == 0
        for kind in ("trainer", "verifier"):
            os.kill(run.supervisor.pid(kind), signal.SIGKILL)
        deadline = time.monotonic() + 60.0
        for seen in (live, still):
            for role in ("trainer", "verifier"):
                line = seen.page.locator(".health.stopped", has_text=f"The {role} stopped")
                line.wait_for(timeout=1000 * (deadline - time.monotonic()))
                assert line.locator("code").inner_text().startswith(f"swarmproof {role} --data")
            seen.assert_axe_finds_nothing()
        assert {"no_trainer", "no_verifier"} <= {problem["code"] for problem in health()["problems"]}
        run.until(lambda: health()["state"] != "stopped", seconds=120.0)  # the supervisor has looked again
        for seen in (live, still):
            seen.page.locator(".health.stopped").first.wait_for(state="detached", timeout=60_000)
