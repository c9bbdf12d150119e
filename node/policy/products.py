"""Products of hidden states with a weight matrix of 16 bits, on CPUs that have no instructions for these.

There torch multiplies bfloat16 and float16 number by number, some eight times slower than float32. Here a block of the
weight is converted to float32 at a time, so that memory holds the 16 bits and one block. Sums are in float32 either
way and rounded once, to 16 bits or not at all: results differ by the order of summation, as they do between any two
kernels. Which way a product goes depends on the machine, the dtype and the number of rows alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from node.policy.families import ATTENTION_FAMILIES

if TYPE_CHECKING:
    from node.policy.bfloat16 import PackedStates

BLOCK_NUMBERS: Final = 2**20
"""Of a weight that are converted together: 4 MiB, which a processor's cache holds until they are multiplied."""
BLOCK_STEP: Final = 64
"""What a block's rows are a multiple of: products with 170 rows take a quarter more time for each than with 192."""
BLOCK_ROWS: Final = 1024
"""Of hidden states that are converted together: the weight is then converted once for each, in a fiftieth of the time
that its products take.
"""
LEAST_ROWS: Final = 2
"""From which blocks are faster. A single row uses each number once, and torch's own kernel converts it on the way."""
LEAST_PACKED_ROWS: Final = 16
"""From which the kernel of `node.policy.bfloat16` is faster than blocks: it computes 64 rows or none."""


class Linear(nn.Linear):
    """A linear layer that computes by `multiply`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        return multiply(input, self.weight, self.bias)


def use_blocks(model: nn.Module) -> None:
    """Make every linear layer of `model` a `Linear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def multiply(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute states [..., in] times weight [out, in] in their dtype, like torch's `linear`.

    By blocks where this machine has no instructions for the dtype, and nothing asks for gradients.
    """
    if _wants_blocks(states, weight) and states.numel() >= LEAST_ROWS * states.shape[-1]:
        return _multiply_blocks(states, weight, bias, dtype=weight.dtype)
    return F.linear(states, weight, bias)


def multiply_exactly(states: Tensor, weight: Tensor) -> Tensor:
    """Compute states [tokens, hidden] times an output head's weight [vocabulary, hidden], summed in float32."""
    if states.is_cuda and states.dtype != torch.float32:
        return torch.mm(states, weight.t(), out_dtype=torch.float32)
    if weight.dtype == torch.float32 or weight.is_cuda:
        return F.linear(states.float(), weight.float())
    packed = _packed(states, weight) if len(states) >= LEAST_PACKED_ROWS else None
    if packed is not None:
        product = torch.empty(len(states), len(weight), dtype=torch.float32)
        packed.multiply(weight, out=product)
        return product
    return _multiply_blocks(states, weight, None, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class LogitRule:
    """How logits follow from the output embedding's products: product / divisor, then cap tanh(that / cap)."""

    divisor: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(config: PreTrainedConfig) -> LogitRule:
        """Return the rule of a validated configuration; a family without fields for it has the products themselves."""
        family = ATTENTION_FAMILIES.get(config.model_type)
        divisor = getattr(config, family.logit_divisor) if family and family.logit_divisor else 1.0
        return LogitRule(divisor, getattr(config, family.logit_cap) if family and family.logit_cap else None)

    def apply(self, products: Tensor) -> Tensor:
        """Turn products, of any shape, into logits in place and return them."""
        if self.divisor != 1.0:
            products.div_(self.divisor)
        if self.cap is not None:
            products.div_(self.cap).tanh_().mul_(self.cap)
        return products

    def slopes(self, logits: Tensor) -> Tensor | float | None:
        """Return the derivatives of `logits` along their products; None where all are 1."""
        if self.cap is not None:
            return (1 - (logits / self.cap).square_()).div_(self.divisor)
        return None if self.divisor == 1.0 else 1 / self.divisor


@dataclass(frozen=True, slots=True)
class OutputHead:
    """An output head by its `weight` [vocabulary, hidden], and what its logits are of its products."""

    weight: Tensor
    rule: LogitRule = LogitRule()

    @property
    def width(self) -> int:
        """The most logits that a part has of a token."""
        return _block_rows(self.weight) if self.weight.device.type == "cpu" else len(self.weight)

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits [tokens, vocabulary], float32, of final hidden states [tokens, hidden]."""
        return self.rule.apply(multiply_exactly(states, self.weight))

    def parts(self, states: Tensor) -> Iterator[Tensor]:
        """Yield `logits` by consecutive columns, [tokens, at most `width`]; on a CPU each overwrites the one before.

        So a CPU has them in its cache, where all logits of a real vocabulary would be written to new memory.
        """
        if self.weight.device.type != "cpu":
            yield self.logits(states)
            return
        product = torch.empty(len(states), self.width, dtype=torch.float32)
        packed = _packed(states, self.weight)
        if packed is not None:
            for rows in torch.split(self.weight, self.width):
                packed.multiply(rows, out=product[:, : len(rows)])
                yield self.rule.apply(product[:, : len(rows)])
            return
        wide = states.float()
        for _, block in _blocks(self.weight):
            yield self.rule.apply(torch.mm(wide, block.t(), out=product[:, : len(block)]))


def _packed(states: Tensor, weight: Tensor) -> PackedStates | None:
    """Return states for products by instructions of this CPU; None where it has none."""
    if weight.dtype != torch.bfloat16:
        return None
    from node.policy.bfloat16 import PackedStates  # noqa: PLC0415  (numba takes half a second to import)

    return PackedStates.of(states, weight)


def _wants_blocks(states: Tensor, weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != states.dtype or weight.dtype not in slow_dtypes():
        return False
    if torch.is_autocast_enabled("cpu"):  # would turn the blocks back
        return False
    return not (torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad))


@functools.cache
def slow_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes of 16 bits whose products this machine's CPU has no instructions for."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset({torch.bfloat16, torch.float16})
    onednn = torch.ops.mkldnn
    fast = {
        torch.bfloat16: onednn._is_mkldnn_bf16_supported(),  # noqa: SLF001  (there is no other way to ask)
        torch.float16: onednn._is_mkldnn_fp16_supported(),  # noqa: SLF001
    }
    return frozenset(dtype for dtype, is_fast in fast.items() if not is_fast)


@torch.no_grad()
def _multiply_blocks(states: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """Compute states [..., in] times weight [out, in] in float32, rounded to `dtype`."""
    rows = states.reshape(-1, states.shape[-1])
    product = torch.empty(len(rows), len(weight), dtype=dtype)
    for top in range(0, len(rows), BLOCK_ROWS):
        wide = rows[top : top + BLOCK_ROWS].float()
        for first, block in _blocks(weight):
            columns = slice(first, first + len(block))
            added = None if bias is None else bias[columns].float()
            product[top : top + BLOCK_ROWS, columns] = F.linear(wide, block, added)
    return product.view(*states.shape[:-1], len(weight))


def _blocks(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield consecutive rows of a weight in float32, with the number of the first; each overwrites the ones before."""
    height = _block_rows(weight)
    # Not the process's default dtype, which another thread changes while transformers builds a model.
    wide = torch.empty(height, weight.shape[1], dtype=torch.float32)
    for first in range(0, len(weight), height):
        part = weight[first : first + height]
        yield first, part if part.dtype == torch.float32 else wide[: len(part)].copy_(part)


def _block_rows(weight: Tensor) -> int:
    return min(max(BLOCK_NUMBERS // weight.shape[1] // BLOCK_STEP, 1) * BLOCK_STEP, len(weight))
