"""Recurrent models of every family: one model, whether it steps, reads at once, or learns from packed rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_rows import row_backward
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.modelling.policies import random_model, random_policy
from coordinator.training.groups import Sample
from coordinator.training.lora import recompute_activations
from coordinator.training.packing import Scored, pack
from node.engines.base import DoesNotFit, WrongEngine
from node.engines.vllm_settings import VllmSettings, make_plan
from node.policy.config import parse_config
from node.policy.errors import MalformedPolicy
from node.policy.families import RECURRENT_FAMILIES, TINY_FAMILIES, TINY_RECURRENT
from node.policy.file import inspect_policy, load_policy
from node.policy.models import RECURRENT
from node.policy.models.base import LENGTH, state_bytes
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.models.wkv import WKV_CHUNK
from node.policy.products import use_blocks
from node.protocol.run import RunSpec

RWKV = ["eagle", "finch"]


@pytest.fixture(params=TINY_RECURRENT)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def draw(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    """Tokens after an empty line, from which on a frame-based policy sees its screen."""
    ids = torch.randint(3, 128, (rows, columns), generator=torch.Generator().manual_seed(seed))
    ids[:, :2] = make_tokenizer().convert_tokens_to_ids("\n")
    return ids


def step_by_step(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    state, hidden = None, []
    for column in ids.split(1, dim=1):
        output = model.base_model(input_ids=column, state=state, use_cache=True)
        state = output.state
        hidden.append(output.last_hidden_state)
    return torch.cat(hidden, 1), state


def test_every_recurrent_family_has_a_tiny_policy_and_the_commands_name_them_all() -> None:
    assert tuple(MAKERS) == TINY_FAMILIES
    assert {MAKERS[each](0).config.model_type for each in TINY_RECURRENT} == set(RECURRENT) == set(RECURRENT_FAMILIES)


@pytest.mark.parametrize("columns", [1, WKV_CHUNK - 1, WKV_CHUNK, WKV_CHUNK + 1, 5 * WKV_CHUNK + 7])
@torch.inference_mode()
def test_a_prefill_is_what_decoding_step_by_step_makes(name: str, columns: int) -> None:
    """The verifier does one, the worker the other: what they differ by, an honest worker is charged with."""
    model, ids = random_model(name), draw(3, columns)
    output = model.base_model(input_ids=ids, use_cache=True)
    hidden, state = step_by_step(model, ids)
    assert (output.last_hidden_state - hidden).abs().max() < 1e-4
    assert output.state[LENGTH].tolist() == state[LENGTH].tolist() == [columns] * 3


@pytest.mark.parametrize("cut", [1, WKV_CHUNK - 1, WKV_CHUNK, 2 * WKV_CHUNK + 3])
@torch.inference_mode()
def test_a_prefill_that_goes_on_from_a_state_is_the_whole_one(name: str, cut: int) -> None:
    """A later turn of a conversation is read behind the state of those before."""
    model, ids = random_model(name), draw(2, 60)
    whole = model.base_model(input_ids=ids).last_hidden_state
    first = model.base_model(input_ids=ids[:, :cut], use_cache=True)
    second = model.base_model(input_ids=ids[:, cut:], state=first.state, use_cache=True)
    found = torch.cat([first.last_hidden_state, second.last_hidden_state], 1)
    assert (found - whole).abs().max() < 1e-4
    longer = model.base_model(input_ids=ids[:, :1], state=second.state).last_hidden_state
    again = model.base_model(input_ids=torch.cat([ids, ids[:, :1]], 1)).last_hidden_state[:, -1:]
    assert (longer - again).abs().max() < 1e-4


@torch.inference_mode()
def test_padding_on_the_right_changes_nothing_before_it(name: str) -> None:
    """The verifier reads rows of unlike lengths together."""
    model, ids = random_model(name), draw(2, 70)
    alone = model.base_model(input_ids=ids[:, :37]).last_hidden_state
    padded = model.base_model(input_ids=ids).last_hidden_state[:, :37]
    assert (alone - padded).abs().max() < 1e-4


def test_sequences_that_are_not_equally_far_beyond_the_grid_do_not_go_on_together(name: str) -> None:
    model = random_model(name)
    state = model.base_model(input_ids=draw(2, 5), use_cache=True).state
    state[LENGTH] = torch.tensor([5, 6])
    with pytest.raises(ValueError, match="equal offsets"):
        model.base_model(input_ids=draw(2, 3), state=state)
    with pytest.raises(ValueError, match="no single final state"):
        model.base_model(input_ids=draw(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]), use_cache=True)


# Training: rows of several samples.


def scored(lengths: list[int]) -> list[Scored]:
    rows = [draw(1, length, seed=length)[0].tolist() for length in lengths]
    samples = [Sample(tuple(row[:4]), tuple(row[4:]), (-1.0,) * (len(row) - 4)) for row in rows]
    return [Scored(sample, 0.5, (0,) * len(sample.completion_ids)) for sample in samples]


def gradients(model: Any, rows: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    model.zero_grad()
    logprobs = [row_backward(model, row, row.weight) for row in rows]
    return logprobs, [torch.zeros(1) if each.grad is None else each.grad.clone() for each in model.parameters()]


def test_packed_rows_give_the_log_probabilities_and_gradients_of_their_samples_alone(name: str) -> None:
    """A sample must not learn from its neighbour in the row."""
    model, samples = random_model(name).train(), scored([12, 31, 16, 45])
    together, packed = gradients(model, pack(samples, row_tokens=512, recurrent=True))
    alone, single = gradients(model, pack(samples, row_tokens=1, recurrent=True))
    assert (len(together), len(alone)) == (1, 4)
    assert (together[0] - torch.cat(alone)).abs().max() < 1e-4
    for one, other in zip(packed, single, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()) + 1e-6)


def test_every_weight_learns(name: str) -> None:
    model = random_model(name).train()
    _, found = gradients(model, pack(scored([40]), row_tokens=512, recurrent=True))
    silent = [
        parameter for (parameter, _), grad in zip(model.named_parameters(), found, strict=True) if not grad.abs().any()
    ]
    assert silent == []


def test_a_row_of_one_token_has_a_gradient_for_every_weight(name: str) -> None:
    """Processes that train together meet once for each weight: where one has no gradient for it, all of them end."""
    model = random_model(name).train()
    model(input_ids=draw(1, 1), position_ids=torch.zeros(1, 1, dtype=torch.int64)).logits.sum().backward()
    assert [each for each, parameter in model.named_parameters() if parameter.grad is None] == []


def test_recomputed_activations_give_the_same_gradients(name: str) -> None:
    model, rows = random_model(name).train(), pack(scored([40]), row_tokens=512, recurrent=True)
    _, kept = gradients(model, rows)
    recompute_activations(model)
    _, again = gradients(model, rows)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(kept, again, strict=True))


# Files.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_file_carries_the_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = random_policy(name, tmp_path / "policy")
    loaded = load_policy(path, dtype=dtype)
    original, ids = random_model(name).to(dtype), draw(1, 40)
    use_blocks(original)  # the same products, whatever this CPU has for 16 bits
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, original(ids).logits)
    assert inspect_policy(path).hidden == loaded.hidden == 128
    assert not loaded.model.training


def test_transformers_reads_what_it_saved(name: str, tmp_path: Path) -> None:
    """`swarmproof export policy` writes such a folder, and `model.initial` may name one."""
    model, ids = random_model(name), draw(1, 40)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)


def rewritten(name: str, folder: Path, old: str, new: str) -> Path:
    path = random_policy(name, folder / "policy")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118  (not a mapping)
    assert old in metadata["config"]
    save_file(tensors, path, metadata | {"config": metadata["config"].replace(old, new)})
    return path


@pytest.mark.parametrize("name", RWKV)
@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ('"hidden_size": 128', '"hidden_size": 129', "bad_config"),
        ('"hidden_size": 128', '"hidden_size": 32', "bad_config"),
        ('"hidden_size": 128', '"hidden_size": 0', "bad_config"),
        ('"hidden_size": 128', '"hidden_size": 16777216', "wrong_tensors"),
        ('"hidden_size": 128', '"hidden_size": -64', "bad_config"),
        ('"hidden_size": 128', '"hidden_size": "128"', "bad_config"),
        ('"intermediate_size": ', '"intermediate_size": 1', "wrong_tensors"),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 1000', "bad_config"),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 3', "wrong_tensors"),
        ('"vocab_size": 128', '"vocab_size": 16777216', "wrong_tensors"),
        ('"vocab_size": 128', '"vocab_size": 128, "auto_map": {"AutoModel": "a.B"}', "bad_config"),
        ('"vocab_size": 128', '"vocab_size": 128, "num_attention_heads": 2', "bad_config"),
    ],
)
def test_a_hostile_configuration_is_refused_before_it_takes_memory(
    name: str, old: str, new: str, code: str, tmp_path: Path
) -> None:
    path = rewritten(name, tmp_path, old, new)
    for build in (lambda: load_policy(path, dtype=None), lambda: inspect_policy(path)):
        with pytest.raises(MalformedPolicy) as caught:
            build()
        assert caught.value.code == code


def test_every_field_of_a_configuration_has_its_type_checked(name: str, tmp_path: Path) -> None:
    """What is not, a stranger's file makes fail anywhere, with an error that no command knows."""
    path = random_policy(name, tmp_path / "policy")
    with safe_open(path, framework="pt") as file:
        fields = json.loads(file.metadata()["config"])
    for field in fields.keys() - {"model_type", "dtype"}:
        for value in ({"a": 1}, "x", 1.5):
            if not (isinstance(fields[field], float) and isinstance(value, float)):
                with pytest.raises(MalformedPolicy) as caught:
                    parse_config(json.dumps(fields | {field: value}), tensors=1000)
                assert caught.value.code == "bad_config"


def test_vllm_says_that_it_has_no_such_model_and_what_to_do(name: str, tmp_path: Path) -> None:
    """A worker must not try for ever, nor tell its owner to buy memory."""
    blueprint = inspect_policy(random_policy(name, tmp_path / "policy"))
    spec = RunSpec(name="test", environments=())
    with pytest.raises(WrongEngine, match="--engine torch") as caught:
        make_plan(blueprint, spec=spec, settings=VllmSettings(), memory_bytes=2**40, on_cpu=True)
    assert isinstance(caught.value, DoesNotFit)
    assert caught.value.code == "wrong_engine"


# Eagle and Finch.


@pytest.mark.parametrize("name", RWKV)
@torch.inference_mode()
def test_the_state_has_one_size_and_is_float32_in_any_dtype(name: str) -> None:
    """In bfloat16 a state forgets what is small beside it, and decoding drifts away from a prefill."""
    model = random_model(name).to(torch.bfloat16)
    sizes = []
    for columns in (1, 40, 200):
        state = model.base_model(input_ids=draw(2, columns), use_cache=True).state
        sizes.append(state_bytes(state))
        assert {state[f"heads_{layer}"].dtype for layer in (0, 1)} == {torch.float32}
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("name", RWKV)
@torch.inference_mode()
def test_in_bfloat16_decoding_stays_near_a_prefill(name: str) -> None:
    model, ids = random_model(name).to(torch.bfloat16), draw(2, 100)
    whole = model.base_model(input_ids=ids).last_hidden_state.float()
    hidden, _ = step_by_step(model, ids)
    assert (hidden.float() - whole).abs().mean() < 0.01 * whole.abs().mean()
