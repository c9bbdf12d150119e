"""What a verifier that measures through vLLM keeps of policies, without vLLM itself."""

from __future__ import annotations

import gc

import pytest

from node.engines.vllm_prefill import VllmVerifier
from node.engines.vllm_settings import VllmSettings
from node.policy.errors import UnreadablePolicy
from node.protocol.run import EnvironmentSpec, RunSpec

SPEC = RunSpec(name="test", environments=(EnvironmentSpec(name="arithmetic"),))


async def test_a_policys_file_stays_while_it_may_be_loaded_and_no_longer(tiny_policy_path, tmp_path):
    """The broadcast client deletes old versions: work of theirs that waits would be undecided for ever."""
    data, brought = tiny_policy_path.read_bytes(), tmp_path / "3.bin"
    brought.write_bytes(data)
    verifier = VllmVerifier(SPEC, VllmSettings(), state=tmp_path / "engine")
    prefill, again = [await verifier.prefill(brought, version=3) for _ in range(2)]
    brought.unlink()
    assert prefill._path.read_bytes() == again._path.read_bytes() == data
    del again
    gc.collect()
    assert [path.read_bytes() for path in prefill._path.parent.iterdir()] == [data]
    with pytest.raises(UnreadablePolicy):
        await verifier.prefill(brought, version=3)
    VllmVerifier(SPEC, VllmSettings(), state=tmp_path / "engine")
    assert not prefill._path.exists(), "a process that was killed leaves files"
