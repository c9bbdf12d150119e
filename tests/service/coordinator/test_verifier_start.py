"""The start of a verifier: one that cannot hold the run's policies says so before it takes anybody's work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from swarm import RUN_KEY, publish, small_spec

from benchmarks.modelling.policies import random_policy
from coordinator.run.home import create_home
from coordinator.verifier.daemon import Verifier, VerifierSettings
from node.engines.vllm_prefill import VllmVerifier
from node.engines.vllm_settings import VllmSettings
from node.errors import EngineFailed
from node.protocol.run import RunSpec
from node.verification.prefill import Prefills
from shardcast import Origin, OriginServer


async def test_a_verifier_whose_engine_cannot_hold_the_policy_does_not_start(tmp_path: Path) -> None:
    """It would claim one submission after the other, and decide none."""

    def through_vllm(spec: RunSpec, _share: float) -> Prefills:
        return VllmVerifier(spec, VllmSettings(), state=tmp_path / "engine")

    home = create_home(tmp_path / "run", public_key=RUN_KEY.public_key().public_bytes_raw(), spec=small_spec())
    origin = Origin(tmp_path / "origin", RUN_KEY, home.run_id)
    server = OriginServer(origin)
    url = f"http://127.0.0.1:{server.start()}"
    try:
        publish(home, origin, server, random_policy("eagle", tmp_path / "policy"), version=0)
        settings = VerifierSettings(
            name="verifier-1", state=tmp_path / "verifier", sources=(url,), make_prefills=through_vllm
        )
        with pytest.raises(EngineFailed, match="vLLM does not serve eagle policies") as caught:
            await asyncio.wait_for(Verifier(home, settings).run(asyncio.Event()), 120)
    finally:
        server.stop()
        origin.close()
        home.database.close()
    assert caught.value.code == "wrong_engine"
