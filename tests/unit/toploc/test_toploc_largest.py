"""Which elements a proof passes through: a worker's GPU and a verifier's CPU must name the same ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toploc.largest import largest


def ranked(magnitudes: Tensor, k: int) -> list[list[int]]:
    """By magnitude, the lower index first among equals."""
    order = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i)) for row in magnitudes.tolist()]
    return [sorted(row[:k]) for row in order]


@pytest.mark.parametrize(
    ("size", "k"),
    [(128, 128), (129, 128), (640, 128), (4096, 128), (4100, 16), (32 * 512, 128), (999, 7), (64, 1), (5, 5)],
)
@pytest.mark.parametrize("levels", [1, 2, 5, 50, 32640])
def test_the_lower_index_wins_a_tie(size: int, k: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(size + levels)
    magnitudes = torch.randint(0, levels, (3, size), generator=generator, dtype=torch.int16)
    assert largest(magnitudes, k).sort(1).values.tolist() == ranked(magnitudes, k)


def test_ties_across_the_edge_of_a_group() -> None:
    """Two elements tie for the last place in different groups, the earlier index in the later group."""
    magnitudes = torch.zeros(1, 4096, dtype=torch.int16)
    magnitudes[0, :15] = 9
    magnitudes[0, [100, 70 + 64 * 8]] = 5
    assert largest(magnitudes, 16).sort(1).values.tolist() == [[*range(15), 100]]


def test_the_sign_neither_counts_nor_breaks_a_tie() -> None:
    activations = torch.tensor([[2.0, -3.0, 0.5, -2.0, 3.0, 2.0, -0.0, 1.0]]).bfloat16()
    assert largest(activations.view(torch.int16), 3).sort(1).values.tolist() == [[0, 1, 4]]


def test_outliers_of_one_channel_that_fall_in_one_column() -> None:
    """As in real policies: a channel of the hidden state is large at every token of the chunk."""
    activations = torch.randn(32, 4096, generator=torch.Generator().manual_seed(3)).bfloat16()
    activations[:, [7, 519, 4000]] *= -100
    rows = activations.view(torch.int16).view(1, -1)
    assert largest(rows, 128).sort(1).values.tolist() == ranked(rows & 0x7FFF, 128)


def test_gaussian_activations_name_the_magnitudes_that_torch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    activations = torch.randn(9, 32 * 4096, generator=generator).bfloat16()
    ours = activations.abs().gather(1, largest(activations.view(torch.int16), 128)).sort(1, descending=True).values
    assert torch.equal(ours, activations.abs().topk(128, dim=1).values)
