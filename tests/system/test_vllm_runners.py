"""Our hooks beside each of vLLM's two model runners: they force, prove and measure the same.

What would break for whom: the second one is what vLLM takes on a GPU, where nothing else here would notice.
"""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys

import msgspec
import pytest
import torch
from locations import ROOT

from node.engines.recorder import Recorded
from node.policy.file import load_policy, save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.admission import worst
from node.protocol.run import EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout
from node.verification.measure import Measurement
from node.verification.prefill import TransformersPrefill

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOKENS = 24
SPEC = RunSpec(
    name="runners",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=6, max_prompt_tokens=80, max_new_tokens=TOKENS, temperature=0.8),
    proofs=ProofSpec(scheme="toploc/1+sketch/1", chunk_tokens=16),
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "policy.safetensors"
    save_policy(make_model(seed=20), make_tokenizer(), path)
    return load_policy(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def asked(policy, tmp_path_factory):
    """Prompts that begin alike, longer than a step and a block, of more completions than the cache holds."""
    folder = tmp_path_factory.mktemp("folder")
    policy.model.save_pretrained(folder)
    rng = random.Random(5)
    common = [rng.randrange(3, 40) for _ in range(80)]
    prompts = [
        [*common[: 40 if row < 3 else 0], *(rng.randrange(3, 40) for _ in range(5 * row + 2))] for row in range(6)
    ]
    return {
        "folder": str(folder),
        "hidden": policy.hidden,
        "vocabulary": policy.vocabulary,
        "proofs": msgspec.to_builtins(SPEC.proofs),
        "temperature": SPEC.sampling.temperature,
        "tokens": TOKENS,
        "prompts": prompts,
        "seeds": [rng.randbytes(16).hex() for _ in prompts],
    }


def run(asked, *, runner, parallel=1):
    """What vLLM drew and measured with this runner, as rollouts and as measurements."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/one_process_vllm.py")],
        input=json.dumps(asked | {"runner": runner, "parallel": parallel}),
        capture_output=True,
        text=True,
        timeout=550,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    recorded = msgspec.msgpack.decode(base64.b64decode(told["recorded"]), type=list[Recorded])
    assert [one.fault for one in recorded] == [None] * len(recorded)
    rollouts = [
        Rollout(
            seed=bytes.fromhex(seed),
            prompt_ids=prompt,
            completion_ids=one.tokens,
            logprobs=one.logprobs,
            segment_versions=one.segment_versions,
            segment_tokens=one.segment_tokens,
            proofs=one.proofs,
        )
        for seed, prompt, one in zip(asked["seeds"], asked["prompts"], recorded, strict=True)
    ]
    return rollouts, told["measured"], sum(one.rereads for one in recorded)


def assert_exact(rollouts, measured, policy):
    """As close to a float32 prefill as another implementation is, and so is what the same runner read as a verifier."""
    measuring = Measurement([rollouts], spec=SPEC)
    measuring.measure(TransformersPrefill(policy), 0)
    figures = worst([row.figures for row in measuring.result(0).values()])
    assert figures.exponent_mismatches <= 1
    assert figures.token_margin <= 1e-4
    assert figures.logprob_error <= 1e-4
    assert max(max(one["margins"]) for one in measured) <= 1e-4
    assert max(max(one["exponent_mismatches"]) for one in measured) <= 1


@pytest.fixture(scope="module")
def by_v1(asked):
    return run(asked, runner="v1")


@pytest.fixture(scope="module")
def by_v2(asked):
    return run(asked, runner="v2")


@pytest.mark.parametrize("runner", ["by_v1", "by_v2"])
def test_what_a_runner_draws_under_preemption_chunked_prefill_and_prefix_caching_is_exact(runner, policy, request):
    rollouts, measured, rereads = request.getfixturevalue(runner)
    assert rereads, "nothing was preempted: the cache is too large for this test"
    assert_exact(rollouts, measured, policy)


def test_both_runners_draw_the_same_tokens(by_v1, by_v2):
    assert [one.completion_ids for one in by_v1[0]] == [one.completion_ids for one in by_v2[0]]


def test_vllm_computes_logits_by_our_output_head():
    """Else it copies the head to float32 in each step on a CPU, and nothing but its speed shows it."""
    code = (
        "from node.engines.vllm_worker import ExactLogits\n"
        "from vllm.model_executor.custom_op import op_registry_oot\n"
        "from vllm.model_executor.layers.logits_processor import LogitsProcessor\n"
        "assert op_registry_oot['LogitsProcessor'] is ExactLogits\n"
        "assert callable(LogitsProcessor._apply_head)\n"
    )
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, timeout=300, check=True)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="there is one GPU")
def test_two_processes_that_share_a_model_draw_and_prove_what_one_does(asked, by_v1, policy):
    """Every rank forces a token from its own copy of all logits, and one of them proves states that all added to."""
    rollouts, measured, _ = run(asked, runner="v1", parallel=2)
    assert [one.completion_ids for one in rollouts] == [one.completion_ids for one in by_v1[0]]
    assert_exact(rollouts, measured, policy)
