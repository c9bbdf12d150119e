"""The torch engine against plain, unbatched forward passes without a cache, and its manners as a component."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from family_cases import families
from halting import Halt
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from waiting import eventually

from benchmarks.modelling.families import small_model
from benchmarks.modelling.policies import random_policy
from node.engines import BadRequest, BrokenPolicy, Interrupted, NoPolicy, SampleRequest
from node.engines.torch import Batch, Call, TorchEngine
from node.engines.torch_loading import LoadedPolicy
from node.policy import products
from node.policy.errors import MalformedPolicy
from node.policy.families import TINY_RECURRENT
from node.policy.file import Policy, load_policy, save_policy
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.admission import Figures, judge_rows
from node.protocol.run import EnvironmentSpec, ModelSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.submission import Expected, Rollout, check_rollouts
from node.verification.measure import Measurement
from node.verification.readings import read_by_transformers
from toploc import VerificationResult, verify_chunk_proofs

SPEC = RunSpec(name="test", environments=(EnvironmentSpec("arithmetic"),), proofs=ProofSpec(scheme="toploc/1"))
MANY_ENDS = list(range(1, 16))
"""With 15 end marks of 128, completions of random weights have very different lengths, 8.5 on average."""


def make_spec(*, chunk_tokens: int = 8, dtype: str = "float32", **sampling: float) -> RunSpec:
    return RunSpec(
        name="test",
        environments=(EnvironmentSpec("arithmetic"),),
        model=ModelSpec(dtype=dtype),
        sampling=SamplingSpec(**sampling),
        proofs=ProofSpec(scheme="toploc/1", chunk_tokens=chunk_tokens),
    )


def make_requests(groups: int, samples: int = 8, *, seed: int = 0) -> list[SampleRequest]:
    """Groups that share a prompt; the prompts' lengths differ, from a single token to the run's limit."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for group in range(groups):
        length = (1, 128, 17)[group] if group < 3 else int(torch.randint(2, 40, (1,), generator=generator))
        prompt = tuple(torch.randint(0, 128, (length,), generator=generator).tolist())
        seeds = torch.randint(0, 256, (samples, 16), generator=generator, dtype=torch.uint8)
        requests += [SampleRequest(prompt, bytes(row.tolist())) for row in seeds]
    return requests


def save_family(
    family: str, path: Path, *, eos: list[int] = MANY_ENDS, seed: int = 1, vocabulary: int = 128, hidden: int = 128
) -> None:
    config = CONFIG_MAPPING[family](
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
        sliding_window=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 2:  # further from uniform than fresh weights are
                parameter.data.mul_(2)
    save_policy(model, make_tokenizer(), path)


def truncate(path: Path, shorter: Path) -> None:
    shorter.write_bytes(path.read_bytes()[:-4])


async def loaded(path: Path, spec: RunSpec, **options: int) -> TorchEngine:
    engine = TorchEngine(spec, **options)
    await engine.load(path, version=1)
    return engine


@torch.inference_mode()
def prefill(policy: Policy, rollout: Rollout, spec: RunSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [n, hidden] and scaled logits [n, vocabulary] of one rollout: one row, no padding, no cache."""
    first, count = len(rollout.prompt_ids) - 1, len(rollout.completion_ids)
    seen = {}
    hook = policy.model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: seen.update(hidden=inputs[0])
    )
    logits = policy.model(torch.tensor([rollout.prompt_ids + rollout.completion_ids]), use_cache=False).logits
    hook.remove()
    rows = slice(first, first + count)
    return seen["hidden"][0, rows], logits[0, rows].float() / spec.sampling.temperature


def proof_figures(policies: Policy | dict[int, Policy], rollout: Rollout, spec: RunSpec) -> list[VerificationResult]:
    """Each proof against the hidden states of the policy that drew its chunk; chunks begin anew at a segment."""
    proofs, figures = iter(rollout.proofs), []
    for segment in rollout.segments:
        policy = policies[segment.version] if isinstance(policies, dict) else policies
        hidden, _ = prefill(policy, rollout, spec)
        chunks = list(hidden[segment.start : segment.end].bfloat16().split(spec.proofs.chunk_tokens))
        figures += verify_chunk_proofs(chunks, list(islice(proofs, len(chunks))), spec.proofs.top_k)
    assert next(proofs, None) is None
    return figures


def forced_tokens(logits: torch.Tensor, seed: bytes) -> list[int]:
    noise = gumbel_noise([seed] * len(logits), list(range(len(logits))), vocabulary=logits.shape[1])
    return (logits + torch.from_numpy(noise)).argmax(-1).tolist()


# Honest workers pass: what an engine returns is what a verifier's prefill finds.


@pytest.mark.parametrize("family", families(others=pytest.mark.system))
async def test_decoding_agrees_with_a_prefill_of_each_row_alone(family: str, tmp_path: Path) -> None:
    """Through windows and caps as well, beside the plainest of transformers' own kernels; other weights do not."""
    spec = make_spec(temperature=0.7, max_new_tokens=40)
    model = small_model(family, hidden_size=128, eos_token_id=MANY_ENDS, tie_word_embeddings=False)
    save_policy(model, make_tokenizer(), tmp_path / "policy")
    engine = await loaded(tmp_path / "policy", spec)
    requests = make_requests(4)
    rollouts = await engine.generate(requests)
    assert len({len(rollout.completion_ids) for rollout in rollouts}) > 5, "rows must end at different steps"
    measuring = [Measurement([rollouts], spec=spec) for _ in range(2)]
    measuring[0].measure(read_by_transformers(tmp_path / "policy", spec=spec), 1)
    assert judge_rows(figures_of(measuring[0]), limits=spec.limits) is None
    engine.policy.model.set_attn_implementation("eager")
    for request, rollout in zip(requests, rollouts, strict=True):
        _, logits = prefill(engine.policy, rollout, spec)
        assert tuple(rollout.prompt_ids) == request.prompt_ids
        assert rollout.completion_ids == forced_tokens(logits, request.seed)
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
        # A state that has read little is normalised like any other, which magnifies its rounding.
        assert (torch.tensor(rollout.logprobs) - chosen).abs().max() < 2e-4
        for figures in proof_figures(engine.policy, rollout, spec):
            assert figures.exp_mismatches == 0
            assert figures.mant_err_mean < 0.1
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.05 * torch.randn_like(weight))
    save_policy(model, make_tokenizer(), tmp_path / "other")
    measuring[1].measure(read_by_transformers(tmp_path / "other", spec=spec), 1)
    assert judge_rows(figures_of(measuring[1]), limits=spec.limits) is not None


def figures_of(measuring: Measurement) -> dict[int, Figures]:
    return {row: measured.figures for row, measured in measuring.result(0).items()}


async def test_every_rollout_passes_the_checks_of_the_protocol(tmp_path: Path) -> None:
    spec = make_spec(max_new_tokens=12)
    save_family("llama", tmp_path / "policy")
    engine = await loaded(tmp_path / "policy", spec)
    requests = make_requests(3)
    rollouts = await engine.generate(requests)
    for start in range(0, len(requests), 8):
        group = requests[start : start + 8]
        expected = Expected(
            version=1,
            published=None,
            prompt_ids=group[0].prompt_ids,
            seeds=[request.seed for request in group],
            vocabulary=engine.policy.vocabulary,
            eos_ids=engine.policy.eos_ids,
        )
        check_rollouts(rollouts[start : start + 8], expected=expected, spec=spec)
    ended = [rollout.completion_ids[-1] in engine.policy.eos_ids for rollout in rollouts]
    assert any(ended)
    assert not all(ended), "some completions must reach the cap"


async def test_bfloat16_rollouts_stay_within_the_published_limits(tmp_path: Path) -> None:
    spec = make_spec(chunk_tokens=32, dtype="bfloat16")
    save_family("qwen3", tmp_path / "policy")
    engine = await loaded(tmp_path / "policy", spec)
    assert engine.policy.model.dtype == torch.bfloat16
    for rollout in await engine.generate(make_requests(3)):
        for figures in proof_figures(engine.policy, rollout, spec):
            assert figures.exp_mismatches <= 38
            assert figures.mant_err_mean <= 10


@pytest.mark.parametrize("worker_is_slow", [True, False])
async def test_machines_with_and_without_16_bit_products_verify_each_other(
    worker_is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An auditor's laptop must not call a server's honest work wrong, nor the other way round."""
    spec = make_spec(chunk_tokens=32, dtype="bfloat16")
    save_family("qwen3", tmp_path / "policy")
    every = frozenset({torch.bfloat16, torch.float16})
    monkeypatch.setattr(products, "slow_dtypes", lambda: every if worker_is_slow else frozenset())
    engine = await loaded(tmp_path / "policy", spec)
    rollouts = await engine.generate(make_requests(3))
    monkeypatch.setattr(products, "slow_dtypes", lambda: frozenset() if worker_is_slow else every)
    for rollout in rollouts:
        _, logits = prefill(engine.policy, rollout, spec)
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
        assert (torch.tensor(rollout.logprobs) - chosen).abs().max() < 0.2
        for figures in proof_figures(engine.policy, rollout, spec):
            assert figures.exp_mismatches <= 8
            assert figures.mant_err_mean <= 4


async def test_another_policys_rollouts_do_not_agree(tmp_path: Path) -> None:
    save_family("llama", tmp_path / "policy", seed=1)
    save_family("llama", tmp_path / "other", seed=2)
    spec = make_spec(chunk_tokens=32)
    engine = await loaded(tmp_path / "policy", spec)
    other = load_policy(tmp_path / "other", dtype=torch.float32)
    for rollout in await engine.generate(make_requests(3)):
        assert all(figures.exp_mismatches > 38 for figures in proof_figures(other, rollout, spec))


async def test_a_row_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """A slot is verified alone, whatever the worker decoded beside it, and however it split its work."""
    spec = make_spec()
    save_family("llama", tmp_path / "policy")
    requests = make_requests(5)
    together = await (await loaded(tmp_path / "policy", spec)).generate(requests)
    split = await (await loaded(tmp_path / "policy", spec, max_rows=7)).generate(requests)
    assert [rollout.completion_ids for rollout in split] == [rollout.completion_ids for rollout in together]
    assert [rollout.seed for rollout in split] == [request.seed for request in requests]


async def test_equal_requests_get_equal_rollouts(tiny_policy_path: Path) -> None:
    engine = await loaded(tiny_policy_path, SPEC)
    request = make_requests(1)[0]
    first, second = await engine.generate([request, request])
    assert first.completion_ids == second.completion_ids
    assert await engine.generate([]) == []


# A worker's daemon can live with it.


async def test_generating_before_loading_is_refused() -> None:
    engine = TorchEngine(SPEC)
    assert engine.version is None
    with pytest.raises(NoPolicy):
        await engine.generate(make_requests(1))


@pytest.mark.parametrize(
    ("prompt", "seed"),
    [
        ((), bytes(16)),
        ((5,) * 129, bytes(16)),
        ((5, -1), bytes(16)),
        ((5, 128), bytes(16)),
        ((5,), bytes(15)),
        ((5,), b""),
    ],
    ids=["empty_prompt", "long_prompt", "negative_token", "token_beyond_the_vocabulary", "short_seed", "no_seed"],
)
async def test_a_request_outside_the_run_is_refused(
    prompt: tuple[int, ...], seed: bytes, tiny_policy_path: Path
) -> None:
    engine = await loaded(tiny_policy_path, SPEC)
    with pytest.raises(BadRequest):
        await engine.generate([*make_requests(1), SampleRequest(prompt, seed)])


async def test_a_policy_that_fails_to_load_leaves_the_old_one_at_work(tiny_policy_path: Path, tmp_path: Path) -> None:
    engine = await loaded(tiny_policy_path, SPEC)
    truncate(tiny_policy_path, tmp_path / "bad")
    with pytest.raises(MalformedPolicy):
        await engine.load(tmp_path / "bad", version=2)
    assert engine.version == 1
    assert len(await engine.generate(make_requests(1))) == 8


async def test_the_next_policy_takes_the_memory_of_the_one_before(tiny_policy_path: Path, tmp_path: Path) -> None:
    """A worker with room for one policy goes on working when the second comes."""
    write_changed(tiny_policy_path, tmp_path / "next", torch.ones_like)
    engine = await loaded(tiny_policy_path, SPEC)
    before = {name: each.data_ptr() for name, each in engine.policy.model.named_parameters()}
    await engine.load(tmp_path / "next", version=2)
    assert engine.version == 2
    assert {name: each.data_ptr() for name, each in engine.policy.model.named_parameters()} == before
    assert all(bool((each == 1).all()) for each in engine.policy.model.parameters())


async def test_after_a_policy_of_nan_none_is_loaded_and_a_sound_one_can_be(
    tiny_policy_path: Path, tmp_path: Path
) -> None:
    write_changed(tiny_policy_path, tmp_path / "bad", lambda weight: torch.full_like(weight, torch.nan))
    engine = await loaded(tiny_policy_path, SPEC)
    with pytest.raises(MalformedPolicy, match="not finite"):
        await engine.load(tmp_path / "bad", version=2)
    assert engine.version is None
    with pytest.raises(NoPolicy):
        await engine.generate(make_requests(1))
    await engine.load(tiny_policy_path, version=3)
    assert len(await engine.generate(make_requests(1))) == 8


async def test_a_policy_that_is_deleted_while_it_waits_to_be_read_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's store deletes a policy as soon as the next one is there."""
    save_family("llama", tmp_path / "policy", eos=[1])
    save_family("llama", tmp_path / "next", eos=[1], seed=2)
    engine = await loaded(tmp_path / "policy", make_spec(max_new_tokens=50))
    halt = Halt(monkeypatch, at=5)
    under_way = asyncio.create_task(engine.generate(make_requests(1, samples=2)))
    await halt.wait()
    loading = asyncio.create_task(engine.load(tmp_path / "next", version=2))
    await eventually(lambda: len(engine._replacing) == 1)
    (tmp_path / "next").unlink()
    halt.go.set()
    await loading
    assert engine.version == 2
    assert len(await under_way) == 2


async def test_a_load_that_is_cancelled_while_it_waits_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family("llama", tmp_path / "policy", eos=[1])
    engine = await loaded(tmp_path / "policy", make_spec(max_new_tokens=50))
    halt = Halt(monkeypatch, at=5)
    under_way = asyncio.create_task(engine.generate(make_requests(1, samples=2)))
    await halt.wait()
    loading = asyncio.create_task(engine.load(tmp_path / "policy", version=2))
    await eventually(lambda: len(engine._replacing) == 1)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    again = asyncio.create_task(engine.load(tmp_path / "policy", version=3))
    halt.go.set()
    await again
    assert engine.version == 3
    assert len(await under_way) == 2


def write_changed(path: Path, to: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write the policy in `path` with each weight put through `change`."""
    policy = load_policy(path, dtype=torch.float32)
    for parameter in policy.model.parameters():
        parameter.data = change(parameter.data)
    save_policy(policy.model, policy.tokenizer, to)


async def test_a_policy_too_narrow_for_the_proofs_is_refused_at_once(tiny_policy_path: Path) -> None:
    engine = TorchEngine(
        RunSpec(
            name="test", environments=(EnvironmentSpec("arithmetic"),), proofs=ProofSpec(scheme="toploc/1", top_k=129)
        )
    )
    with pytest.raises(BrokenPolicy, match="128 hidden units are too few"):
        await engine.load(tiny_policy_path, version=1)
    assert engine.version is None


def test_numbers_that_are_not_finite_are_an_error_not_a_rollout(tiny_policy_path: Path) -> None:
    for broken in ("lm_head.weight", "model.norm.weight"):
        policy = load_policy(tiny_policy_path, dtype=torch.float32)
        policy.model.get_parameter(broken).data[:] = float("nan")
        call, batch = Call(make_requests(1, samples=1)), Batch(make_spec(max_new_tokens=2))
        waiting = call.rows
        with torch.inference_mode():
            while not call.is_over:
                batch.step(LoadedPolicy(policy, 1), waiting)
                waiting = []
        with pytest.raises(BrokenPolicy):
            call.rollouts.result()


# Calls come and go while others are under way.


def tokens_of(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.completion_ids for rollout in rollouts]


async def test_a_later_call_joins_the_batch_and_may_be_done_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that is leased while others are generated must not wait for the longest of them."""
    save_family("llama", tmp_path / "policy", eos=[1])
    engine = await loaded(tmp_path / "policy", make_spec(max_new_tokens=300))
    requests = make_requests(1, samples=6)
    wanted = await engine.generate(requests)
    shortest, longest = (pick(wanted, key=lambda rollout: len(rollout.completion_ids)) for pick in (min, max))
    assert len(longest.completion_ids) > len(shortest.completion_ids) + 60
    halt = Halt(monkeypatch, at=30)
    under_way = asyncio.create_task(engine.generate([SampleRequest(tuple(longest.prompt_ids), longest.seed)]))
    await halt.wait()
    joins = asyncio.create_task(engine.generate([SampleRequest(tuple(shortest.prompt_ids), shortest.seed)]))
    await asyncio.sleep(0)
    halt.go.set()
    assert tokens_of(await joins) == [shortest.completion_ids]
    assert not under_way.done()
    assert tokens_of(await under_way) == [longest.completion_ids]


async def test_what_waits_for_room_joins_as_soon_as_a_row_ends(tmp_path: Path) -> None:
    """A long completion must not keep the others waiting: the batch is refilled row by row."""
    save_family("llama", tmp_path / "policy")
    spec = make_spec(max_new_tokens=200)
    everything = make_requests(6)
    wanted = await (await loaded(tmp_path / "policy", spec)).generate(everything)
    engine = await loaded(tmp_path / "policy", spec, max_rows=3)
    calls = [engine.generate(everything[start : start + 8]) for start in range(0, len(everything), 8)]
    found = [rollout for rollouts in await asyncio.gather(*calls) for rollout in rollouts]
    assert tokens_of(found) == tokens_of(wanted)


async def test_a_cancelled_call_takes_nothing_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family("llama", tmp_path / "policy", eos=[1])
    spec = make_spec(max_new_tokens=120)
    engine = await loaded(tmp_path / "policy", spec)
    kept, dropped = make_requests(2, samples=3)[:3], make_requests(2, samples=3, seed=3)[3:]
    wanted = await engine.generate(kept)
    halt = Halt(monkeypatch, at=12)
    leaving = asyncio.create_task(engine.generate(dropped))
    staying = asyncio.create_task(engine.generate(kept))
    await halt.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    halt.go.set()
    rollouts = await staying
    assert tokens_of(rollouts) == tokens_of(wanted)
    for rollout in rollouts:
        assert all(figures.exp_mismatches <= 1 for figures in proof_figures(engine.policy, rollout, spec))


async def test_closing_ends_what_is_under_way_and_the_engine_can_be_loaded_anew(tmp_path: Path) -> None:
    save_family("llama", tmp_path / "policy", eos=[1], vocabulary=16384)
    engine = await loaded(tmp_path / "policy", make_spec(max_new_tokens=100_000))
    work = asyncio.create_task(engine.generate(make_requests(1, samples=2)))
    await asyncio.sleep(0.1)
    await engine.close()
    await engine.close()
    with pytest.raises(Interrupted):
        await work
    assert engine.version is None
    with pytest.raises(NoPolicy):
        await engine.generate(make_requests(1))
    save_family("llama", tmp_path / "next")
    await engine.load(tmp_path / "next", version=2)
    assert len(await engine.generate(make_requests(1))) == 8


# A policy that arrives in flight: a verifier prefills each segment under its own policy, and must find it.


@pytest.mark.parametrize("family", families(pytest.mark.system, ["llama", *TINY_RECURRENT]))
async def test_a_policy_in_flight_cuts_every_row_there_and_both_parts_verify(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither keys and values nor a recurrent state may outlive the policy that made them."""
    spec = make_spec(max_new_tokens=60, max_version_lead=1, temperature=0.8)
    paths = {version: tmp_path / f"policy-{version}" for version in (1, 2)}
    for version, path in paths.items():
        if family in TINY_RECURRENT:
            random_policy(family, path, seed=version)
        else:
            save_family(family, path, eos=[1], seed=version)
    engine = await loaded(paths[1], spec)
    requests = make_requests(3, samples=4)
    halt = Halt(monkeypatch, at=20)
    under_way = asyncio.create_task(engine.generate(requests))
    await halt.wait()
    loading = asyncio.create_task(engine.load(paths[2], version=2))
    await eventually(lambda: len(engine._replacing) == 1)
    begun_later = asyncio.create_task(engine.generate(make_requests(1, samples=2, seed=9)))
    await asyncio.sleep(0)
    halt.go.set()
    await loading
    rollouts, begun_later = await under_way, await begun_later
    policies = {version: load_policy(path, dtype=torch.float32) for version, path in paths.items()}
    cuts = {rollout.segment_tokens[0] for rollout in rollouts if rollout.segment_versions == [1, 2]}
    assert cuts == {20 + 1}, "the step that was about to begin is the last one of the old policy"
    assert {tuple(rollout.segment_versions) for rollout in begun_later} == {(2,)}
    for rollout in [*rollouts, *begun_later]:
        check_segments_of(rollout, policies, spec)
    for first in range(0, len(rollouts), 4):
        expected = Expected(
            version=1,
            published=None,
            prompt_ids=rollouts[first].prompt_ids,
            seeds=[request.seed for request in requests[first : first + 4]],
            vocabulary=128,
            eos_ids=engine.policy.eos_ids,
        )
        check_rollouts(rollouts[first : first + 4], expected=expected, spec=spec)
    cut = next(rollout for rollout in rollouts if rollout.segment_versions == [1, 2])
    one_policy = {1: policies[1], 2: policies[1]}
    assert any(figures.exp_mismatches > 38 for figures in proof_figures(one_policy, cut, spec)), "a test of nothing"


def check_segments_of(rollout: Rollout, policies: dict[int, Policy], spec: RunSpec) -> None:
    """Tokens, log-probabilities and proofs as if each segment's policy had read everything before."""
    for segment in rollout.segments:
        _, logits = prefill(policies[segment.version], rollout, spec)
        part = slice(segment.start, segment.end)
        assert rollout.completion_ids[part] == forced_tokens(logits, rollout.seed)[part]
        drawn = torch.tensor(rollout.completion_ids[part])[:, None]
        chosen = logits[part].log_softmax(-1).gather(1, drawn)[:, 0]
        assert (torch.tensor(rollout.logprobs[part]) - chosen).abs().max() < 1e-5
    for figures in proof_figures(policies, rollout, spec):
        assert figures.exp_mismatches <= 1
        assert figures.mant_err_mean < 0.1


async def test_a_policy_of_another_size_in_flight_fails_the_work_and_not_the_engine(tmp_path: Path) -> None:
    save_family("llama", tmp_path / "policy", eos=[1])
    save_family("llama", tmp_path / "other", hidden=192)
    engine = await loaded(tmp_path / "policy", make_spec(max_new_tokens=2000))
    with pytest.MonkeyPatch.context() as patch:
        halt = Halt(patch, at=5)
        work = asyncio.create_task(engine.generate(make_requests(1, samples=2)))
        await halt.wait()
        await engine.load(tmp_path / "other", version=2)
        halt.go.set()
    with pytest.raises(BrokenPolicy, match="another hidden size"):
        await work
    assert len(await engine.generate(make_requests(1, samples=2))) == 2


def test_a_cancelled_worker_leaves_in_time_to_hand_its_slot_back(tmp_path: Path) -> None:
    """Long completions of a large vocabulary: many seconds of decoding, cut short by a cancellation."""
    save_family("llama", tmp_path / "policy", eos=[1], vocabulary=16384)
    spec = make_spec(max_new_tokens=100_000, chunk_tokens=32)
    took: list[float] = []

    async def begin_and_cancel() -> None:
        engine = await loaded(tmp_path / "policy", spec)
        work = asyncio.create_task(engine.generate(make_requests(1, samples=4)))
        await asyncio.sleep(0.3)
        assert not work.done()
        took.append(time.monotonic())
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(begin_and_cancel())  # which waits for the executor's threads
    assert time.monotonic() - took[0] < 40
