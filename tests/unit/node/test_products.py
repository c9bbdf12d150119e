"""Products of 16-bit weights: whichever way this machine computes them, the other way finds the same but for rounding.

A worker on a machine with instructions for 16 bits is verified on one without; results that differed by more would
reject its honest work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba  # type: ignore[import-untyped]
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from node.policy import bfloat16, products
from node.policy.file import load_policy
from node.policy.products import Linear, OutputHead, multiply, multiply_exactly, use_blocks

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without instructions for 16 bits, whatever this one has."""
    monkeypatch.setattr(products, "slow_dtypes", lambda: frozenset(DTYPES))


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(1,), (2,), (3, 7), (2, 1, 5), (0,)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_the_exact_one_rounded_once(
    dtype: torch.dtype, rows: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over blocks that divide neither the weight nor the rows; qwen2 has biases."""
    monkeypatch.setattr(products, "BLOCK_NUMBERS", 48 * 10)
    monkeypatch.setattr(products, "BLOCK_STEP", 5)
    monkeypatch.setattr(products, "BLOCK_ROWS", 4)
    states, weight = drawn(*rows, 48, dtype=dtype), drawn(33, 48, dtype=dtype, seed=1)
    bias = drawn(33, dtype=dtype, seed=2) if has_bias else None
    exact = F.linear(states.double(), weight.double(), None if bias is None else bias.double())
    found = multiply(states, weight, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
    torch.testing.assert_close(multiply_exactly(states, weight), F.linear(states.float(), weight.float()))


@pytest.mark.parametrize("has_instruction", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize("rows", [0, 1, 7, 70])
def test_an_output_heads_parts_are_its_logits(
    dtype: torch.dtype, rows: int, has_instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary that no block divides; a head may have a norm's states in another dtype."""
    monkeypatch.setattr(products, "BLOCK_NUMBERS", 48 * 64)
    if not has_instruction:
        monkeypatch.setattr(bfloat16, "_kernel", lambda: None)
    head, states = OutputHead(drawn(150, 48, dtype=dtype)), drawn(rows, 48, dtype=torch.bfloat16)
    parts = [part.clone() for part in head.parts(states)]
    assert [part.shape[1] for part in parts] == [64, 64, 22]
    assert head.width == 64
    exact = F.linear(states.float(), head.weight.float())
    torch.testing.assert_close(torch.cat(parts, 1), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logits(states), exact, rtol=1e-5, atol=1e-5)


needs_instruction = pytest.mark.skipif(bfloat16._kernel() is None, reason="this CPU lacks AVX-512 BF16")


@needs_instruction
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "vocabulary", "hidden"), [(1, 1, 2), (64, 5, 6), (65, 391, 1030), (130, 768, 512)])
def test_products_by_instructions_are_those_of_float32(rows: int, vocabulary: int, hidden: int, threads: int) -> None:
    """Tiles that divide neither side, pairs summed in several parts, and a row that is no number beside others.

    A token's logits that were a neighbour's would reject honest work; a NaN that were lost would admit a broken policy.
    """
    states, weight = drawn(rows, hidden, dtype=torch.bfloat16), drawn(vocabulary, hidden, dtype=torch.bfloat16, seed=1)
    states[-1, 0] = torch.nan
    torch.set_num_threads(threads)
    out = torch.full((rows, vocabulary + 3), 7.0)
    packed = bfloat16.PackedStates.of(states, weight)
    assert packed is not None
    packed.multiply(weight, out=out[:, :vocabulary])
    exact = F.linear(states.double(), weight.double())
    torch.testing.assert_close(out[:, :vocabulary].double(), exact, rtol=1e-5, atol=1e-4, equal_nan=True)
    assert (out[:, vocabulary:] == 7.0).all()


@needs_instruction
def test_nothing_is_read_beyond_a_weight_or_written_beyond_the_products() -> None:
    """The kernel takes addresses: what does not fit would read or write somebody else's memory."""
    states, weight = drawn(3, 8, dtype=torch.bfloat16), drawn(20, 8, dtype=torch.bfloat16)
    packed = bfloat16.PackedStates.of(states, weight)
    assert packed is not None
    fits = {"weight": weight, "out": torch.empty(3, 20)}
    packed.multiply(**fits)
    for wrong in (
        {"weight": drawn(20, 6, dtype=torch.bfloat16)},
        {"weight": drawn(20, 16, dtype=torch.bfloat16)[:, :8]},
        {"weight": weight.float()},
        {"out": torch.empty(3, 21)},
        {"out": torch.empty(65, 20)},
    ):
        with pytest.raises(ValueError, match="no rows"):
            packed.multiply(**{**fits, **wrong})
    for unfit in (drawn(20, 7, dtype=torch.bfloat16), weight.half(), drawn(20, 16, dtype=torch.bfloat16)[:, ::2]):
        assert bfloat16.PackedStates.of(states[:, : unfit.shape[1]].contiguous(), unfit) is None


@pytest.mark.parametrize("setting", [("CPU_NAME", "generic"), ("CPU_FEATURES", "+avx"), ("ENABLE_AVX", 0)])
def test_an_instruction_that_numba_is_told_to_do_without_is_not_used(
    setting: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM ends the process over an instruction that its target lacks."""
    monkeypatch.setattr(numba.config, *setting)
    assert bfloat16._kernel.__wrapped__() is None


class Widest(TorchDispatchMode):
    """Notes the most float32 numbers of any one result."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [one.numel() for one in tree_leaves(result) if isinstance(one, Tensor) and one.dtype == torch.float32]
        self.numbers = max([self.numbers, *found])
        return result


@pytest.mark.parametrize("multiplied", [multiply, multiply_exactly])
def test_memory_holds_one_block_of_the_weight_in_float32(multiplied: Any) -> None:
    """A policy that just fits in 16 bits must not need twice its memory, nor a vocabulary's embedding once more."""
    weight = drawn(6000, 200, dtype=torch.bfloat16)
    with torch.inference_mode(), Widest() as widest:
        multiplied(drawn(5, 200, dtype=torch.bfloat16), weight)
    assert 0 < widest.numbers <= products.BLOCK_NUMBERS < weight.numel()


def test_a_policy_that_is_built_meanwhile_changes_nothing() -> None:
    """transformers sets the default dtype of the whole process while it builds a model, and a verifier loads one while
    it measures another.
    """
    states, weight = drawn(3, 48, dtype=torch.bfloat16), drawn(33, 48, dtype=torch.bfloat16, seed=1)
    expected = multiply(states, weight), multiply_exactly(states, weight)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = multiply(states, weight), multiply_exactly(states, weight)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))


def test_every_linear_layer_of_a_policy_computes_so_and_no_float32_one_by_blocks(
    tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    by_blocks = products._multiply_blocks
    monkeypatch.setattr(products, "_multiply_blocks", lambda *a, **named: calls.append(a) or by_blocks(*a, **named))
    ids = torch.tensor([[3, 4, 5]])
    for dtype, is_slow in ((torch.float32, False), (torch.bfloat16, True)):
        model: Any = load_policy(tiny_policy_path, dtype=dtype).model
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        assert {type(module) for module in linear} == {Linear}
        calls.clear()
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False)
        assert len(calls) == (len(linear) if is_slow else 0)
    calls.clear()
    model(input_ids=ids, use_cache=False).logits.float().sum().backward()
    assert not calls, "nothing is kept of blocks that a gradient could be made of"
    assert all(module.weight.grad is not None for module in linear)


def test_a_layer_of_another_kind_keeps_its_own_product() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(4, 4), Doubled(4, 4))
    use_blocks(model)
    assert [type(module) for module in model] == [Linear, Doubled]
