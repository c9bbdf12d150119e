"""What tests of dishonest workers and relays share: a policy, a slot of it and honest work; a broadcast to attack."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from broadcast_scene import Scene
from cheating import Bench, bench_of, engine_rollouts
from narrow_run import policy_file, sharp_model

from node.protocol.submission import Rollout


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(policy_file(sharp_model(seed=20), tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="session")
def honest(bench: Bench) -> list[Rollout]:
    return engine_rollouts(bench.path, bench.requests)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Version 1 is published."""
    made = Scene(tmp_path)
    await made.publish(1)
    yield made
    await made.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session
