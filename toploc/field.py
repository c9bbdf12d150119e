"""Batched arithmetic on polynomials over GF(65497), in float64.

Every intermediate is an integer below 2**45, so float64 arithmetic is exact on any device, in any order of summation,
with or without fused multiply-add. Polynomials are rows of ascending coefficients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from toploc.errors import BadArgument

PRIME = 65497
# The search for a modulus stops here, as in toploc 0.1.6. An honest chunk is separated within a few steps.
MIN_MODULUS = 2**15 + 1
# Sums of products stay below MAX_TOPK * PRIME**2 < 2**45.
MAX_TOPK = 4096

# Rounded up, so that the quotient of a multiple of PRIME is never below the integer that it is.
_RECIPROCAL = math.nextafter(1 / PRIME, 1.0)
_SEARCH_BUDGET = 2**21  # elements in one step of the modulus search
_SLICE_ELEMENTS = 2**22  # elements of k x k matrices worked on at once, unless one alone is larger


def residues_(x: Tensor) -> Tensor:
    """Reduce non-negative integers below 2**49 modulo PRIME, in place; float64, any shape.

    The quotient, below 2**34, is never too small, and too large by at most 2**-51 of itself, which is less than
    1 / PRIME: it does not reach the next integer, and its floor is exact.
    """
    return x.sub_(x.mul(_RECIPROCAL).floor_(), alpha=PRIME)


def powers(x: Tensor, count: int) -> Tensor:
    """Compute x**0 .. x**count for residues `x` [n, k] as [n, count + 1, k]; `count` must be a power of 2."""
    rows = x.new_ones(x.shape[0], count + 1, x.shape[1])
    rows[:, 1], known = x, 1
    while known < count:
        new = rows[:, known + 1 : 2 * known + 1]
        residues_(torch.mul(rows[:, 1 : known + 1], rows[:, known : known + 1], out=new))
        known *= 2
    return rows


class Points:
    """Powers of n rows of k points, split as x**(m*b + a) = giant[b] * baby[a].

    Two factors of about sqrt(k) powers each replace a k x k Vandermonde matrix.
    """

    def __init__(self, x: Tensor, length: int) -> None:
        """Precompute powers 0 .. `length` - 1 of the residues `x` [n, k], float64."""
        m = 1 << (((length - 1).bit_length() + 1) // 2)
        giants = -(-length // m)
        self._length = length
        baby = powers(x, m)
        self._baby, step = baby[:, :m], baby[:, m]
        self._giant = powers(step, 1 << (giants - 1).bit_length())[:, :giants]

    def evaluate(self, coefficients: Tensor) -> Tensor:
        """Evaluate polynomials [n, length] at the points of their row; returns [n, k]."""
        giants, m = self._giant.shape[1], self._baby.shape[1]
        padded = F.pad(coefficients, (0, giants * m - self._length)).reshape(-1, giants, m)
        partial = residues_(torch.bmm(padded, self._baby))
        return residues_(partial.mul_(self._giant).sum(1))

    def power_sums(self, weights: Tensor) -> Tensor:
        """Compute sum_j weights_j * x_j**i for i < length from residues [n, k]; returns [n, length]."""
        weighted = residues_(self._giant * weights.unsqueeze(1))
        sums = residues_(torch.bmm(weighted, self._baby.transpose(1, 2)))
        return sums.flatten(1)[:, : self._length]


def _sliding_dot(x: Tensor, window: Tensor) -> Tensor:
    """Compute sum_i x[..., r + i] * window[..., i] for every r: one row of a Hankel matrix per result."""
    return x.unfold(-1, window.shape[-1], 1).mul(window.unsqueeze(-2)).sum(-1)


def _monic_product(x: Tensor) -> Tensor:
    """Multiply out prod_j (X - x_j) by a product tree; returns [n, k] without the leading 1."""
    n, k = x.shape
    padding = (1 << (k - 1).bit_length()) - k
    # A padding point at 0 multiplies the product by X, which only shifts its coefficients.
    low = F.pad(x.neg().add_(PRIME), (0, padding)).unsqueeze(-1)
    while low.shape[1] > 1:
        left, right, d = low[:, 0::2], low[:, 1::2], low.shape[-1]
        low = _sliding_dot(F.pad(left, (d - 1, d)), right.flip(-1))
        low[..., d:].add_(left).add_(right)
        residues_(low)
    return low.reshape(n, -1)[:, padding:]


@functools.cache
def _inverses(device: torch.device) -> Tensor:
    """Tabulate the inverse of each residue, by Fermat: a**(PRIME-2). The entry of 0 is 0."""
    base = torch.arange(PRIME, dtype=torch.float64, device=device)
    result, exponent = torch.ones_like(base), PRIME - 2
    while exponent:
        if exponent & 1:
            residues_(result.mul_(base))
        residues_(base.mul_(base))
        exponent >>= 1
    return result


def _map_slices(function: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    """Apply `function` to a few rows at a time, to bound memory."""
    rows = max(1, _SLICE_ELEMENTS // left.shape[1] ** 2)
    return torch.cat([function(*pair) for pair in zip(torch.split(left, rows), torch.split(right, rows), strict=True)])


def interpolate(x: Tensor, y: Tensor) -> Tensor:
    """Return the coefficients [n, k] of the polynomials of degree < k through (x, y).

    `x`, `y`: residues [n, k], float64, on one device, x distinct within a row.
    """
    return _map_slices(_interpolate, x, y)


def _interpolate(x: Tensor, y: Tensor) -> Tensor:
    """Interpolate by Lagrange's formula with M(X) = prod_j (X - x_j) and u_j = y_j / M'(x_j).

    As M(X) / (X - x_j) has the coefficients sum_i c_{r+i+1} x_j**i, the result is a_r = sum_i c_{r+i+1} s_i with s_i =
    sum_j u_j x_j**i.
    """
    k = x.shape[1]
    points = Points(x, k)
    upper = F.pad(_monic_product(x)[:, 1:], (0, 1), value=1.0)  # c_1 .. c_k
    derivative = residues_(upper * torch.arange(1, k + 1, dtype=x.dtype, device=x.device))
    weights = _inverses(x.device)[points.evaluate(derivative).long()].mul_(y)
    sums = points.power_sums(residues_(weights))
    return residues_(_sliding_dot(F.pad(upper, (0, k - 1)), sums))


def evaluate(coefficients: Tensor, x: Tensor) -> Tensor:
    """Evaluate polynomials [n, k] at residues [n, k]; float64, on one device."""
    return _map_slices(lambda rows, points: Points(points, rows.shape[1]).evaluate(rows), coefficients, x)


def _distinct(x: Tensor) -> Tensor:
    ordered = x.sort(-1).values
    return (ordered[..., 1:] != ordered[..., :-1]).all(-1)


def separating_moduli(x: Tensor) -> Tensor:
    """Find the largest modulus m <= PRIME that keeps each row's integers distinct; returns [n] int64.

    `x`: non-negative integers [n, k], int64. Raises `BadArgument` if no m >= MIN_MODULUS does.
    """
    n, k = x.shape
    moduli = torch.full((n,), PRIME, dtype=torch.int64, device=x.device)
    open_rows = (~_distinct(x % PRIME)).nonzero()[:, 0]
    tried, width = PRIME, 1
    while open_rows.numel():
        if tried <= MIN_MODULUS:
            raise BadArgument("no modulus separates these points", index=int(open_rows[0]))
        width = max(1, min(width * 4, _SEARCH_BUDGET // (open_rows.numel() * k)))
        last = max(tried - width, MIN_MODULUS)
        candidates = torch.arange(tried - 1, last - 1, -1, device=x.device)
        separates = _distinct(x[open_rows].unsqueeze(1) % candidates.view(1, -1, 1))
        found = separates.any(1)
        moduli[open_rows[found]] = candidates[separates[found].to(torch.uint8).argmax(1)]
        open_rows, tried = open_rows[~found], last
    return moduli
