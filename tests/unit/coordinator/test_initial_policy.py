"""The first policy of a run that begins with a folder: what transformers would load, without loading it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_folders import make_folder
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coordinator.training.initial import initial_policy
from node.policy.file import save_policy, write_policy
from node.policy.tokenizer_files import load_tokenizer
from node.protocol.run import EnvironmentSpec, ModelSpec, ProofSpec, RunSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ENVIRONMENTS = (EnvironmentSpec(name="arithmetic"),)
CASES = {
    "untied": ("llama", {"tie_word_embeddings": False}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "with_biases": ("qwen2", {"tie_word_embeddings": False}),
    "rotary_base_as_an_integer": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000}}),
}


def stored_as(folder: Path, dtype: str, *, shards: bool) -> None:
    """Store the folder's random weights, norms and biases included, in another dtype."""
    paths = sorted(folder.glob("*.safetensors"))
    draw = torch.Generator().manual_seed(1)
    tensors = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    noisy = {
        name: (tensor.float() + 0.1 * torch.randn(tensor.shape, generator=draw)).to(DTYPES[dtype])
        for name, tensor in tensors.items()
    }
    if not shards:
        for path in paths:
            path.unlink()
        (folder / "model.safetensors.index.json").unlink()
        save_file(noisy, folder / "model.safetensors", {"format": "pt"})
        return
    for path in paths:
        save_file({name: noisy[name] for name in load_file(path)}, path, {"format": "pt"})


def loaded_by_transformers(folder: Path, path: Path, dtype: torch.dtype) -> bytes:
    """The policy file of the model that transformers loads from `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generation = model.generation_config.eos_token_id
    model.config.eos_token_id = generation if isinstance(generation, list) else [generation]
    save_policy(model.to(dtype), load_tokenizer(folder), path)
    return path.read_bytes()


def first_policy(folder: Path, path: Path, dtype: str) -> bytes:
    model = ModelSpec(initial=str(folder), dtype=dtype)  # type: ignore[arg-type]
    spec = RunSpec(name="first", environments=ENVIRONMENTS, model=model, proofs=ProofSpec(top_k=32))
    write_policy(initial_policy(spec), path, dtype=DTYPES[dtype])
    return path.read_bytes()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("stored", "dtype", "shards"),
    [
        ("float32", "bfloat16", True),
        ("bfloat16", "bfloat16", False),
        ("float16", "bfloat16", True),
        ("bfloat16", "float16", True),
        ("float16", "float32", False),
    ],
)
def test_the_first_policy_has_the_bits_that_transformers_loads(
    case: str, stored: str, dtype: str, shards: bool, tmp_path: Path
) -> None:
    """Else the run would begin with another model than the operator's, or one that a restart does not make again."""
    family, fields = CASES[case]
    folder = make_folder(tmp_path / "model", family=family, **fields)
    stored_as(folder, stored, shards=shards)
    found = first_policy(folder, tmp_path / "first", dtype)
    assert found == loaded_by_transformers(folder, tmp_path / "theirs", DTYPES[dtype])


def test_rotary_frequencies_that_early_llamas_store_are_left_out(tmp_path: Path) -> None:
    """A reader computes them, and refuses a tensor that the model does not have."""
    folder = make_folder(tmp_path / "model", family="llama", tie_word_embeddings=False)
    stored_as(folder, "float16", shards=False)
    plain = first_policy(folder, tmp_path / "plain", "bfloat16")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert first_policy(folder, tmp_path / "early", "bfloat16") == plain


def test_weights_that_change_dtype_from_tensor_to_tensor_become_one_dtype(tmp_path: Path) -> None:
    """Norms are often left in float32; a policy file has one dtype."""
    folder = make_folder(tmp_path / "model", family="llama", tie_word_embeddings=False)
    stored_as(folder, "bfloat16", shards=False)
    tensors = load_file(folder / "model.safetensors")
    mixed = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    found = first_policy(folder, tmp_path / "first", "bfloat16")
    assert found == loaded_by_transformers(folder, tmp_path / "theirs", torch.bfloat16)
