"""Two stand-ins for a device, on a machine that has none: one whose tensors nobody can read without waiting for it, and
one that counts the bytes which come from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from node.sampling import forced

META = torch.device("meta")

_READINGS: Mapping[str, Callable[[Tensor], Any]] = {
    "cpu": lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype),
    "item": lambda _: 0,
    "tolist": lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype).tolist(),
    "__bool__": lambda _: False,
}


@contextlib.contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Yield a list to which each operation of the block is added that waits for a device, for which `META` stands.

    Readings give zeros, so that the block goes on. A meta tensor has no values: whatever else is built on them, such as
    `nonzero`, raises by itself.
    """
    waits: list[str] = []
    pinned = set[int]()
    to, clone, assign = Tensor.to, Tensor.clone, Tensor.__setitem__

    def pin(tensor: Tensor) -> Tensor:
        copy = clone(tensor)
        pinned.add(copy.data_ptr())
        return copy

    def checked_to(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        moved = to(tensor, *arguments, **options)
        crosses = (moved.device == META) != (tensor.device == META)
        # From memory that is not pinned a copy waits, whatever it was asked for.
        if crosses and not (options.get("non_blocking") and tensor.data_ptr() in pinned):
            waits.append("to")
        return moved

    def checked_assign(tensor: Tensor, places: Any, value: Any) -> None:
        # At places that tensors name, a number is copied to the device first.
        if tensor.device == META and not isinstance(value, Tensor) and _has_tensor(places):
            waits.append("__setitem__")
        assign(tensor, places, value)

    with contextlib.ExitStack() as stack:
        for name, stand_in in _READINGS.items():
            stack.enter_context(patch.object(Tensor, name, _noting(waits, name, getattr(Tensor, name), stand_in)))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(patch.object(torch, name, _noting_copies(waits, name, getattr(torch, name))))
        stack.enter_context(patch.object(Tensor, "to", checked_to))
        stack.enter_context(patch.object(Tensor, "__setitem__", checked_assign))
        stack.enter_context(patch.object(Tensor, "pin_memory", pin))
        yield waits


def _has_tensor(places: Any) -> bool:
    return any(isinstance(place, Tensor) for place in (places if isinstance(places, tuple) else (places,)))


def _noting(
    waits: list[str], name: str, original: Callable[[Tensor], Any], stand_in: Callable[[Tensor], Any]
) -> Callable[[Tensor], Any]:
    """Wrap a reading of a tensor."""

    def read(tensor: Tensor) -> Any:
        if tensor.device != META:
            return original(tensor)
        waits.append(name)
        return stand_in(tensor)

    return read


def _noting_copies(waits: list[str], name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function that makes a tensor of values on the host."""

    def make(*arguments: Any, **options: Any) -> Tensor:
        made = original(*arguments, **options)
        if made.device == META:
            waits.append(name)
        return made

    return make


@contextlib.contextmanager
def cuda_sampling_on_meta() -> Iterator[None]:
    """Have `node.sampling.forced` sample `META`'s tensors by the code for CUDA, all but its Triton kernel.

    Raises ImportError without Triton.
    """
    from node.sampling import cuda  # noqa: PLC0415  (Triton may be missing)

    kernel = type("Kernel", (), {"__getitem__": lambda *_: lambda *_, **__: None})()
    with (
        patch.object(cuda, "_blocks", kernel),
        patch.object(cuda, "_table", lambda _: None),
        patch.object(forced, "_backend", lambda _: cuda.peaks),
    ):
        yield


class Away(Tensor):
    """A tensor of the device of `CountedBytes`: its memory is the host's, and it says that it is CUDA's."""


class CountedBytes(TorchFunctionMode):
    """Within it, `Away` tensors are on a device, with all that is computed of them; `to_host` counts the bytes that
    came from there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_host = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        leaves = [leaf for leaf in pytree.tree_leaves((args, given)) if isinstance(leaf, Tensor | torch.device)]
        sources = [leaf for leaf in leaves if isinstance(leaf, Away)]
        if function == Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda" if sources else "cpu")
        targets = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
        # Everything is computed on the host: only the names of devices differ.
        args, given = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, given))
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  (torch has no public way)
            result = function(*args, **given)
        comes = function in _READERS or "cpu" in targets or (function is Tensor.copy_ and type(args[0]) is Tensor)
        if sources and comes:
            self.to_host += sum(leaf.numel() * leaf.element_size() for leaf in map(_on_host, sources))
        stays = ("cuda" in targets or sources) and not comes
        return pytree.tree_map_only(Tensor, _away if stays else _on_host, result)


def _away(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Away)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


_READERS = (Tensor.cpu, Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.numpy)
