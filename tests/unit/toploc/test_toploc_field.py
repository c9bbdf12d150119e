"""Interpolation against schoolbook arithmetic: one wrong coefficient and every honest proof is refused."""

from __future__ import annotations

import random

import pytest
import torch

from toploc import field
from toploc.errors import BadArgument
from toploc.poly import find_injective_modulus

P = 65497


def newton(x: list[int], y: list[int]) -> list[int]:
    """Divided differences over Python integers, expanded by Horner's rule."""
    differences = list(y)
    for order in range(1, len(x)):
        for i in range(len(x) - 1, order - 1, -1):
            rise, run = differences[i] - differences[i - 1], x[i] - x[i - order]
            differences[i] = rise * pow(run, -1, P) % P
    polynomial: list[int] = []
    for root, difference in zip(reversed(x), reversed(differences), strict=True):
        shifted = [0, *polynomial]
        scaled = [-root * c for c in polynomial] + [0]
        polynomial = [(a + b) % P for a, b in zip(shifted, scaled, strict=True)]
        polynomial[0] = (polynomial[0] + difference) % P
    return polynomial


def horner(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % P
    return value


def largest_modulus(x: list[int]) -> int:
    return next(m for m in range(P, 2**15, -1) if len({value % m for value in x}) == len(x))


def doubles(values: list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 64, 100, 128, 129])
def test_interpolation_equals_newtons(k: int) -> None:
    draw = random.Random(k)
    x = [draw.sample(range(P), k) for _ in range(3)]
    y = [[draw.randrange(P) for _ in range(k)] for _ in range(3)]
    # Zero and the largest residue as points and values, where an unreduced residue would show.
    x[0][0], y[0][0] = next(v for v in (0, P - 1, P - 2) if v not in x[0][1:]), P - 1
    coefficients = field.interpolate(doubles(x), doubles(y)).long().tolist()
    assert coefficients == [newton(*pair) for pair in zip(x, y, strict=True)]


@pytest.mark.parametrize("k", [1, 2, 7, 16, 33, 128])
def test_evaluation_equals_horners(k: int) -> None:
    draw = random.Random(k)
    coefficients = [[draw.randrange(P) for _ in range(k)] for _ in range(4)] + [[P - 1] * k]
    x = [[draw.randrange(P) for _ in range(k)] for _ in range(4)] + [[P - 1] * k]
    expected = [[horner(c, point) for point in row] for c, row in zip(coefficients, x, strict=True)]
    assert field.evaluate(doubles(coefficients), doubles(x)).long().tolist() == expected


def test_many_rows_in_slices_equal_the_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field, "_SLICE_ELEMENTS", 3 * 8**2)
    draw = random.Random(0)
    x = [draw.sample(range(P), 8) for _ in range(10)]
    y = [[draw.randrange(P) for _ in range(8)] for _ in range(10)]
    together = field.interpolate(doubles(x), doubles(y)).long().tolist()
    assert together == [newton(*pair) for pair in zip(x, y, strict=True)]


def test_the_largest_polynomial_stays_exact() -> None:
    """At MAX_TOPK the sums are as large as they get; a rounding there would show as a wrong value."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randperm(P, generator=generator)[: field.MAX_TOPK].double().unsqueeze(0)
    y = torch.full_like(x, P - 1)
    y[0, ::2] = torch.randint(0, P, (field.MAX_TOPK // 2,), generator=generator).double()
    coefficients = field.interpolate(x, y)
    assert torch.equal(field.evaluate(coefficients, x), y)
    some = [0, 1, 2, 4094, 4095]
    exact = [horner(coefficients[0].long().tolist(), int(x[0, i])) for i in some]
    assert exact == [int(y[0, i]) for i in some]


def test_every_residue_is_exact_at_the_edges_of_its_range() -> None:
    values = [q * P + r for q in (0, 1, 2, 65496, 2**28, 2**35) for r in (0, 1, P - 2, P - 1)]
    assert field.residues_(doubles([values])).long().tolist() == [[value % P for value in values]]


class TestModulus:
    def test_is_the_largest_that_separates(self) -> None:
        draw = random.Random(1)
        x = [draw.sample(range(32 * 5120), 128) for _ in range(60)]
        moduli = field.separating_moduli(torch.tensor(x)).tolist()
        assert moduli == [largest_modulus(row) for row in x]
        assert any(m < P for m in moduli)

    def test_is_found_for_outlier_dimensions(self) -> None:
        """The same few dimensions lead in every token of a real model, so indices repeat with a period."""
        x = [[token * 4096 + d for token in range(32) for d in (7, 46, 1000, 1040)] for _ in range(2)]
        x[1] = [value + 5 for value in x[1]]
        assert field.separating_moduli(torch.tensor(x)).tolist() == [largest_modulus(row) for row in x]

    def test_is_found_after_a_long_search(self) -> None:
        x = [0, *(P - j for j in range(200))]
        assert field.separating_moduli(torch.tensor([x, list(range(201))])).tolist() == [P - 200, P]

    def test_is_found_where_memory_allows_one_modulus_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a batch of thousands of chunks, which a verifier would otherwise end on."""
        monkeypatch.setattr(field, "_SEARCH_BUDGET", 1)
        assert field.separating_moduli(torch.tensor([[0, P, P - 1]])).tolist() == [P - 2]

    def test_of_integers_beyond_32_bits(self) -> None:
        draw = random.Random(2)
        x = [draw.randrange(4_000_000_000) for _ in range(100)]
        assert find_injective_modulus(x) == largest_modulus(x)

    def test_none_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(field, "MIN_MODULUS", P - 100)
        draw = random.Random(3)
        x = [draw.randrange(2**62) for _ in range(1500)]
        with pytest.raises(BadArgument):
            find_injective_modulus(x)
