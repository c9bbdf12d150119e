"""Policies larger than memory: layer by layer they compute what they compute whole, bit for bit."""

from __future__ import annotations

import asyncio
import os
import random
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from family_cases import IS_TIED, families
from torch import Tensor

from benchmarks.modelling.families import small_model
from benchmarks.modelling.policies import random_policy
from node.errors import EngineFailed
from node.policy.config import longest_sequence
from node.policy.file import Policy, load_policy, save_policy
from node.policy.layers import LayeredModel
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.packed import ModelInput, packed_input, padded_input
from node.policy.packed_attention import can_share, packed_attention
from node.policy.reading import OpenPolicy
from node.protocol.reasons import Refusal
from node.protocol.run import EnvironmentSpec, LimitsSpec, ModelSpec, ProofSpec, RunSpec
from node.protocol.submission import Rollout, toploc_bytes
from node.verification import batches, streamed
from node.verification.deviations import SpanMeasured
from node.verification.measure import EngineAway, Measurement, PolicyUnavailable
from node.verification.prefill import TransformersPrefill
from node.verification.proofs import build_proofs
from node.verification.readings import make_prefills, read_by_transformers
from node.verification.second_look import altered, compare_weights, exact_states, int8
from node.verification.spans import Span
from node.verification.streamed import StreamedPrefill
from toploc import Gain, gain, shifts, sketch_errors

POSITIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}
SPEC = RunSpec(
    name="layers",
    environments=(EnvironmentSpec(name="arithmetic"),),
    model=ModelSpec(dtype="bfloat16"),
    proofs=ProofSpec(scheme="toploc/1+sketch/1", chunk_tokens=8),
)


def written(
    folder: Path, family: str, *, tied: bool = True, dtype: str = "bfloat16", positions: str = "default"
) -> Path:
    """A policy of three layers with random weights of one seed."""
    rope = {"rope_parameters": POSITIONS[positions]} if POSITIONS[positions] else {}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "tie_word_embeddings": tied}
    model = small_model(family, seed=7, dtype=getattr(torch, dtype), **sizes, **rope)
    path = folder / "policy.safetensors"
    save_policy(model, make_tokenizer(), path)
    return path


def whole(policy: Policy, ids: Tensor) -> Tensor:
    states: Tensor = policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def made_up_spans(hidden: int) -> list[Span]:
    """Spans of several lengths, whose proofs are of other states."""
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    spans = []
    for row, (prompt, tokens) in enumerate([(5, 20), (9, 3), (5, 20), (30, 12)]):
        seed = bytes([row]) * 16
        states = torch.split(torch.randn(tokens, hidden, generator=generator).bfloat16(), 8)
        span = Span(
            row=row,
            seed=seed,
            context_ids=rng.choices(range(3, 128), k=prompt),
            position=0,
            token_ids=rng.choices(range(3, 128), k=tokens),
            proofs=build_proofs(states, [seed] * len(states), spec=SPEC.proofs),
            first_proof=0,
        )
        spans.append(span)
    return spans


@pytest.mark.parametrize("family", families(others=pytest.mark.system))
def test_layer_by_layer_every_family_computes_the_same_bits(family: str, tmp_path: Path) -> None:
    path = written(tmp_path, family, tied=IS_TIED[family])
    assert_same_bits(path, dtype=torch.bfloat16)


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_of_every_kind_are_the_models_own(positions: str, tmp_path: Path) -> None:
    assert_same_bits(written(tmp_path, "llama", positions=positions), dtype=torch.bfloat16)


@pytest.mark.parametrize(("stored", "runs"), [("float32", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32")])
def test_weights_are_rounded_to_the_dtype_of_the_run(stored: str, runs: str, tmp_path: Path) -> None:
    assert_same_bits(written(tmp_path, "qwen3", dtype=stored), dtype=getattr(torch, runs))


def test_long_variants_keep_the_positions_of_short_sequences(tmp_path: Path) -> None:
    """transformers takes others once a batch has a longer sequence: a worker that decodes beside a long one would hold
    another model than its verifier.
    """
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + at / 8 for at in range(8)],
        "long_factor": [4.0] * 8,
    }
    sizes = {"hidden_size": 64, "intermediate_size": 96, "sliding_window": None}
    model = small_model("phi3", seed=7, rope_parameters=rope, original_max_position_embeddings=16, **sizes)
    path = tmp_path / "policy.safetensors"
    save_policy(model, make_tokenizer(), path)
    assert_same_bits(path, dtype=torch.float32)
    policy, ids = load_policy(path, dtype=torch.float32), torch.arange(3, 43)[None]
    assert longest_sequence(policy.config) == 16
    with torch.inference_mode():
        short, long = (model.base_model(input_ids=ids[:, :end], use_cache=False).last_hidden_state for end in (16, 40))
        torch.testing.assert_close(whole(policy, ids[:, :16]), short)
        torch.testing.assert_close(whole(policy, ids)[:, :16], short)
        assert not torch.allclose(long[:, :16], short), "or this test would show nothing"


def read_together(policy: Policy, read: ModelInput) -> Tensor:
    model: Any = policy.model
    with packed_attention(model if read.layout else None):
        device = torch.device("cpu")
        states: Tensor = model.base_model(read.ids, use_cache=False, **read.arguments(device)).last_hidden_state
    return states


def assert_same_bits(path: Path, *, dtype: torch.dtype) -> None:
    """States and logits, in the run's dtype and in float32."""
    policy, file = load_policy(path, dtype=dtype), OpenPolicy(path)
    together, alone = [[*range(3, 53)], [*range(3, 43), *range(63, 73)]], [[*range(3, 10)]]
    if can_share(policy.config):
        inputs = [packed_input(together, shared=[0, 40]), packed_input(alone, shared=[0])]
    else:
        inputs = [padded_input(together), padded_input(alone)]
    with torch.inference_mode():
        for reference, computing in ((policy, dtype), (policy.in_float32(), torch.float32)):
            model = LayeredModel(file, rounded=dtype, dtype=computing)
            expected = [read_together(reference, read) for read in inputs]
            found = model.hidden_states(inputs)
            assert all(map(torch.equal, found, expected))
            assert torch.equal(model.head().logits(found[0][0]), reference.logits(expected[0][0]))
        eight_bits = LayeredModel(file, rounded=dtype, dtype=torch.float32, alter=int8)
        assert torch.equal(eight_bits.hidden_states(inputs)[0], read_together(altered(policy, int8), inputs[0]))


class Counting(OpenPolicy):
    """Notes the most bytes of weights that were alive at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.alive, self.most = 0, 0

    def read(self, parts: Mapping[str, slice], *, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        weight = super().read(parts, shape=shape, dtype=dtype)
        self.alive += weight.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(weight, self._released, weight.nbytes)
        return weight

    def _released(self, size: int) -> None:
        self.alive -= size


def test_no_more_than_the_largest_part_is_in_memory_at_once(tmp_path: Path) -> None:
    """An auditor with 16 GB would otherwise find out after an hour."""
    path = written(tmp_path, "llama", tied=False)
    base: Any = load_policy(path, dtype=torch.bfloat16).model.base_model
    parts = [base.embed_tokens, *base.layers]
    largest = max(sum(weight.nbytes for weight in part.parameters()) for part in parts)
    file, read = Counting(path), packed_input([[*range(3, 40)]], shared=[0])
    with torch.inference_mode():
        LayeredModel(file, rounded=torch.bfloat16, dtype=torch.bfloat16).hidden_states([read])
    assert file.alive == 0
    assert file.most == largest


@pytest.mark.parametrize("readings", [1, 2])
def test_a_streamed_prefill_measures_what_a_loaded_one_does(
    readings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several passes as well: a verdict must not depend on a verifier's memory."""
    path = written(tmp_path, "qwen2", dtype="float32")
    spec = msgspec.structs.replace(SPEC, limits=LimitsSpec(readings=readings))
    spans, loaded = made_up_spans(64), read_by_transformers(path, spec=spec)
    prefill = asyncio.run(make_prefills(spec).prefill(path, version=0, streamed=True))
    assert prefill.measure(spans, spec=spec) == loaded.measure(spans, spec=spec)
    monkeypatch.setattr(batches, "MAX_BATCH_TOKENS", 60)
    monkeypatch.setattr(streamed, "MAX_STATE_BYTES", 8 * 1024)
    assert prefill.measure(spans, spec=spec) == loaded.measure(spans, spec=spec)


def rollout_of(span: Span) -> Rollout:
    return Rollout(
        seed=span.seed,
        prompt_ids=span.context_ids,
        completion_ids=span.token_ids,
        logprobs=[-1.0] * span.tokens,
        segment_versions=[0],
        segment_tokens=[span.tokens],
        proofs=span.proofs,
    )


def test_work_waits_while_the_disk_fails_under_its_policy(tmp_path: Path) -> None:
    """Three undecided attempts would be logged, though a policy that cannot be loaded makes work wait."""
    path, span = written(tmp_path, "llama"), made_up_spans(64)[0]
    measuring = Measurement([[rollout_of(span)]], spec=SPEC)
    prefill = StreamedPrefill(OpenPolicy(path), dtype=torch.bfloat16)
    os.truncate(path, path.stat().st_size // 2)
    measuring.measure(prefill, 0)
    with pytest.raises(PolicyUnavailable, match="shorter"):
        measuring.result(0)


def test_work_waits_while_an_engine_cannot_load_and_it_is_tried_once_for_all(tmp_path: Path) -> None:
    """Each try takes minutes, and each submission would lose one of its three attempts."""
    tries: list[int] = []

    class Dead(StreamedPrefill):
        def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
            tries.append(len(spans))
            raise EngineFailed("vLLM did not start.", code="engine_died")

    groups = [[rollout_of(span)] for span in made_up_spans(64)]
    measuring = Measurement(groups, spec=SPEC)
    measuring.measure(Dead(OpenPolicy(written(tmp_path, "llama")), dtype=torch.bfloat16), 0)
    assert tries == [len(groups)]
    for group in range(len(groups)):
        with pytest.raises(EngineAway, match="vLLM did not start"):
            measuring.result(group)


def test_a_second_look_at_files_has_the_gain_of_one_at_loaded_policies(tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    path, other = written(tmp_path, "mistral"), written(tmp_path / "next", "mistral", positions="linear")
    spans = made_up_spans(64)
    policy = load_policy(path, dtype=torch.bfloat16)
    for alter, reference in ((None, policy.in_float32()), (int8, altered(policy, int8))):
        states = exact_states(OpenPolicy(path), spans, dtype=torch.bfloat16, alter=alter)
        assert all(map(torch.equal, states, TransformersPrefill(reference).states(spans)))
    own = OpenPolicy(path)
    assert compare_weights(own, own, spans, spec=SPEC, alter=int8) == gain_of(policy, altered(policy, int8), spans)
    previous = load_policy(other, dtype=torch.bfloat16)
    assert compare_weights(own, OpenPolicy(other), spans, spec=SPEC) == gain_of(policy, previous, spans)


def gain_of(policy: Policy, other: Policy, spans: list[Span]) -> Gain:
    """The gain by whole models in float32."""
    step = SPEC.proofs.sketch_step
    ours, theirs = (
        [
            chunk
            for states in TransformersPrefill(each.in_float32()).states(spans)
            for chunk in torch.split(states.bfloat16(), SPEC.proofs.chunk_tokens)
        ]
        for each in (policy, other)
    )
    seeds = [span.seed for span in spans for _ in span.proofs]
    sent = [proof[toploc_bytes(SPEC.proofs) :] for span in spans for proof in span.proofs]
    return gain(sketch_errors(ours, seeds, sent, step=step), shifts(ours, theirs, seeds, step=step), seeds)


@pytest.mark.parametrize("name", ["finch", "goldfinch"])
def test_a_second_look_at_a_recurrent_policy_loads_it_whole(name: str, tmp_path: Path) -> None:
    path, spans = random_policy(name, tmp_path / "policy"), made_up_spans(128)
    policy = load_policy(path, dtype=torch.bfloat16)
    states = exact_states(OpenPolicy(path), spans, dtype=torch.bfloat16, alter=int8)
    assert all(map(torch.equal, states, TransformersPrefill(altered(policy, int8)).states(spans)))
