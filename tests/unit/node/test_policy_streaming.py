"""Weights between files and memory in pieces: the bytes and the refusals are those of whole tensors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from node.policy.config import DTYPES
from node.policy.errors import MalformedPolicy
from node.policy.file import Policy, PolicySource, inspect_policy, load_policy, save_policy, write_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.policy.streaming import are_finite, read_numbers
from node.policy.weights import StoredTensor

F32 = torch.float32


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    return load_policy(tiny_policy_path, dtype=F32)


def test_a_policy_has_the_same_bytes_in_whatever_pieces_its_numbers_come(
    policy: Policy, tiny_policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is logged; a replay may gather and read other pieces."""
    monkeypatch.setattr("node.policy.streaming.PIECE_BYTES", 1000)
    whole = PolicySource.of_model(policy.model, policy.tokenizer)
    flat = torch.cat([tensor.detach().flatten() for tensor in whole.numbers])
    pieces = PolicySource(whole.config, whole.tokenizer, whole.shapes, flat.split(777))
    write_policy(pieces, tmp_path / "pieces", dtype=torch.float32)
    assert (tmp_path / "pieces").read_bytes() == tiny_policy_path.read_bytes()
    loaded = load_policy(tmp_path / "pieces", dtype=torch.float32)
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)


@pytest.mark.parametrize("numbers", [-1, 1])
def test_numbers_that_are_not_as_many_as_the_shapes_say_make_no_file(
    numbers: int, policy: Policy, tmp_path: Path
) -> None:
    source = PolicySource.of_model(policy.model, policy.tokenizer)
    flat = torch.zeros(sum(map(math.prod, source.shapes.values())) + numbers)
    with pytest.raises(ValueError, match="numbers"):
        write_policy(PolicySource(source.config, source.tokenizer, source.shapes, [flat]), tmp_path / "p", dtype=F32)
    assert list(tmp_path.iterdir()) == []


def test_the_last_number_of_a_tensor_of_several_pieces_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.policy.streaming.PIECE_BYTES", 1000)
    model = make_model(seed=1)
    model.get_input_embeddings().weight.data[-1, -1] = -math.inf
    save_policy(model, make_tokenizer(), tmp_path / "policy")
    for read in (inspect_policy, lambda path: load_policy(path, dtype=F32)):
        with pytest.raises(MalformedPolicy, match=r"embed_tokens\.weight has values that are not finite") as caught:
            read(tmp_path / "policy")
        assert caught.value.code == "broken_model"


@pytest.mark.parametrize("stored_as", ["BF16", "F16"])
def test_the_16_bit_numbers_that_are_finite_are_those_of_torch(stored_as: str) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    numbers = every.view(getattr(torch, DTYPES[stored_as]))
    found = [are_finite(number.view(torch.uint8).numpy(), stored_as=stored_as) for number in every.split(1)]
    assert found == numbers.isfinite().tolist()


def test_the_32_bit_numbers_that_are_finite_are_those_of_torch() -> None:
    exponents = torch.arange(256).repeat_interleave(6)
    fractions = torch.tensor([0, 1, 2**22, 2**23 - 1, 2**15, 2**16]).repeat(256)
    every = torch.cat([exponents * 2**23 + fractions, exponents * 2**23 + fractions - 2**31]).to(torch.int32)
    found = [are_finite(number.view(torch.uint8).numpy(), stored_as="F32") for number in every.split(1)]
    assert found == every.view(torch.float32).isfinite().tolist()


def test_a_file_that_became_shorter_is_a_faulty_disk_and_not_zeros(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(100))
    stored = StoredTensor(tmp_path / "weights", "F32", (30,), start=0)
    with pytest.raises(OSError, match="shorter"):
        list(read_numbers(stored))
    assert [len(piece) for piece in read_numbers(stored, first=20, count=5)] == [5]
