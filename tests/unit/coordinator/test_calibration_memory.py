"""A GPU that a calibration has for itself holds the verifier's prefill and a worker's engine at the same time."""

from __future__ import annotations

import pytest

from coordinator.calibration.procedure import CalibrationSettings


@pytest.mark.parametrize("verifier", ["torch", "vllm"])
def test_a_vllm_worker_leaves_the_verifier_half_of_the_memory(verifier: str) -> None:
    """vLLM starts only where the share that it is given is free: of 80 GB 0.9 are not, beside any policy at all."""
    settings = CalibrationSettings(engines=("vllm",), verifier=verifier, vllm={"gpu_memory_utilization": 0.8})
    assert settings.shared_vllm == {"gpu_memory_utilization": 0.4}
    assert CalibrationSettings(verifier=verifier).shared_vllm == {"gpu_memory_utilization": 0.45}
