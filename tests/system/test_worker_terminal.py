"""A contributor's terminal and a real run: verdicts of a real verifier, a standing of a real coordinator.

What would break for whom: a contributor whose machine computes wrongly is told so in a code, and gives up, or never
notices that nothing of their work counts.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from swarm import Swarm, running, small_spec
from terminal import ROOT, Terminal

SPOILT = """
    # swarmproof on a machine whose second slot comes out wrong: what it says of its probabilities is not the policy's.
    import msgspec
    from node.cli import main
    from node.engines.torch import TorchEngine

    honest, drawn = TorchEngine.generate, []

    async def generate(self, requests, **given):
        rollouts = await honest(self, requests, **given)
        drawn.append(rollouts)
        if len(drawn) == 2:
            wrong = [value - 0.5 for value in rollouts[0].logprobs]
            rollouts = [msgspec.structs.replace(rollouts[0], logprobs=wrong), *rollouts[1:]]
        return rollouts

    TorchEngine.generate = generate
    main(prog_name="swarmproof")
"""


@pytest.fixture
def swarm(tmp_path: Path, tiny_policy_path: Path) -> Iterator[Swarm]:
    spec = small_spec()
    spec = msgspec.structs.replace(
        spec, name="arithmetic", batch=msgspec.structs.replace(spec.batch, groups_per_step=1000)
    )
    with running(tmp_path / "run", tiny_policy_path, spec=spec) as served:
        yield served


def spoilt_worker(swarm: Swarm, state: Path, *options: str) -> list[str]:
    where = ["--coordinator", swarm.url, "--run-id", swarm.home.run_id, "--state", str(state)]
    program = [sys.executable, "-c", textwrap.dedent(SPOILT)]
    return ["env", "--default-signal=INT", *program, "worker", *where, "--slots", "2", *options]


@pytest.mark.timeout(400)
async def test_a_contributor_reads_what_is_wrong_with_their_machine_and_where_they_stand(
    swarm: Swarm, tmp_path: Path
) -> None:
    terminal = Terminal(*spoilt_worker(swarm, tmp_path / "worker"), columns=80, lines=40)
    try:
        shown = await terminal.until_shown(r"verdicts +([3-9]|\d\d+) admitted, 1 rejected")
        view = " ".join(shown[shown.rindex("── swarmproof worker") :].split())
        assert "1 wrong_logprob The tokens' probabilities are not the policy's" in view
        assert "→ Serve the policy as it was fetched, unquantised and in the run's dtype" in view
        assert "arithmetic" in view
        await terminal.until_shown(r"standing +(on probation, \d+ of 8|trusted, \d+ verified) slots admitted in a row")
        terminal.press("\x03")
        shown = await terminal.ended()
    finally:
        terminal.kill()
    assert terminal.process.returncode == 0
    closing = " ".join(shown[shown.rindex("ended        after") :].split())
    assert re.search(r"[\d,]+ admitted, 1 rejected 1 wrong_logprob The tokens' probabilities", closing), closing
    assert re.search(r"credit [\d,]+ tokens admitted", closing)


@pytest.mark.timeout(400)
def test_a_program_adds_up_the_same_credit_as_the_runs_log(swarm: Swarm, tmp_path: Path) -> None:
    command = spoilt_worker(swarm, tmp_path / "worker", "--json")
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    events = []
    while sum(event["event"] == "slot_admitted" for event in events) < 4:
        line = process.stdout.readline()
        assert line, events
        events.append(json.loads(line))
    process.terminate()
    rest, _ = process.communicate(timeout=60)
    events += [json.loads(line) for line in rest.splitlines()]
    assert process.returncode == 0
    ended, node = events[-1], events[0]["node"]
    credit = sum(event["tokens"] for event in events if event["event"] == "slot_admitted")
    assert ended["event"] == "ended"
    assert ended["credit_tokens"] == ended["total"]["credit_tokens"] == credit > 0
    answer = swarm.peer(registered=False).send("GET", f"/v1/nodes/{node}")
    standing = json.loads(answer.body)
    # The verifier may have judged more by now than the worker waited for.
    assert standing["admitted"] >= ended["admitted"] >= 4
    assert standing["vested"] + standing["unvested"] + standing["void"] >= credit
    assert ended["generated"] == sum(event["event"] == "slot_generated" for event in events)
    assert ended["admitted"] + ended["rejected"] + ended["waiting"] == ended["delivered"]
