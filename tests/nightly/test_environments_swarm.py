"""Environments of packages through a worker, a verifier and an auditor: six for each interface of verifiers, and ten
datasets of reasoning-gym that a run could not use while its scorers ran in the node's own process.
"""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from environment_rooms import ROOMS, room
from narrow_run import policy_file
from sandboxing import needs_sandbox
from sqlalchemy import select
from swarm import running, worker_thread
from talking import SPEC, talkative_model
from waiting import until

from coordinator.storage.schema import slots, submissions
from node.environments.isolated.store import VARIABLE
from node.protocol.admission import Outcome
from node.protocol.environment_spec import ProblemsSpec
from node.protocol.run import EnvironmentSpec, SamplingSpec

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800), needs_sandbox]

CHATML = {"chat": "chatml"}
FINITE = {"problems": ProblemsSpec(count=50)}
PLACES: dict[str, dict[str, dict[str, Any]]] = {
    "legacy-examples": {
        "verifiers:legacy_examples": {},
        "verifiers:legacy_examples:Guessing": {},
        "verifiers:legacy_examples:Echo": {},
        "verifiers:legacy_examples:Tools": {"arguments": CHATML},
        "verifiers:legacy_examples:Ledger": {"arguments": CHATML},
        "verifiers:legacy_examples:Sorting": {},
    },
    "v1-examples": {
        "verifiers:v1_letters": {},
        "verifiers:v1_sorting": FINITE,
        "verifiers:v1_lookup": {"arguments": CHATML},
        "verifiers:v1_notes": {"arguments": CHATML},
        "verifiers:v1_guessing": {},
        "verifiers:v1_counting": FINITE,
    },
    "reasoning-gym": {
        f"reasoning_gym:{dataset}": {}
        for dataset in (
            "complex_arithmetic",
            "countdown",
            "decimal_arithmetic",
            "dice",
            "family_relationships",
            "power_function",
            "prime_factorization",
            "propositional_logic",
            "simple_integration",
            "time_intervals",
        )
    },
}


def test_every_environment_is_worked_on_verified_and_audited_with_the_same_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(ROOMS.folder))
    environments = tuple(
        EnvironmentSpec(name=name, package=room(package).lock.package, **more)
        for package, offered in PLACES.items()
        for name, more in offered.items()
    )
    sampling = SamplingSpec(group_size=2, max_prompt_tokens=3500, max_new_tokens=64, max_turns=4, max_reply_tokens=512)
    spec = msgspec.structs.replace(SPEC, environments=environments, sampling=sampling)
    model = copy.deepcopy(talkative_model())
    model.config.max_position_embeddings = 8192
    with running(tmp_path, policy_file(model, tmp_path), spec=spec) as swarm:

        def judged() -> Counter[tuple[str, str]]:
            query = (
                select(slots.c.environment, submissions.c.outcome)
                .join(slots, slots.c.id == submissions.c.slot_id)
                .where(submissions.c.outcome.is_not(None))
            )
            with swarm.home.database.read() as connection:
                return Counter((environments[at].name, outcome) for at, outcome in connection.execute(query))

        def missing() -> set[str]:
            return {one.name for one in environments} - {name for name, _ in judged()}

        with worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker"):
            until(lambda: not missing(), seconds=1200.0, what=lambda: (missing(), judged()))
        verdicts = judged()
        audited = swarm.audit(tmp_path / "audit", sources=(swarm.origin_url,))
    assert {outcome for _, outcome in verdicts} == {Outcome.ADMITTED}, verdicts
    assert audited == 0, capsys.readouterr().out
