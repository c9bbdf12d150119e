"""A policy leaves a run as a folder that other programs load.

What would break for whom: an operator who publishes another model than was trained, or goes on from one; and whoever
had something in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from family_cases import IS_TIED, families
from model_folders import SECOND_END, edit_json, make_folder
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from benchmarks.modelling.families import small_model
from coordinator.training.companion import keep_companion
from coordinator.training.export import export_file
from coordinator.training.initial import initial_policy
from node.cli import main
from node.policy.file import load_policy, render_prompt, save_policy, write_policy
from node.policy.layout import dtype_of
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import EOS, make_model, make_tokenizer
from node.protocol.run import EnvironmentSpec, ModelSpec, ProofSpec, RunSpec
from shardcast import Origin, wire

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {"tie_word_embeddings": is_tied}) for family, is_tied in IS_TIED.items()},
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama3-positions": ("llama", {"rope_parameters": LLAMA3}),
    "yarn-positions": ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.2}}),
    "several-ends": ("qwen3", {"eos_token_id": [7, 9]}),
}


def policy_file(
    path: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: PreTrainedTokenizerFast | None = None,
    **fields: Any,
) -> Path:
    """A small policy whose every weight, norms and biases included, is a random number."""
    model = small_model(family, seed=seed, dtype=DTYPES[dtype], **fields)
    save_policy(model, tokenizer or make_tokenizer(), path)
    return path


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", "policy", *map(str, arguments)])


def next_run(folder: Path, *, dtype: str) -> RunSpec:
    model, environments = ModelSpec(initial=str(folder), dtype=dtype), (EnvironmentSpec(name="arithmetic"),)
    return RunSpec(name="next", environments=environments, model=model, proofs=ProofSpec(top_k=32))


def begins(folder: Path, *, dtype: str) -> bytes:
    """Version 0 of a run whose `model.initial` is `folder`."""
    path = folder.with_name("version-0.safetensors")
    write_policy(initial_policy(next_run(folder, dtype=dtype)), path, dtype=DTYPES[dtype])
    return path.read_bytes()


@pytest.mark.parametrize("case", families(pytest.mark.system, CASES))
def test_a_run_that_begins_with_an_exported_policy_begins_with_its_bytes(case: str, tmp_path: Path) -> None:
    assert_begins_with_its_bytes(tmp_path, case, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_so_does_one_of_another_data_type(dtype: str, tmp_path: Path) -> None:
    assert_begins_with_its_bytes(tmp_path, "llama-untied", dtype=dtype)


def assert_begins_with_its_bytes(tmp_path: Path, case: str, *, dtype: str) -> None:
    family, fields = CASES[case]
    path = policy_file(tmp_path / "policy.safetensors", family=family, dtype=dtype, **fields)
    export_file(path, tmp_path / "out")
    assert begins(tmp_path / "out", dtype=dtype) == path.read_bytes()


@pytest.mark.parametrize("family", sorted(MAKERS))
def test_so_does_one_that_begins_with_a_recurrent_policy(family: str, tmp_path: Path) -> None:
    """transformers writes no generation settings for them; without those the export ended in the middle."""
    path = tmp_path / "policy.safetensors"
    save_policy(MAKERS[family](0), make_tokenizer(), path)
    export_file(path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_bytes())["eos_token_id"] == EOS
    assert begins(tmp_path / "out", dtype="float32") == path.read_bytes()


def written_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtype that each tensor has in the folder's files."""
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor.dtype for tensors in files for name, tensor in tensors.items()}


@pytest.mark.parametrize("case", families(pytest.mark.system, CASES))
def test_transformers_loads_the_policy_bit_for_bit(case: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    path = policy_file(tmp_path / "policy.safetensors", family=family, dtype="bfloat16", **fields)
    export_file(path, tmp_path / "out", shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    policy = load_policy(path, dtype=torch.bfloat16)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected, state = policy.model.state_dict(), found.state_dict()
    assert state.keys() == expected.keys()
    assert all(dtype == dtype_of(name, torch.bfloat16) for name, dtype in written_dtypes(tmp_path / "out").items())
    # Since 5.24 transformers loads routers in float32, which changes no number.
    assert all(torch.equal(state[name].to(expected[name].dtype), expected[name]) for name in state)
    assert found.dtype == torch.bfloat16
    tied = policy.config.tie_word_embeddings
    assert (found.get_output_embeddings().weight is found.get_input_embeddings().weight) == tied
    ends = found.generation_config.eos_token_id
    assert set(ends if isinstance(ends, list) else [ends]) == policy.eos_ids


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen's kind, with two merges."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    vocabulary = {text: index for index, text in enumerate(alphabet)}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[("t", "h"), ("th", "e")])


@pytest.mark.parametrize("family", families(others=pytest.mark.system))
def test_transformers_reads_the_tokenizer_of_the_policy_or_the_operator_is_told(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For qwen2 models transformers has another one ready. What it splits otherwise, the policy never learned."""
    text = "Q:12+34=?\n<think>the 9</think>"
    for tokenizer, is_read in ((make_tokenizer(), family != "qwen2"), (qwen_tokenizer(), True)):
        folder = tmp_path / type(tokenizer).__name__
        path = policy_file(tmp_path / "policy.safetensors", family=family, tokenizer=tokenizer, vocab_size=300)
        export_file(path, folder)
        found = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
        assert (found == render_prompt(load_policy(path, dtype=None), text)) == is_read
        assert ("PreTrainedTokenizerFast" in caplog.text) == (not is_read)
        assert begins(folder, dtype="float32") == path.read_bytes()
        caplog.clear()


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The folder that a run began with, and `trainer/`, whose version 0 is made of it as its trainer does."""
    folder = make_folder(tmp_path / "first", family="qwen2", tie_word_embeddings=True)
    edit_json(folder / "generation_config.json", {"stop_strings": ["</think>"]})
    (tmp_path / "trainer").mkdir()
    begins(folder, dtype="bfloat16")
    source = initial_policy(next_run(folder, dtype="bfloat16"))
    keep_companion(tmp_path / "trainer", str(folder), source.tokenizer)
    origin = Origin(tmp_path / "trainer" / "origin", KEY, wire.digest(b"run"))
    origin.publish(tmp_path / "version-0.safetensors", version=0)
    origin.close()
    return folder


@pytest.mark.parametrize("source", ["trainer", "file"])
def test_an_export_keeps_chat_template_generation_settings_and_every_end_mark(
    source: str, first: Path, tmp_path: Path
) -> None:
    """Without them the trained model answers without its format, samples otherwise, and runs past its second end."""
    if source == "trainer":
        done = export("latest", "--state", tmp_path / "trainer", "--to", tmp_path / "out")
    else:
        done = export(tmp_path / "version-0.safetensors", "--model", first, "--to", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    question = [{"role": "user", "content": "1+1"}]
    assert found.apply_chat_template(question, tokenize=False) == "<think>1+1</think>"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_bytes())
    assert generation["eos_token_id"] == [EOS, SECOND_END]
    kept = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "stop_strings": ["</think>"]}
    assert {name: generation.get(name) for name in kept} == kept
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["eos_token_id"] == [EOS, SECOND_END]
    before = (tmp_path / "version-0.safetensors").read_bytes()
    assert begins(tmp_path / "out", dtype="bfloat16") == before, "a run that goes on from it has the same version 0"


def test_a_run_ends_completions_at_every_end_mark_of_its_folder(first: Path, tmp_path: Path) -> None:
    """generation_config.json alone names the second one: a run without it rewards what comes after it."""
    assert load_policy(tmp_path / "version-0.safetensors", dtype=None).eos_ids == {EOS, SECOND_END}


def test_what_a_trainer_kept_beside_its_policies_is_not_believed_when_damaged(first: Path, tmp_path: Path) -> None:
    (tmp_path / "trainer" / "first-policy.json").write_text('{"chat_template": 7')
    done = export("latest", "--state", tmp_path / "trainer", "--to", tmp_path / "out")
    assert (done.exit_code, "first-policy.json is damaged" in done.output) == (1, True)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A trainer's folder, in use, with versions 0 to 2."""
    origin = Origin(tmp_path / "trainer" / "origin", KEY, wire.digest(b"run"))
    for version in range(3):
        origin.publish(policy_file(tmp_path / f"{version}.safetensors", seed=version), version=version)
    yield tmp_path / "trainer"
    origin.close()


@pytest.mark.parametrize(("asked", "version"), [("0", 0), ("1", 1), ("latest", 2)])
def test_any_version_of_a_running_trainer_is_exported(state: Path, asked: str, version: int, tmp_path: Path) -> None:
    done = export(asked, "--state", state, "--to", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert f"policy {version}, " in done.output
    assert begins(tmp_path / "out", dtype="float32") == (tmp_path / f"{version}.safetensors").read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_a_policy_file_is_exported_into_an_empty_folder(tmp_path: Path) -> None:
    path = policy_file(tmp_path / "policy.safetensors")
    (tmp_path / "out").mkdir()
    assert export(path, "--to", tmp_path / "out").exit_code == 0
    assert begins(tmp_path / "out", dtype="float32") == path.read_bytes()


def test_what_is_in_the_folder_stays(tmp_path: Path) -> None:
    path = policy_file(tmp_path / "policy.safetensors")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    done = export(path, "--to", tmp_path / "out")
    assert done.exit_code == 1
    assert "not empty" in done.output
    assert "hint: Name another folder" in done.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    assert export(path, "--to", path).exit_code == 1
    assert path.stat().st_size > 0


def test_a_version_that_is_gone_is_named_with_those_that_are_there(state: Path, tmp_path: Path) -> None:
    done = export("7", "--state", state, "--to", tmp_path / "out")
    assert done.exit_code == 1
    assert "does not hold policy 7: there are 0, 1, 2" in done.output
    assert not (tmp_path / "out").exists()


def test_a_folder_without_policies_says_so(tmp_path: Path) -> None:
    done = export("latest", "--state", tmp_path, "--to", tmp_path / "out")
    assert (done.exit_code, "not a state folder" in done.output) == (1, True)


def test_a_file_that_is_no_policy_leaves_nothing_behind(tmp_path: Path) -> None:
    path = policy_file(tmp_path / "policy.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    done = export(path, "--to", tmp_path / "out")
    assert done.exit_code == 1
    assert "not a safetensors file" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["policy.safetensors"]


@pytest.mark.parametrize("arguments", [("5",), ("latest",), ("policy.safetensors", "--state", ".")])
def test_a_version_needs_a_folder_and_a_file_none(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = export(*arguments, "--to", tmp_path / "out")
    assert done.exit_code == 2
    assert "--state" in done.output


def test_an_exported_tiny_policy_answers_as_before(tmp_path: Path) -> None:
    model = make_model(seed=20)
    save_policy(model, make_tokenizer(), tmp_path / "policy.safetensors")
    export_file(tmp_path / "policy.safetensors", tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[20, 21, 22]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(found.generate(ids, **options), model.eval().generate(ids, **options))
