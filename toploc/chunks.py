"""Select the elements of each chunk that a proof commits to.

A chunk is what one proof covers: the prefill, or up to `decode_batching_size` decoded tokens (the last may be shorter).
Its points are (index in the flattened chunk, bf16 bit pattern) of its k largest magnitudes. Chunks of similar size are
batched, whatever sequence they come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from operator import attrgetter, mul

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from toploc.errors import BadActivations, BadArgument, ChunkTooSmall, NonFiniteActivations
from toploc.field import MAX_TOPK
from toploc.largest import MAGNITUDE_BITS, largest

# Elements in one batch, 16 MiB of bf16, so that memory does not grow with the number of chunks.
_BATCH_ELEMENTS = 2**23
_INFINITY_BITS = 0x7F80
_ELEMENT_BYTES = 2

# The tensors whose flattened concatenation is the chunk.
Chunk = Sequence[Tensor]


def split(activations: Sequence[Tensor] | Tensor, decode_batching_size: int, *, skip_prefill: bool) -> list[Chunk]:
    """Split one sequence into chunks; none for an empty sequence.

    `activations`: one tensor per decoded token, preceded by one of the whole prefill unless `skip_prefill`; or a single
    tensor whose rows stand for them. Raises BadArgument or BadActivations.
    """
    if decode_batching_size < 1:
        raise BadArgument(f"decode_batching_size must be at least 1, not {decode_batching_size}")
    if isinstance(activations, Tensor) and activations.ndim < 2:
        raise BadActivations("activations in one tensor must have a row for each token")
    first = 0 if skip_prefill else 1
    chunks: list[Chunk] = [[activations[0]]] if first and len(activations) else []
    for start in range(first, len(activations), decode_batching_size):
        run = activations[start : start + decode_batching_size]
        chunks.append([run] if isinstance(run, Tensor) else run)
    return chunks


def checked_sizes(chunks: Sequence[Chunk], topk: int) -> list[int]:
    """Return the number of elements of each chunk; raises a `CallerFault` for chunks `top_points` cannot process."""
    require_topk(topk)
    sizes = [_checked_size(chunk, topk, index) for index, chunk in enumerate(chunks)]
    if len(set().union(*(map(attrgetter("device"), chunk) for chunk in chunks))) > 1:
        raise BadActivations("activations must be on one device")
    return sizes


def require_topk(topk: int) -> None:
    """Raise `BadArgument` unless `topk` is in 1 .. MAX_TOPK."""
    if not 1 <= topk <= MAX_TOPK:
        raise BadArgument(f"topk must be in 1 .. {MAX_TOPK}, not {topk}")


def _checked_size(chunk: Chunk, topk: int, index: int) -> int:
    # By sets, not element by element: checking a list of a thousand tokens took longer than copying it.
    if not _all_tensors(chunk) or not set(map(attrgetter("dtype"), chunk)) <= {torch.bfloat16}:
        message = "activations must be bfloat16 tensors: cast with .to(torch.bfloat16), as the prover did"
        raise BadActivations(message, index=index)
    size = sum(map(Tensor.numel, chunk))
    if size < topk:
        raise ChunkTooSmall(f"chunk of {size} elements is smaller than topk = {topk}", index=index)
    return size


def _all_tensors(chunk: Chunk) -> bool:
    return all(issubclass(kind, Tensor) for kind in set(map(type, chunk)))


@torch.no_grad()
def top_points(chunks: Sequence[Chunk], sizes: Sequence[int], topk: int) -> tuple[Tensor, Tensor]:
    """Return indices and bf16 bit patterns, both [n, topk] int64, of each chunk's `topk` largest magnitudes.

    `chunks`: at least one; `sizes`: as returned by `checked_sizes`. The points of a row are unordered. The result is on
    the activations' device, or on the CPU where that has no float64. Raises `NonFiniteActivations`.
    """
    device = chunks[0][0].device
    index = torch.empty(len(chunks), topk, dtype=torch.int64, device=device)
    bits = torch.empty_like(index)
    for members in _batches(sizes):
        rows = _rows([chunks[i] for i in members], [sizes[i] for i in members]).view(torch.int16)
        top = largest(rows, topk)
        index[members] = top
        bits[members] = rows.gather(1, top).long() & 0xFFFF
    _require_finite(bits)
    return (index, bits) if device.type == "cuda" else (index.cpu(), bits.cpu())


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of chunk positions: sizes within a factor of two, bounded in total."""
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for position, size in enumerate(sizes):
        by_size[size.bit_length()].append(position)
    for members in by_size.values():
        count = max(1, _BATCH_ELEMENTS // max(sizes[i] for i in members))
        for start in range(0, len(members), count):
            yield members[start : start + count]


def _rows(chunks: Sequence[Chunk], sizes: Sequence[int]) -> Tensor:
    """Arrange chunks as rows [n, size of the largest]: a view where they are contiguous, else a copy.

    Shorter chunks are zero-padded; padding is never among the k largest, as it comes last among equal magnitudes.
    """
    parts = [part for chunk in chunks for part in chunk]
    if len(set(sizes)) == 1 and _are_contiguous(parts):
        return parts[0].as_strided((len(chunks), sizes[0]), (sizes[0], 1))
    if len({part.shape for part in parts}) == 1 and len({len(chunk) for chunk in chunks}) == 1:
        return torch.stack(parts).view(len(chunks), -1)
    return pad_sequence([torch.cat([part.reshape(-1) for part in chunk]) for chunk in chunks], batch_first=True)


def _are_contiguous(parts: Sequence[Tensor]) -> bool:
    """Return whether the parts lie in the first one's storage, in order and without gaps."""
    addresses = list(map(Tensor.data_ptr, parts))
    steps = map(mul, map(Tensor.numel, parts), repeat(_ELEMENT_BYTES))
    *expected, end = accumulate(steps, initial=addresses[0])
    storage = parts[0].untyped_storage()
    return (
        addresses == expected and end <= storage.data_ptr() + storage.nbytes() and all(map(Tensor.is_contiguous, parts))
    )


def _require_finite(bits: Tensor) -> None:
    """Raise `NonFiniteActivations`; NaN and infinity have the largest magnitudes, so the points show them."""
    bad = ((bits & MAGNITUDE_BITS) >= _INFINITY_BITS).any(1).nonzero()
    if bad.numel():
        raise NonFiniteActivations("activations must be finite: NaN or infinity found", index=int(bad[0]))
