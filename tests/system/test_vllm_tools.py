"""The operator's and the auditor's tools through vLLM: what they find is what the run's own verifiers would find."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner
from swarm import running, small_spec

from coordinator.training.initial import initial_policy
from node.cli import main
from node.commands.engine_options import prefills_maker
from node.engines import vllm_processes
from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.policy.file import load_policy, save_policy, write_policy
from node.protocol.admission import Outcome
from node.protocol.run import parse_run_toml
from node.verification.prefill import TransformersPrefills
from node.verification.spans import spans_of
from toploc.sketch import LEVELS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.usefixtures("forked_vllm")]

RUN = """\
name = "tools"
[model]
initial = "random-tiny"
dtype = "float32"
[[environments]]
name = "arithmetic"
[sampling]
group_size = 4
max_prompt_tokens = 64
max_new_tokens = 12
[proofs]
scheme = "toploc/1+sketch/1"
[limits]
max_submission_bytes = 1_000_000
"""
THROUGH_VLLM = ("--engine", "vllm", "--threads", "1", "--kv-cache-gib", "0.1")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def said_by(*arguments: str) -> dict[str, object]:
    """The JSON line of a command."""
    result = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    answer: dict[str, object] = json.loads(result.stdout)
    return answer


def test_limits_fitted_to_a_vllm_verifier_keep_honest_work_and_find_other_weights(run_file, monkeypatch):
    """With torch as the verifier they would fit a process that the run never has."""
    monkeypatch.setattr("coordinator.calibration.slots.secrets.token_hex", lambda size: "0b" * size)
    starts = []

    class CountedLaunch(vllm_processes.Launch):
        def __init__(self, factory, wanted):
            starts.append(wanted.enable_prefix_caching)
            super().__init__(factory, wanted)

    monkeypatch.setattr(vllm_processes, "Launch", CountedLaunch)
    size = ("--groups", "24", "--cheat-groups", "2")
    told = said_by("calibrate", "--run", str(run_file), "--engine", "torch", *THROUGH_VLLM, "--verifier", "vllm", *size)
    assert told["verifier"] == "vllm"
    assert sorted(starts) == [False, True]  # the verifier's and the worker's, whatever the steps of the sketch
    honest = {one["name"]: one for one in told["honest"]}
    assert set(honest) == {"torch sdpa", "torch eager", "vllm"}
    assert {one["rejected_groups"] + one["drifted_groups"] for one in honest.values()} == {0}
    cheats = {one["name"]: one["rejected_groups"] for one in told["cheats"]}
    assert len(cheats) == 12
    for name in ("int8 weights", "int4 weights", "1 % noise on weights", "fp8 cache", "changed prompt"):
        assert cheats[name] == 2, name
    assert not any("--engine torch" in line for line in told["warnings"])
    written = run_file.with_name("run.calibrated.toml").read_text()
    assert parse_run_toml(written).limits.honest.exponents is not None
    assert "measured with vllm" in written.replace("\n# ", " ")


@pytest.mark.parametrize("temperature", [(), ("--temperature", "0")])
def test_what_a_policy_earns_is_the_same_through_vllm(run_file, temperature):
    """Forced sampling draws the same tokens in float32; an operator compares policies whatever drew for them."""
    asked = ("evaluate", "--run", str(run_file), "--problems", "8", *temperature)
    through_vllm, by_torch = said_by(*asked, *THROUGH_VLLM), said_by(*asked)
    assert through_vllm == by_torch
    assert through_vllm["environments"][0]["completions"] == 8


def noisy(path: Path, target: Path) -> Path:
    """The policy in `path` with other weights."""
    policy = load_policy(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1 + 0.01 * torch.randn(weight.shape, generator=generator))
    save_policy(policy.model, policy.tokenizer, target)
    return target


def test_an_audit_through_vllm_agrees_with_verifiers_that_use_torch(tmp_path, capsys):
    """For an auditor whose machine holds the policy in vLLM alone: honest verdicts must not look like fraud."""
    spec = small_spec()
    policy = tmp_path / "policy"
    write_policy(initial_policy(parse_run_toml(RUN)), policy, dtype=torch.float32)
    cheat = TorchEngine(spec)
    asyncio.run(cheat.load(noisy(policy, tmp_path / "other"), version=0))
    options = {"device": "auto", "threads": 1, "kv_cache_gib": 0.1}
    with running(tmp_path / "run", policy, spec=spec) as swarm:
        decided = []
        for draws in (swarm.engine, swarm.engine, cheat):
            peer = swarm.peer()
            lease = peer.lease()
            rollouts = asyncio.run(draws.generate(swarm.requests(lease)))
            decided.append(swarm.judge(peer, rollouts, lease).outcome)
        prefills = prefills_maker("vllm", state=tmp_path / "auditor", **options)
        code = swarm.audit(tmp_path / "auditor", sources=(swarm.origin_url,), prefills=prefills)
    assert decided == [Outcome.ADMITTED, Outcome.ADMITTED, Outcome.REJECTED]
    report = json.loads(capsys.readouterr().out)
    assert (code, report["outcome"], report["error"]) == (0, "agree", None)
    assert [agreed(verdict) for verdict in report["verdicts"]] == [True] * 3


def agreed(verdict: dict[str, object]) -> bool:
    return verdict["result"] == "agree" and verdict["derived"] == verdict["logged"]


async def test_two_policies_of_one_version_are_not_taken_for_each_other(tmp_path):
    """An operator who answers auditors with another file under a version's number must not get its work through."""
    run = parse_run_toml(RUN)
    path = tmp_path / "policy"
    write_policy(initial_policy(run), path, dtype=torch.float32)
    files = {"own": path, "other": noisy(path, tmp_path / "other")}
    engine = TorchEngine(run)
    await engine.load(files["other"], version=0)
    rollouts = await engine.generate([SampleRequest((5, 6, 7), bytes([index]) * 16) for index in range(4)])
    # Another step of the sketch than the engine was started with, as a calibration looks for it.
    spec = msgspec.structs.replace(run, proofs=msgspec.structs.replace(run.proofs, sketch_step=0.001))
    make = prefills_maker("vllm", device="auto", threads=1, kv_cache_gib=0.1, state=tmp_path)
    prefills, by_torch = make(run, 1.0), TransformersPrefills(dtype="float32")
    spans = [span for row, one in enumerate(rollouts) for _, span in spans_of(one, row=row, chunk_tokens=32)]
    try:
        through = {name: await prefills.prefill(file, version=0) for name, file in files.items()}
        for name in ("own", "other", "own"):
            found = await asyncio.to_thread(through[name].measure, spans, spec=spec)
            expected = (await by_torch.prefill(files[name], version=0)).measure(spans, spec=spec)
            for one, torchs in zip(found, expected, strict=True):
                assert one.margins == pytest.approx(torchs.margins, abs=1e-3)
                assert one.logprobs == pytest.approx(torchs.logprobs, abs=1e-4)
                apart = torch.tensor(one.sketch_errors) - torch.tensor(torchs.sketch_errors)
                assert ((apart + LEVELS / 2).remainder(LEVELS) - LEVELS / 2).abs().max() < 1
            exact = max(max(one.exponent_mismatches) for one in found) <= 1
            assert exact == (name == "other")
    finally:
        await prefills.close()
