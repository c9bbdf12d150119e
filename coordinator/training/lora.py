"""LoRA (arXiv 2106.09685): low-rank adapters are trained, and merged into the first policy's weights to be published.

An adapted layer computes W x + s B (A x), with s = alpha / rank in float32; its A [rank, in] and B [out, rank] are
parameters beside its weight, which several processes share out by rows like any other. `merge` is the only rule by
which they become a weight: separate roundings in a fixed order, so that no thread, kernel or number of processes
changes a bit of a policy (docs/training.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import Tensor, nn
from transformers import PreTrainedModel

from coordinator.errors import BadConfiguration
from coordinator.training.vocabulary import like_weight, own_rows
from coordinator.training.world import World, full_tensor
from node.policy.file import Policy, load_policy
from node.policy.layout import StoredRange, stored_layout
from node.policy.products import Linear
from node.policy.skeleton import unique_tensors
from node.protocol.run import LoraSpec
from shardcast.wire import derive, encode

A, B = "lora_A", "lora_B"
"""Names of the factors beside a layer's `weight`; PEFT's."""
BLOCK_NUMBERS: Final = 2**16
"""Of a weight that are merged together on a CPU, whose cache holds them and two copies."""


class AdaptedLinear(Linear):
    """A linear layer whose weight is frozen, with an adapter that counts where `is_adapted`."""

    lora_A: nn.Parameter  # noqa: N815  (PEFT's names)
    lora_B: nn.Parameter  # noqa: N815
    scale: float
    is_adapted: bool

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        product = super().forward(input)
        if not self.is_adapted:
            return product
        return product + F.linear(F.linear(input, self.lora_A), self.lora_B) * self.scale

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the published weight in float32, shared out as the weight is; a collective of all its processes."""
        own = merge(own_rows(self.weight), full_tensor(self.lora_A), own_rows(self.lora_B), scale=self.scale)
        return like_weight(own, self.weight)


@torch.no_grad()
def merge(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Compute weight [out, in] + scale * (b [out, rank] times a [rank, in]) in float32, bit for bit.

    The product is the sum of the outer products of b's columns with a's rows, from the first to the last. Each product
    and each sum is a number of float32, rounded to the nearest by itself.
    """
    merged, wide = torch.empty_like(weight, dtype=torch.float32), torch.tensor(scale, dtype=torch.float32)
    height = len(weight) if weight.is_cuda else max(1, BLOCK_NUMBERS // weight.shape[1])
    for rows, before, factors in zip(*(torch.split(each, height) for each in (merged, weight, b)), strict=True):
        torch.mul(factors[:, :1], a[0], out=rows)
        product = torch.empty_like(rows)
        for k in range(1, len(a)):
            rows.add_(torch.mul(factors[:, k : k + 1], a[k], out=product))
        rows.mul_(wide).add_(before)
    return merged


def load_trained(path: Path, *, lora: LoraSpec | None, seed: int, recompute: bool, world: World) -> Policy:
    """Load a policy file in float32, shared out, to train all weights, or with `lora` adapters that change nothing yet.

    Every process of `world` must call it. Raises as `load_policy`, and as `add_adapters`.
    """

    def prepare(model: PreTrainedModel) -> None:
        if lora:
            add_adapters(model, lora)

    policy = load_policy(path, dtype=torch.float32, shards=world, prepare=prepare)
    begin_adapters(policy.model, seed=seed, world=world)
    if recompute:
        recompute_activations(policy.model)
    return policy


def recompute_activations(model: PreTrainedModel) -> None:
    """Have `model` keep no layer's activations for its gradients, and compute them again."""
    # Until transformers 5.23 it has the other name, which warns since then.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # No layer draws at random: keeping the generator would have a CPU wait for a GPU.
    enable({"use_reentrant": False, "preserve_rng_state": False})


def adapter_counters(lora: LoraSpec | None, *, initial: str) -> dict[str, int | str]:
    """Return what a checkpoint says of its adapters for exports, which see nothing else: {} without them.

    `initial` is the model that they belong to.
    """
    return {"lora": encode(lora).decode(), "initial": initial} if lora else {}


def add_adapters(model: PreTrainedModel, lora: LoraSpec) -> None:
    """Freeze a model on the meta device and give its layers of `lora.targets` adapters, without memory or effect yet.

    Raises BadConfiguration for a target that the model does not have.
    """
    model.requires_grad_(False)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Linear)}
    missing = set(lora.targets) - {_last(name) for name in layers}
    if missing:
        raise BadConfiguration(
            f"training.lora.targets: a {model.config.model_type} policy has no {', '.join(sorted(missing))}"
        )
    for name, layer in layers.items():
        if _last(name) in lora.targets:
            layer.__class__ = AdaptedLinear
            assert isinstance(layer, AdaptedLinear)
            layer.scale, layer.is_adapted = scale_of(lora), False
            layer.lora_A = nn.Parameter(layer.weight.new_empty(lora.rank, layer.in_features))
            layer.lora_B = nn.Parameter(layer.weight.new_empty(layer.out_features, lora.rank))


def scale_of(lora: LoraSpec) -> float:
    """Return alpha / rank, rounded to float32."""
    return float(np.float32(lora.alpha / lora.rank))


def begin_adapters(model: PreTrainedModel, *, seed: int, world: World) -> None:
    """Fill a model's adapters so that they change nothing yet, and have them count from now on.

    B is 0 and A uniform within 1 / sqrt(in), as in PEFT; its numbers are derived from `seed` and the layer's name, so
    that they are the same however many processes share them.
    """
    with torch.no_grad():
        for name, layer in adapted_layers(model):
            part, first = world.own_part(layer.lora_A)
            part.copy_(_uniform(seed, name, first=first, count=len(part)) / math.sqrt(layer.in_features))
            world.own_part(layer.lora_B)[0].zero_()
            layer.is_adapted = True


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield a model's layers that have adapters, by name."""
    return ((name, each) for name, each in model.named_modules() if isinstance(each, AdaptedLinear))


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Have a model compute as before its training; no-op for one without adapters."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.is_adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_adapted = True


def policy_layout(model: PreTrainedModel) -> dict[str, StoredRange]:
    """Return the tensors of a policy's file, by sorted name: the model's without its adapters."""
    return {name: stored for name, stored in stored_layout(model).items() if _last(name) not in (A, B)}


def policy_tensors(model: PreTrainedModel) -> Iterator[tuple[Tensor, StoredRange]]:
    """Yield, in the order of `policy_layout`, the tensor that has each one's numbers; adapters merged, one at a time.

    A collective that every process that shares the model must exhaust.
    """
    layers, tensors = dict(adapted_layers(model)), unique_tensors(model)
    for stored in policy_layout(model).values():
        layer = layers.get(stored.name.removesuffix(".weight"))
        if layer is None or not stored.name.endswith(".weight"):
            yield tensors[stored.name], stored
        else:
            yield layer.merged(), stored


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _uniform(seed: int, name: str, *, first: int, count: int) -> Tensor:
    """Return numbers `first` .. of a sequence that `seed` and `name` derive, multiples of 2**-23 in [-1, 1)."""
    key = derive("swarmproof/1 lora", seed.to_bytes(8, "big"), name.encode())
    words = np.frombuffer(blake3(key).digest(4 * count, seek=4 * first), "<u4")
    return torch.from_numpy((words >> 8).astype(np.float32)) * 2.0**-23 - 1.0
