"""A policy file arrives from strangers: whatever is in it, a node answers with a typed error, or builds the policy."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from family_cases import IS_TIED, families
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.modelling.families import small_config, small_model
from node.policy.config import parse_config, render_config
from node.policy.errors import MalformedPolicy, UnreadablePolicy
from node.policy.families import ATTENTION_FAMILIES
from node.policy.file import (
    Policy,
    inspect_policy,
    load_policy,
    render_completion,
    render_prompt,
    save_policy,
)
from node.policy.models.tiny_llama import EOS, make_model, make_tokenizer
from node.policy.products import use_blocks
from node.policy.weights import MAX_HEADER_BYTES

Metadata = dict[str, str]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="session")
def parts(tiny_policy_path: Path) -> tuple[Metadata, Tensors]:
    """The tiny policy taken apart, to be put together wrongly by another writer than ours."""
    with safe_open(tiny_policy_path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    return load_policy(tiny_policy_path, dtype=torch.float32)


def refusal(path: Path) -> str:
    """The code with which the file is refused."""
    with pytest.raises(MalformedPolicy) as caught:
        load_policy(path, dtype=torch.float32)
    assert len(str(caught.value)) <= 1000
    return caught.value.code


def refusal_unbuilt(path: Path) -> str | None:
    """As `refusal`, by who leaves the weights to another engine; None where it is taken."""
    try:
        inspect_policy(path)
    except MalformedPolicy as error:
        return error.code
    return None


# What the operator relies on.


def test_a_loaded_policy_computes_what_the_saved_one_did(policy: Policy) -> None:
    original = make_model(seed=20)
    ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        assert torch.equal(policy.model(ids).logits, original(ids).logits)
    assert (policy.vocabulary, policy.hidden, policy.eos_ids) == (128, 128, {EOS})
    assert not policy.model.training
    assert all(parameter.requires_grad for parameter in policy.model.parameters())


def test_equal_policies_have_equal_bytes_so_that_a_digest_names_the_weights(
    policy: Policy, tiny_policy_path: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.safetensors"
    # Earlier use of a tokenizer must not show in the file.
    policy.tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    save_policy(policy.model, policy.tokenizer, again)
    assert again.read_bytes() == tiny_policy_path.read_bytes()


def test_loading_leaves_the_random_state_alone_so_that_training_replays(tiny_policy_path: Path) -> None:
    before = torch.get_rng_state()
    load_policy(tiny_policy_path, dtype=torch.float32)
    make_model(seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shared_weight_travels_once_and_is_shared_again(policy: Policy, parts: tuple[Metadata, Tensors]) -> None:
    assert "lm_head.weight" not in parts[1]
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight


@pytest.mark.parametrize("family", families(others=pytest.mark.system))
def test_every_family_survives_the_journey(family: str, tmp_path: Path) -> None:
    assert_survives(tmp_path / "policy", family, is_tied=IS_TIED[family], dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_float32_and_an_output_embedding_survive_the_journey(family: str, tmp_path: Path) -> None:
    assert_survives(tmp_path / "policy", family, is_tied=False, dtype=torch.float32)


def assert_survives(path: Path, family: str, *, is_tied: bool, dtype: torch.dtype) -> None:
    """A policy of random weights in a file at `path` computes the same logits when it is read again."""
    original = small_model(family, dtype=dtype, eos_token_id=[EOS, 7], tie_word_embeddings=is_tied)
    save_policy(original, make_tokenizer(), path)
    loaded = load_policy(path, dtype=dtype)
    use_blocks(original)  # the same products, whatever this CPU has for 16 bits
    ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, original(ids).logits)
    assert inspect_policy(path).hidden == 32
    assert loaded.eos_ids == {EOS, 7}


def test_a_policy_is_loaded_in_the_dtype_asked_for(tiny_policy_path: Path) -> None:
    loaded = load_policy(tiny_policy_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_policy_does_not_change_when_its_file_does(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    save_policy(make_model(seed=1), make_tokenizer(), path)
    loaded = load_policy(path, dtype=torch.float32)
    before = loaded.model.model.norm.weight.clone()
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(loaded.model.model.norm.weight, before)


def test_a_failed_save_leaves_the_old_policy_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy"
    save_policy(make_model(seed=1), make_tokenizer(), path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_policy(make_model(seed=2), make_tokenizer(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_model_that_nobody_could_load_is_not_saved(tmp_path: Path) -> None:
    mixed = make_model(seed=1)
    mixed.model.norm.bfloat16()
    with pytest.raises(ValueError, match="one dtype"):
        save_policy(mixed, make_tokenizer(), tmp_path / "mixed")
    foreign = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["gpt2"](vocab_size=128, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    )
    with pytest.raises(ValueError, match="gpt2"):
        save_policy(foreign, make_tokenizer(), tmp_path / "foreign")
    assert list(tmp_path.iterdir()) == []


def test_prompts_and_completions_keep_each_character(policy: Policy) -> None:
    prompt = "Q:rev gaeh ~\nA:  <think>"
    assert render_completion(policy, render_prompt(policy, prompt)) == prompt
    assert render_prompt(policy, "<think></think>") == [3, 4]
    assert render_completion(policy, [*render_prompt(policy, "</think>109"), EOS]) == "</think>109"
    assert render_completion(policy, [101, 127]) == ""


def test_the_rotary_base_of_llama_3_is_no_integer_beyond_the_limit(tmp_path: Path) -> None:
    """Integers decide what is allocated, and are bounded; 5e8 is one in a configuration that real models have."""
    configured = make_model(seed=1).config
    configured.rope_parameters = {"rope_type": "default", "rope_theta": 500_000_000}
    model = AutoModelForCausalLM.from_config(configured)
    save_policy(model, make_tokenizer(), tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy", dtype=None).model
    assert loaded.config.rope_parameters["rope_theta"] == 5e8
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


# What a stranger may try.


def with_config(**changes: object) -> Callable[[Metadata, Tensors], None]:
    def change(metadata: Metadata, _: Tensors) -> None:
        metadata["config"] = json.dumps(json.loads(metadata["config"]) | changes)

    return change


def with_metadata(**changes: str) -> Callable[[Metadata, Tensors], None]:
    return lambda metadata, _: metadata.update(changes)


def with_tokenizer(edit: Callable[[dict[str, object]], object]) -> Callable[[Metadata, Tensors], None]:
    def change(metadata: Metadata, _: Tensors) -> None:
        tokenizer = json.loads(metadata["tokenizer"])
        edit(tokenizer)
        metadata["tokenizer"] = json.dumps(tokenizer)

    return change


def with_tensor(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Metadata, Tensors], None]:
    return lambda _, tensors: tensors.update({name: edit(tensors[name]).contiguous()})


def with_three_of_four_heads(metadata: Metadata, tensors: Tensors) -> None:
    with_config(num_key_value_heads=3)(metadata, tensors)
    for layer in range(2):
        for part in "kv":
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = torch.zeros(96, 128)


def with_positions(**changes: object) -> Callable[[Metadata, Tensors], None]:
    return with_config(rope_parameters={"rope_type": "default", **ROPE, **changes})


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
ROPE = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ATTACKS: dict[str, tuple[str, Callable[[Metadata, Tensors], object]]] = {
    "another_format": ("wrong_metadata", with_metadata(swarmproof="policy/2")),
    "a_field_nobody_reads": ("wrong_metadata", with_metadata(remark="x")),
    "no_configuration": ("wrong_metadata", lambda metadata, _: metadata.pop("config")),
    "code_by_auto_map": ("bad_config", with_config(auto_map={"AutoModelForCausalLM": "evil/repo--modeling.Evil"})),
    "code_by_attention_kernel": ("bad_config", with_config(attn_implementation="evil/kernel")),
    "code_by_hidden_attention_kernel": ("bad_config", with_config(_attn_implementation="evil/kernel")),
    "code_by_hidden_internal_kernel": ("bad_config", with_config(_attn_implementation_internal="evil/kernel")),
    "code_by_quantizer": ("bad_config", with_config(quantization_config={"quant_method": "gptq"})),
    "another_repository": ("bad_config", with_config(name_or_path="evil/repo")),
    "class_attribute": ("bad_config", with_config(base_model_tp_plan={})),
    "unknown_family": ("unsupported_model", with_config(model_type="timm_wrapper")),
    "family_is_a_list": ("unsupported_model", with_config(model_type=["llama"])),
    "no_family": ("unsupported_model", with_config(model_type=None)),
    "configuration_is_a_list": ("bad_config", with_metadata(config="[]")),
    "configuration_is_no_json": ("bad_config", with_metadata(config="{'a': 1}")),
    "configuration_is_deep": ("bad_config", with_metadata(config='{"a":' * 10_000 + "1" + "}" * 10_000)),
    "configuration_nests": ("bad_config", with_config(rope_parameters={"factor": {"factor": [1]}})),
    "configuration_is_long": ("bad_config", with_metadata(config='{"a":"' + "x" * 70_000 + '"}')),
    "number_is_infinite": ("bad_config", with_metadata(config='{"rms_norm_eps": 1e999}')),
    "dtype_is_an_attribute_of_torch": ("bad_config", with_config(dtype="manual_seed")),
    "dtype_is_not_the_files": ("wrong_tensors", with_config(dtype="bfloat16")),
    "a_million_layers": ("bad_config", with_config(num_hidden_layers=1_000_000)),
    "more_layers_than_tensors": ("bad_config", with_config(num_hidden_layers=100)),
    "negative_layers": ("bad_config", with_config(num_hidden_layers=-1)),
    "number_of_layers_is_a_text": ("bad_config", with_config(num_hidden_layers="2")),
    "hidden_size_that_fits_no_memory": ("wrong_tensors", with_config(hidden_size=2**24, head_dim=2**20)),
    "vocabulary_that_fits_no_memory": ("wrong_tensors", with_config(vocab_size=2**24)),
    "number_that_fits_no_integer": ("bad_config", with_config(hidden_size=2**70)),
    "number_that_fits_no_tensor": ("bad_config", with_config(hidden_size=2**62)),
    "no_heads": ("bad_config", with_config(num_attention_heads=0)),
    "heads_that_do_not_divide": ("broken_model", with_three_of_four_heads),
    "unknown_activation": ("unsupported_model", with_config(hidden_act="os.system")),
    "kernel_by_the_activations_name": ("unsupported_model", with_config(hidden_act="xielu")),
    "activation_that_vllm_does_not_have": ("unsupported_model", with_config(hidden_act="gelu")),
    "positions_of_images_by_a_section": ("unsupported_model", with_positions(mrope_section=[8, 4, 4])),
    "positions_by_fourier_series": ("unsupported_model", with_positions(use_fope=True)),
    "positions_of_a_part_of_each_head": ("unsupported_model", with_positions(partial_rotary_factor=0.5)),
    "positions_of_another_width": ("unsupported_model", with_positions(rope_dim=16)),
    "positions_of_one_kind_with_another_kinds_field": ("unsupported_model", with_positions(attention_factor=2.0)),
    "positions_without_a_base": ("bad_config", with_positions(rope_theta=0.0)),
    "positions_scaled_by_nothing": ("bad_config", with_positions(**YARN | {"factor": 0})),
    "positions_scaled_by_a_text": ("bad_config", with_positions(**YARN | {"factor": "4"})),
    "positions_of_a_kind_that_is_a_list": ("unsupported_model", with_positions(rope_type=["yarn"])),
    "frequencies_that_depend_on_the_length": (
        "unsupported_model",
        with_config(rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 2.0}),
    ),
    "frequencies_for_short_and_long_sequences_of_another_family": (
        "unsupported_model",
        with_config(
            rope_parameters=ROPE
            | {"rope_type": "longrope", "original_max_position_embeddings": 8}
            | {"short_factor": [1.0], "long_factor": [1.0]}
        ),
    ),
    "end_mark_outside_the_vocabulary": ("bad_config", with_config(eos_token_id=[1, 128])),
    "end_mark_is_a_text": ("bad_config", with_config(eos_token_id="<eos>")),
    "tokenizer_is_no_json": ("bad_tokenizer", with_metadata(tokenizer="\x80")),
    "tokenizer_is_empty": ("bad_tokenizer", with_metadata(tokenizer="{}")),
    "tokenizer_of_unknown_type": ("bad_tokenizer", with_tokenizer(lambda t: t.update(model={"type": "Evil"}))),
    "tokenizer_is_deep": ("bad_tokenizer", with_metadata(tokenizer="[" * 100_000)),
    "tokenizer_knows_more_ids_than_the_model": (
        "bad_tokenizer",
        with_tokenizer(lambda t: t["model"]["vocab"].update({"zz": 128})),
    ),
    "no_end_mark": ("bad_tokenizer", with_metadata(tokenizer_config="{}")),
    "end_mark_that_would_be_added": ("bad_tokenizer", with_metadata(tokenizer_config='{"eos_token":"<new>"}')),
    "class_by_tokenizer_config": (
        "bad_tokenizer",
        with_metadata(tokenizer_config='{"eos_token":"<eos>","tokenizer_class":"Evil"}'),
    ),
    "a_tensor_less": ("wrong_tensors", lambda _, tensors: tensors.pop(NORM)),
    "a_tensor_more": ("wrong_tensors", lambda _, tensors: tensors.update(extra=torch.zeros(2))),
    "the_shared_tensor_twice": (
        "wrong_tensors",
        lambda _, tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    ),
    "a_transposed_tensor": ("wrong_tensors", with_tensor(UP, lambda t: t.T)),
    "a_flat_tensor": ("wrong_tensors", with_tensor(UP, lambda t: t.reshape(-1))),
    "an_empty_tensor": ("wrong_tensors", with_tensor(NORM, lambda t: t[:0])),
    "mixed_dtypes": ("wrong_tensors", with_tensor(NORM, lambda t: t.bfloat16())),
    "integers": ("wrong_tensors", with_tensor(NORM, lambda t: t.long())),
    "no_tensors": ("wrong_tensors", lambda _, tensors: tensors.clear()),
    "weights_that_are_not_numbers": ("broken_model", with_tensor(NORM, lambda t: t * float("nan"))),
    "weights_that_overflow": ("broken_model", with_tensor(UP, lambda t: t.sign() * 3e38)),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_file_is_refused(attack: str, parts: tuple[Metadata, Tensors], tmp_path: Path) -> None:
    code, change = ATTACKS[attack]
    metadata, tensors = dict(parts[0]), dict(parts[1])
    change(metadata, tensors)
    path = tmp_path / "hostile"
    save_file(tensors, path, metadata)
    memory, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    assert refusal(path) == code
    assert refusal_unbuilt(path) == (None if attack == "weights_that_overflow" else code)
    assert time.monotonic() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 * 1024  # KiB


def test_the_unchanged_parts_load_so_that_each_attack_is_refused_for_its_change(
    parts: tuple[Metadata, Tensors], tmp_path: Path
) -> None:
    metadata, tensors = parts
    save_file(tensors, tmp_path / "same", metadata)
    load_policy(tmp_path / "same", dtype=torch.float32)
    assert refusal_unbuilt(tmp_path / "same") is None


def test_positions_that_every_engine_reads_alike_are_taken(parts: tuple[Metadata, Tensors], tmp_path: Path) -> None:
    for positions in (
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False},
        {"rope_type": "linear", "factor": 2.0},
        YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ):
        metadata = dict(parts[0])
        with_positions(**positions)(metadata, parts[1])
        save_file(parts[1], tmp_path / "scaled", metadata)
        load_policy(tmp_path / "scaled", dtype=torch.float32)
        assert refusal_unbuilt(tmp_path / "scaled") is None


WINDOWS: dict[str, tuple[str, str, dict[str, object]]] = {
    "of_no_tokens": ("unsupported_model", "mistral", {"sliding_window": 0}),
    "of_a_part_of_a_token": ("bad_config", "mistral", {"sliding_window": 7.5}),
    "that_is_switched_off_in_a_layer_that_has_it": (
        "unsupported_model",
        "smollm3",
        {"use_sliding_window": False, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "of_a_layer_without_tokens": ("unsupported_model", "gemma2", {"sliding_window": None}),
    "of_more_layers_than_there_are": ("bad_config", "qwen3", {"layer_types": ["full_attention"] * 3}),
    "in_chunks": ("unsupported_model", "ministral", {"layer_types": ["chunked_attention", "full_attention"]}),
    "that_looks_ahead": ("unsupported_model", "gemma3_text", {"use_bidirectional_attention": True}),
    "with_a_cap_that_its_modules_ignore": ("unsupported_model", "gemma3_text", {"attn_logit_softcapping": 50.0}),
    "with_a_cap_of_nothing": ("bad_config", "gemma2", {"final_logit_softcapping": 0.0}),
    "with_positions_of_one_kind_of_layer": (
        "unsupported_model",
        "olmo3",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "x": {}}},
    ),
    "with_positions_that_nest": (
        "bad_config",
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_type": {"rope_type": 1}}}},
    ),
    "with_positions_whose_scale_vllm_takes_from_elsewhere": (
        "unsupported_model",
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 1.0, 1.0, 1.0],
                "partial_rotary_factor": 1.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 2.0,
            }
        },
    ),
    "with_more_than_a_whole_head_turned": (
        "bad_config",
        "glm4",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}},
    ),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_attention_that_engines_would_not_compute_alike_is_refused(case: str) -> None:
    """A window, a cap or positions that one of them ignores: its honest worker would be rejected."""
    code, family, changes = WINDOWS[case]
    values = json.loads(render_config(small_config(family), dtype="float32"))
    assert parse_config(json.dumps(values), tensors=20).model_type == family
    with pytest.raises(MalformedPolicy) as caught:
        parse_config(json.dumps(values | changes), tensors=20)
    assert caught.value.code == code


@pytest.mark.parametrize("family", sorted(ATTENTION_FAMILIES))
def test_no_field_of_a_family_is_ignored(family: str) -> None:
    """A later transformers has more fields, and a configuration that sets one is of another model."""
    values = json.loads(render_config(small_config(family), dtype="float32"))
    for name in values.keys() - ATTENTION_FAMILIES[family].known_fields - {"model_type"}:
        with pytest.raises(MalformedPolicy):
            parse_config(json.dumps(values | {name: 7}), tensors=20)


HEADER = {
    "nothing": ("not_safetensors", b""),
    "half_a_length": ("not_safetensors", b"\x01\x00\x00"),
    "a_pickle": ("oversized_header", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."),
    "a_header_longer_than_memory": ("oversized_header", (2**63).to_bytes(8, "little") + b"{}"),
    "a_header_longer_than_the_limit": ("oversized_header", (MAX_HEADER_BYTES + 1).to_bytes(8, "little")),
    "a_header_longer_than_the_file": ("not_safetensors", (1000).to_bytes(8, "little") + b"{}"),
    "a_header_that_nests": ("not_safetensors", (90_000).to_bytes(8, "little") + b"[" * 90_000),
    "data_outside_the_file": (
        "not_safetensors",
        (66).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[100],"data_offsets":[0,400]}}'.ljust(66),
    ),
    "a_shape_that_overflows": (
        "not_safetensors",
        (90).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}}'.ljust(90),
    ),
    "no_metadata": ("wrong_metadata", (2).to_bytes(8, "little") + b"{}"),
}


@pytest.mark.parametrize("attack", HEADER)
def test_a_hostile_header_is_refused(attack: str, tmp_path: Path) -> None:
    code, data = HEADER[attack]
    (tmp_path / "hostile").write_bytes(data)
    assert refusal(tmp_path / "hostile") == code


def test_a_truncated_policy_is_refused(tiny_policy_path: Path, tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(tiny_policy_path.read_bytes()[:-1])
    assert refusal(tmp_path / "cut") == "not_safetensors"


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_missing_file_is_this_machines_fault(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadablePolicy):
        load_policy(tmp_path / name, dtype=torch.float32)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_no_changed_byte_of_the_header_escapes_the_error_tree(
    where: float, byte: int, tiny_policy_path: Path, tmp_path: Path
) -> None:
    data = bytearray(tiny_policy_path.read_bytes())
    data[int(where * (8 + int.from_bytes(data[:8], "little")))] = byte
    (tmp_path / "changed").write_bytes(data)
    with suppress(MalformedPolicy):
        load_policy(tmp_path / "changed", dtype=torch.float32)
