"""What tests of dishonest workers share: a run's policy, a slot of it, and honest work for that slot."""

from __future__ import annotations

import pytest
from cheating import Bench, bench_of, engine_rollouts
from narrow_run import policy_file, sharp_model

from node.protocol.submission import Rollout


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(policy_file(sharp_model(seed=20), tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="session")
def honest(bench: Bench) -> list[Rollout]:
    return engine_rollouts(bench.path, bench.requests)
