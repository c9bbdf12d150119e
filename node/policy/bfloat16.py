"""Products of bfloat16 numbers that are summed in float32, on x86-64 CPUs with an instruction for them (AVX-512 BF16).

torch rounds such sums to bfloat16 on a CPU, or converts both sides and multiplies in float32, at less than half the
speed. So a kernel of a few dozen instructions is compiled by numba for this machine, as that of `node.sampling` is.
Products of two such numbers are exact in float32: results differ from torch's float32 by the order of the sum alone.

A tile of `_ROWS` rows of the weight times `_LANES` tokens is summed in registers: all but 8 of AVX-512's 32. Tokens lie
beside each other in the packed states, and the weight's numbers are spread to all lanes, pair by pair, as it lies in
memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import config, njit, types  # type: ignore[import-untyped]
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger(__name__)

_VECTOR: Final = 16
_ROWS: Final = 6
_VECTORS: Final = 4
_LANES: Final = _VECTORS * _VECTOR
_PAIRS_AT_ONCE: Final = 256
"""Of a row that are summed before they are added to its sum: a quarter of the rounding errors of a thousand in turn."""
_LEAST_TILES: Final = 64
"""Below this many, another thread would take longer to wake than to help."""


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), _VECTOR), ir.VectorType(_I32, _VECTOR)
_HALVES = ir.VectorType(_BFloat16(), 2 * _VECTOR)


@intrinsic  # type: ignore[untyped-decorator]
def _add_tile(_: Any, packed: Any, weight: Any, row_pairs: Any, pairs: Any, tile: Any) -> Any:  # noqa: ARG001  (numba's types of them)
    """Add to `tile` [_ROWS, _LANES] the products of `pairs` pairs; addresses, of rows that are `row_pairs` long."""
    signature = types.void(types.uintp, types.uintp, types.int64, types.int64, types.uintp)

    def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        packed, weight, row_pairs, pairs, tile = arguments
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _HALVES, _HALVES])
        sum_pairs = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        lanes = builder.inttoptr(packed, _WORDS.as_pointer())
        first = builder.inttoptr(weight, _I32.as_pointer())
        rows = [builder.gep(first, [builder.mul(row_pairs, _I64(row))]) for row in range(_ROWS)]
        entry, body, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(body)
        builder.position_at_end(body)
        pair = builder.phi(_I64)
        sums = [builder.phi(_FLOATS) for _ in range(_ROWS * _VECTORS)]
        tokens = []
        for vector in range(_VECTORS):
            place = builder.add(builder.mul(pair, _I64(_VECTORS)), _I64(vector))
            tokens.append(builder.bitcast(builder.load(builder.gep(lanes, [place]), align=4), _HALVES))
        added = []
        for number, row in enumerate(rows):
            one = builder.insert_element(_WORDS(ir.Undefined), builder.load(builder.gep(row, [pair]), align=2), _I32(0))
            spread = builder.bitcast(builder.shuffle_vector(one, _WORDS(ir.Undefined), _WORDS([0] * _VECTOR)), _HALVES)
            before = sums[number * _VECTORS : (number + 1) * _VECTORS]
            added += [builder.call(sum_pairs, [old, own, spread]) for old, own in zip(before, tokens, strict=True)]
        following = builder.add(pair, _I64(1))
        pair.add_incoming(_I64(0), entry)
        pair.add_incoming(following, body)
        for old, new in zip(sums, added, strict=True):
            old.add_incoming(_FLOATS([0.0] * _VECTOR), entry)
            old.add_incoming(new, body)
        builder.cbranch(builder.icmp_signed("<", following, pairs), body, behind)
        builder.position_at_end(behind)
        out = builder.inttoptr(tile, _FLOATS.as_pointer())
        for number, value in enumerate(added):
            place = builder.gep(out, [_I64(number)])
            builder.store(builder.fadd(builder.load(place, align=4), value), place, align=4)
        return context.get_dummy_value()

    return signature, generate


_SIGNATURE = types.void(
    types.uintp, types.uintp, types.int64, types.float32[:, :], types.float32[:, ::1], types.int64, types.int64
)


def _columns(  # noqa: PLR0917
    packed: int, weight: int, pairs: int, out: NDArray[Any], tile: NDArray[Any], start: int, end: int
) -> None:
    """Fill the columns `start` to `end`, at least _ROWS, of `out` [tokens, rows of the weight]; `tile` is scratch."""
    for token in range(0, out.shape[0], _LANES):
        lanes = min(_LANES, out.shape[0] - token)
        for column in range(start, end, _ROWS):
            row = min(column, end - _ROWS)
            tile[:] = np.float32(0.0)
            for pair in range(0, pairs, _PAIRS_AT_ONCE):
                _add_tile(
                    packed + np.uint64(4 * (token * pairs + pair * _LANES)),
                    weight + np.uint64(4 * (row * pairs + pair)),
                    pairs,
                    min(_PAIRS_AT_ONCE, pairs - pair),
                    np.uint64(tile.ctypes.data),
                )
            for lane in range(lanes):
                for each in range(_ROWS):
                    out[token + lane, row + each] = tile[each, lane]


@cache
def _kernel() -> Callable[..., None] | None:
    """Compile `_columns`, or load what an earlier process compiled; None where the CPU, or LLVM, cannot do it."""
    try:
        is_there = get_host_cpu_features().get("avx512bf16", False)
    except RuntimeError:  # LLVM does not know this CPU
        is_there = False
    if not is_there or config.CPU_NAME or config.CPU_FEATURES or not config.ENABLE_AVX:
        return None  # an instruction that numba was told to do without ends the process
    for kept in (True, False):
        try:
            compiled = njit(_SIGNATURE, cache=kept, nogil=True, error_model="numpy")(_columns)
        except Exception:
            log.debug("the kernel is not compiled, or not kept", exc_info=True)
        else:
            return cast("Callable[..., None]", compiled)
    return None


@dataclass(frozen=True, slots=True)
class PackedStates:
    """Hidden states as the kernel reads them: `words` [groups of _LANES tokens, pairs, tokens], two numbers in each."""

    words: Tensor

    @staticmethod
    def of(states: Tensor, weight: Tensor) -> PackedStates | None:
        """Copy states [tokens, in] for products with rows of `weight` [out, in].

        None where the two cannot be multiplied so, on this machine or at all.
        """
        if not (_is_ours(states) and _is_ours(weight)) or weight.shape[1] % 2 or _kernel() is None:
            return None
        padded = states.new_zeros(-(-len(states) // _LANES) * _LANES, states.shape[1])
        padded[: len(states)] = states
        return PackedStates(
            padded.view(torch.int32).view(-1, _LANES, states.shape[1] // 2).transpose(1, 2).contiguous()
        )

    def multiply(self, weight: Tensor, *, out: Tensor) -> None:
        """Write the products with `weight` [rows, in] to `out` [tokens, rows], float32, with torch's threads.

        Raises ValueError for shapes that do not fit, and for what `of` would not take.
        """
        kernel, rows, pairs = _kernel(), len(weight), self.words.shape[1]
        fits = weight.shape[1] == 2 * pairs and out.shape[1] == rows and len(out) <= len(self.words) * _LANES
        if kernel is None or not fits or not _is_ours(weight):
            raise ValueError("these are no rows that the packed states are multiplied with")
        if rows < _ROWS:
            whole = torch.empty(len(out), _ROWS, dtype=torch.float32)
            self.multiply(F.pad(weight, (0, 0, 0, _ROWS - rows)), out=whole)
            out.copy_(whole[:, :rows])
            return
        tiles, columns = rows // _ROWS, out.numpy()
        threads = min(torch.get_num_threads(), tiles) if tiles * len(self.words) >= _LEAST_TILES else 1

        def part(index: int) -> None:
            start, end = (tiles * at // threads * _ROWS for at in (index, index + 1))
            tile = np.empty((_ROWS, _LANES), np.float32)
            last = rows if index + 1 == threads else end
            kernel(self.words.data_ptr(), weight.data_ptr(), pairs, columns, tile, start, last)

        if threads == 1:
            part(0)
        else:
            list(_pool(threads).map(part, range(threads)))


def _is_ours(numbers: Tensor) -> bool:
    return numbers.dtype == torch.bfloat16 and numbers.device.type == "cpu" and numbers.is_contiguous()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="products")


# A forked child inherits the pool without its threads, and would wait for them forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
