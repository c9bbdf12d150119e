"""The vLLM engine on this machine's CPU: real processes, real steps, verified by transformers in float32.

What would break for whom: a worker whose honest work is rejected, or that goes on after its engine died.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing.util
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio
import torch
from talking import talkative_file
from zygote_process import spawnv_passfds

from node.engines.base import BadRequest, BrokenPolicy, DoesNotFit, EngineDied, NoPolicy, SampleRequest
from node.engines.vllm import VllmEngine
from node.engines.vllm_prefill import VllmVerifier
from node.engines.vllm_settings import VllmSettings
from node.policy.errors import MalformedPolicy
from node.policy.file import load_policy, save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.admission import worst
from node.protocol.reasons import Refusal
from node.protocol.run import EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import chunk_count
from node.protocol.turns import StopStrings, ThinkingBudget, TurnRules, pieces, replay
from node.verification.measure import Measurement
from node.verification.prefill import TransformersPrefill
from node.verification.spans import spans_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("forked_vllm"),
]

SPEC = RunSpec(
    name="vllm",
    environments=(EnvironmentSpec(name="arithmetic"),),
    # Prompts and completions longer than a block of vLLM's cache (128 tokens), so that blocks are shared.
    sampling=SamplingSpec(
        group_size=4,
        max_prompt_tokens=160,
        max_new_tokens=90,
        max_version_lead=4,
        temperature=0.8,
        max_turns=4,
        max_reply_tokens=6,
    ),
    proofs=ProofSpec(scheme="toploc/1", chunk_tokens=16),
)
ON_GPU = torch.cuda.is_available()
# A cache of a few completions makes vLLM preempt, and 64 tokens a step make it read prompts in parts. On a GPU blocks
# are an eighth as long, so that more completions have room, and the memory to use is a share of all, free or not.
SETTINGS = VllmSettings(
    cpu_threads=1,
    max_num_seqs=32,
    kv_cache_gib=0.0015 if ON_GPU else 0.0045,
    max_num_batched_tokens=64,
    gpu_memory_utilization=0.1 if ON_GPU else 0.9,
)


def policy_file(folder, *, seed, change=None):
    model = make_model(seed=seed)
    if change is not None:
        with torch.no_grad():
            change(model)
    path = folder / f"{seed}{'' if change is None else change.__name__}.safetensors"
    save_policy(model, make_tokenizer(), path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    return [policy_file(folder, seed=seed) for seed in (20, 21, 22)]


@pytest.fixture(scope="module")
def prefills(files):
    return [TransformersPrefill(load_policy(path, dtype=torch.float32)) for path in files]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(forked_vllm, files, tmp_path_factory):
    engine = VllmEngine(SPEC, SETTINGS, state=tmp_path_factory.mktemp("engine"))
    with pytest.raises(NoPolicy):
        await engine.generate(some_requests(1))
    await engine.load(files[0], version=0)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(running, files):
    """The engine with policy 0 in it, whatever a test before did to it."""
    if running.version != 0:
        await running.load(files[0], version=0)
    return running


def some_requests(count, *, seed=0):
    """Prompts of 2 to 160 tokens, most of which begin alike, so that the prefix cache has something to do."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 40) for _ in range(160)]
    requests = []
    for _ in range(count):
        length = rng.randint(2, 160)
        shared = rng.choice([0, rng.randrange(length), length - 1])
        prompt = (*common[:shared], *(rng.randrange(3, 40) for _ in range(length - shared)))
        requests.append(SampleRequest(prompt, rng.randbytes(16)))
    return requests


def figures_of(rollouts, prefills, replies=None):
    """The worst figures of rollouts of policies 0, 1, …, each segment under its own."""
    measuring = Measurement([rollouts], spec=SPEC, replies=None if replies is None else [replies])
    for version in measuring.versions:
        measuring.measure(prefills[version], version)
    return worst([row.figures for row in measuring.result(0).values()])


def assert_exact(rollouts, prefills, replies=None):
    """As close as two float32 implementations of one model are."""
    figures = figures_of(rollouts, prefills, replies)
    assert figures.exponent_mismatches <= 1
    assert figures.mantissa_mean <= 0.02
    assert figures.token_margin <= 1e-4
    assert figures.logprob_error <= 1e-4


def processes():
    """What this process has started, with all that they started; the tracker of shared memory is Python's."""
    found = set[psutil.Process]()
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end between two questions
            if one.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(one.cmdline()):
                found.add(one)
    return found


async def all_gone(before):
    """What is started from now on would compete with what is still ending: soon nothing but `before` runs."""
    async with asyncio.timeout(120):
        while processes() != before:  # noqa: ASYNC110  (another process's work)
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def vllm_says(caplog):
    """What is logged in this process meanwhile, by vLLM too, which keeps it from the root logger."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    caplog.clear()
    try:
        yield caplog.records
    finally:
        logger.removeHandler(caplog.handler)


async def under_way(engine, tokens):
    """Once `tokens` more tokens came out of the engine."""
    start = engine.tokens
    async with asyncio.timeout(120):
        while engine.tokens < start + tokens:  # noqa: ASYNC110  (another process's work)
            await asyncio.sleep(0.01)


async def test_what_vllm_draws_under_preemption_chunked_prefill_and_prefix_caching_is_exact(engine, prefills):
    requests, rereads = some_requests(48), engine.rereads
    rollouts = await engine.generate(requests)
    assert engine.rereads > rereads, "nothing was preempted: the cache is too large for this test"
    assert [rollout.seed for rollout in rollouts] == [request.seed for request in requests]
    eos_ids = prefills[0].blueprint.eos_ids
    for rollout in rollouts:
        ended = rollout.completion_ids[-1] in eos_ids
        assert ended or len(rollout.completion_ids) == 90
        assert not eos_ids & set(rollout.completion_ids[:-1])
        assert (rollout.segment_versions, rollout.segment_tokens) == ([0], [len(rollout.completion_ids)])
        assert len(rollout.proofs) == chunk_count(rollout.segment_tokens, chunk_tokens=16)
    assert_exact(rollouts, prefills)
    again = await engine.generate(requests[:8])
    assert [one.completion_ids for one in again] == [one.completion_ids for one in rollouts[:8]]


async def test_calls_share_the_batch_and_a_cancelled_one_hurts_no_other(engine, prefills):
    requests = some_requests(24, seed=1)
    first = asyncio.create_task(engine.generate(requests[:12]))
    second = asyncio.create_task(engine.generate(requests[12:]))
    await under_way(engine, 64)
    assert not first.done()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert_exact(await first, prefills)
    assert not engine._under_way


async def test_tokens_before_and_after_an_update_in_flight_are_each_policys_own(engine, files, prefills):
    generating = asyncio.create_task(engine.generate(some_requests(24, seed=2)))
    for version in (1, 2):
        await under_way(engine, 200)
        await engine.load(files[version], version=version)
        assert engine.version == version
    rollouts = await generating
    assert any(len(rollout.segment_versions) == 2 for rollout in rollouts)
    assert_exact(rollouts, prefills)
    crossed = next(rollout for rollout in rollouts if len(rollout.segment_versions) > 1)
    moved = [crossed.segment_tokens[0] - 5, crossed.segment_tokens[1] + 5, *crossed.segment_tokens[2:]]
    if chunk_count(moved, chunk_tokens=16) == len(crossed.proofs):
        lie = msgspec.structs.replace(crossed, segment_tokens=moved)
        assert figures_of([lie], prefills).exponent_mismatches > 8


async def test_what_vllm_draws_past_a_stop_string_before_it_is_told_is_in_no_proof(engine, prefills):
    """Its worker process is many steps ahead of a front end that is slow to look: chunks are proved with too much."""

    def decode(tokens):
        time.sleep(0.002)
        return "".join("ab"[token % 2] for token in tokens)

    rules = TurnRules(max_new_tokens=60, stop=StopStrings(("abba", "aaaaa"), decode))
    requests = [dataclasses.replace(one, rules=rules) for one in some_requests(24, seed=11)]
    first = next(engine._names)
    rollouts = await engine.generate(requests)
    assert next(engine._names) - first - 1 > len(requests), "no chunk was drawn again: the front end is too fast"
    eos_ids = prefills[0].blueprint.eos_ids
    for rollout in rollouts:
        found = replay(rollout.completion_ids, eos_ids=eos_ids, sampling=SPEC.sampling, rules=rules)
        assert len(rollout.completion_ids) == (found.most if found.end is None else found.end)
        assert len(rollout.proofs) == chunk_count(rollout.segment_tokens, chunk_tokens=16)
    assert_exact(rollouts, prefills)


async def test_a_thought_that_is_ended_is_read_by_vllm_as_by_everybody(engine, prefills):
    rules = TurnRules(thinking=ThinkingBudget(20, (40, 41, 42), lambda tokens: sum(tokens) % 2 > 0))
    requests = [dataclasses.replace(one, rules=rules) for one in some_requests(16, seed=12)]
    rollouts = await engine.generate(requests)
    ends = prefills[0].blueprint.eos_ids
    found = [replay(one.completion_ids, eos_ids=ends, sampling=SPEC.sampling, rules=rules) for one in rollouts]
    assert {one.replies for one in found} >= {((20, (40, 41, 42)),), ((20, ()),)}
    assert all(len(one.completion_ids) in (of.end, of.most) for one, of in zip(rollouts, found, strict=True))
    assert_exact(rollouts, prefills, [one.replies for one in found])


async def test_a_policy_loaded_between_slots_leaves_nothing_of_the_old_one(engine, files, prefills):
    """vLLM keeps the packed head of a model with tied embeddings when it reloads weights on a CPU."""
    await engine.load(files[1], version=1)
    assert_exact(await engine.generate(some_requests(6, seed=3)), prefills)


async def test_a_tool_between_turns_is_read_by_vllm_as_by_everybody(engine, tmp_path):
    """Turns are requests of their own, over a prefix that is cached, preempted, and read anew by a newer policy.

    A position or a chunk that is one off, and every conversation that vLLM drew would be rejected.
    """

    def ask(turns):
        return [40 + len(turns), 41]

    paths = []
    for seed in (0, 3):
        (tmp_path / str(seed)).mkdir()
        paths.append(talkative_file(tmp_path / str(seed), seed))
    prefills = {3 + at: TransformersPrefill(load_policy(path, dtype=torch.float32)) for at, path in enumerate(paths)}
    await engine.load(paths[0], version=3)
    requests = [dataclasses.replace(one, ask=ask) for one in some_requests(24, seed=10)]
    generating = asyncio.create_task(engine.generate(requests))
    await under_way(engine, 400)
    await engine.load(paths[1], version=4)
    rollouts = await generating
    said = [replay(one.completion_ids, eos_ids={1}, sampling=SPEC.sampling, ask=ask).replies for one in rollouts]
    assert sum(map(len, said)) > 24, "the policy must use the tool for this test"
    assert {len(own) for own in said} >= {2, 3}
    for rollout, own in zip(rollouts, said, strict=True):
        assert len(rollout.proofs) == chunk_count(pieces(rollout.segment_tokens, own), chunk_tokens=16)
    assert any(rollout.segment_versions == [3, 4] for rollout in rollouts)
    assert_exact(rollouts, prefills, said)
    verifier = VllmVerifier(SPEC, SETTINGS, state=tmp_path / "verifier")
    measuring = Measurement([rollouts], spec=SPEC, replies=[said])
    try:
        for version, path in zip(measuring.versions, paths, strict=True):
            await asyncio.to_thread(measuring.measure, await verifier.prefill(path, version=version), version)
    finally:
        await verifier.close()
    figures = worst([row.figures for row in measuring.result(0).values()])
    assert figures.exponent_mismatches <= 1
    assert figures.token_margin <= 1e-4
    assert figures.logprob_error <= 1e-4


async def test_a_running_engine_proves_by_another_step_of_the_sketch(engine, prefills):
    """A calibration seeks the step: a start of vLLM for each would take longer than all that it draws."""
    proofs = ProofSpec(scheme="toploc/1+sketch/1", chunk_tokens=16, sketch_step=0.001)
    with pytest.raises(ValueError, match="size of its chunks"):
        await engine.prove(ProofSpec(chunk_tokens=32))
    await engine.prove(proofs)
    try:
        rollouts = await engine.generate(some_requests(4, seed=9))
    finally:
        await engine.prove(SPEC.proofs)
    spans = [span for row, one in enumerate(rollouts) for _, span in spans_of(one, row=row, chunk_tokens=16)]
    for found in prefills[0].measure(spans, spec=msgspec.structs.replace(SPEC, proofs=proofs)):
        assert max(found.exponent_mismatches) <= 1
        assert torch.tensor(found.sketch_errors).abs().max() < 1
    assert_exact(await engine.generate(some_requests(1, seed=9)), prefills)


async def test_policies_with_nan_or_other_tensors_are_refused_and_the_old_one_stays(engine, tmp_path, prefills):
    def nan(model):
        model.model.layers[0].mlp.up_proj.weight[3, 3] = float("nan")

    with pytest.raises(MalformedPolicy, match="not finite"):
        await engine.load(policy_file(tmp_path, seed=20, change=nan), version=5)
    torn = tmp_path / "torn"
    torn.write_bytes(policy_file(tmp_path, seed=20).read_bytes()[:-1000])
    with pytest.raises(MalformedPolicy):
        await engine.load(torn, version=6)
    assert engine.version == 0
    assert [folder.name for folder in engine._host._state.iterdir()] == ["policy-0"], "a refused file fills the disk"
    assert_exact(await engine.generate(some_requests(2, seed=4)), prefills)


async def test_requests_that_the_run_does_not_allow_never_reach_vllm(engine):
    for bad in (SampleRequest((), bytes(16)), SampleRequest((10**6,), bytes(16)), SampleRequest((3,) * 161, bytes(16))):
        with pytest.raises(BadRequest):
            await engine.generate([bad])


async def test_a_policy_that_outgrows_its_numbers_is_not_submitted(engine, tmp_path, files, prefills):
    """Finite weights whose activations are not: refused here, not by the verifier, and nothing of them stays."""

    def huge(model):
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.fill_(1e30)
            layer.mlp.up_proj.weight.fill_(1e30)

    await engine.load(policy_file(tmp_path, seed=20, change=huge), version=7)
    with pytest.raises(BrokenPolicy):
        await engine.generate(some_requests(8, seed=5))
    await engine.load(files[1], version=8)
    assert_exact(await engine.generate(some_requests(8, seed=5)), {8: prefills[1]})


async def test_vllm_measures_what_transformers_measures(engine, files, prefills, tmp_path):
    """For an operator whose policies only vLLM can hold: the same figures, over the same submissions."""
    generating = asyncio.create_task(engine.generate(some_requests(12, seed=8)))
    await under_way(engine, 100)
    await engine.load(files[1], version=1)
    rollouts = await generating
    cheat = msgspec.structs.replace(rollouts[0], seed=bytes(16))
    malformed = msgspec.structs.replace(rollouts[1], proofs=[b"\0" * len(proof) for proof in rollouts[1].proofs])
    verifier = VllmVerifier(SPEC, SETTINGS, state=tmp_path / "verifier")
    try:
        theirs = []
        for version in (0, 1):
            brought = tmp_path / f"policy-{version}"
            brought.write_bytes(files[version].read_bytes())
            theirs.append(await verifier.prefill(brought, version=version))
            brought.unlink()  # as the broadcast client does, which keeps the newest few
        groups = [rollouts, [cheat], [malformed]]
        ours_of, theirs_of = Measurement(groups, spec=SPEC), Measurement(groups, spec=SPEC)
        for version in ours_of.versions:
            ours_of.measure(prefills[version], version)
            await asyncio.to_thread(theirs_of.measure, theirs[version], version)
    finally:
        await verifier.close()
    ours, through = ours_of.result(0), theirs_of.result(0)
    for number, row in ours.items():
        mine, other = row.figures, through[number].figures
        assert msgspec.structs.astuple(mine) == pytest.approx(msgspec.structs.astuple(other), abs=1.0)
        assert other.exponent_mismatches <= 1
        assert other.token_margin <= 1e-4
        assert through[number].logprobs == pytest.approx(row.logprobs, abs=1e-4)
    ours_cheat, theirs_cheat = (one.result(1)[0].figures.token_margin for one in (ours_of, theirs_of))
    assert theirs_cheat == pytest.approx(ours_cheat, abs=1e-3)
    assert theirs_cheat > 0.5
    reasons = []
    for one in (ours_of, theirs_of):
        with pytest.raises(Refusal) as caught:
            one.result(2)
        reasons.append(caught.value.reason)
    assert reasons[0] == reasons[1]


async def test_an_engine_process_that_is_killed_is_noticed_and_a_new_one_started(engine, files, prefills, caplog):
    generating = asyncio.create_task(engine.generate(some_requests(24, seed=6)))
    await under_way(engine, 100)
    (core,) = [child for child in psutil.Process().children() if "EngineCore" in child.name()]
    os.kill(core.pid, signal.SIGKILL)
    with vllm_says(caplog) as said:
        with pytest.raises(EngineDied):
            await asyncio.wait_for(generating, 60)
        while engine.version is not None:  # noqa: ASYNC110  (a watcher's work)
            await asyncio.sleep(0.05)
        with pytest.raises(NoPolicy):
            await engine.generate(some_requests(1))
        await engine.load(files[1], version=1)
    assert any("EngineDeadError" in (record.exc_text or "") for record in said), "a death must not be kept quiet"
    assert_exact(await engine.generate(some_requests(4, seed=7)), prefills)
    # Killed while it is asked something, too.
    (core,) = [child for child in psutil.Process().children() if "EngineCore" in child.name()]
    os.kill(core.pid, signal.SIGSTOP)
    loading = asyncio.create_task(engine.load(files[0], version=2))
    await asyncio.sleep(0.5)
    assert not loading.done()
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(EngineDied), caplog.at_level(logging.CRITICAL):
        await asyncio.wait_for(loading, 60)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (VllmSettings(kv_cache_gib=1e-6), "does not hold one completion of 256 tokens"),
        (VllmSettings(gpu_memory_utilization=0.01), "--gpu-memory-utilization 0.01 allows"),
        (VllmSettings(max_model_len=200), "too short for this run"),
        (VllmSettings(tensor_parallel_size=7), "do not divide among 7 GPUs"),
    ],
)
async def test_what_does_not_fit_is_one_sentence_before_anything_starts(settings, said, files, tmp_path):
    engine = VllmEngine(SPEC, settings, state=tmp_path)
    with pytest.raises(DoesNotFit, match=said) as caught:
        await engine.load(files[0], version=0)
    assert "\n" not in str(caught.value)
    assert engine.version is None
    assert not list(tmp_path.iterdir())


@pytest.fixture
def temporary(monkeypatch):
    """The temporary folder of this process and its children meanwhile: short, as paths of sockets must be."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


async def test_a_start_that_is_given_up_leaves_nothing_and_the_next_one_waits_for_its_end(
    files, tmp_path, temporary, caplog, monkeypatch
):
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", spawnv_passfds)  # started as ever, which takes a while
    before = processes()

    async def starting(engine):
        """A load whose engine process has begun."""
        loading = asyncio.create_task(engine.load(files[0], version=0))
        async with asyncio.timeout(60):
            while processes() == before:  # noqa: ASYNC110  (another process's work)
                await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        assert not loading.done()
        return loading

    hasty = VllmEngine(SPEC, dataclasses.replace(SETTINGS, start_seconds=0.1), state=tmp_path / "hasty")
    with pytest.raises(EngineDied, match="TimeoutError"):
        await hasty.load(files[0], version=0)
    assert not list(temporary.iterdir())
    engine = VllmEngine(SPEC, SETTINGS, state=tmp_path / "engine")
    loading = await starting(engine)
    await engine.close()
    await all_gone(before)
    assert not list(temporary.iterdir()), "each start would leave sockets and files in the temporary folder"
    with pytest.raises(EngineDied):
        await loading
    cancelled = await starting(engine)
    cancelled.cancel()
    loading = asyncio.create_task(engine.load(files[0], version=0))
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await all_gone(before)
    await loading
    (folder,) = temporary.iterdir()
    assert any(one.is_socket() for one in folder.iterdir())
    assert len([one for one in processes() - before if "EngineCore" in one.name()]) == 1
    # An end that was asked for, in the middle of everything, is no error of vLLM's.
    generating = asyncio.create_task(engine.generate(some_requests(24, seed=9)))
    await under_way(engine, 100)
    with vllm_says(caplog) as said:
        await engine.close()
        with pytest.raises(EngineDied, match="closed"):
            await generating
        await asyncio.sleep(1)
    assert [record.getMessage() for record in said] == []
    await all_gone(before)
    assert not list(temporary.iterdir())
