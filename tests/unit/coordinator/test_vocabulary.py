"""A vocabulary that processes share: its embedding is the family's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.modelling.families import small_model
from coordinator.training.vocabulary import share_vocabulary


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_shared_embedding_is_scaled_where_the_family_scales_its_own(family, mesh):
    """Otherwise several processes would train another model than one does, without an error."""
    model = small_model(family)
    ids = torch.tensor([[5, 0, 99], [7, 5, 127]])
    with torch.no_grad():
        expected = model.get_input_embeddings()(ids)
        share_vocabulary(model, mesh)
        assert torch.equal(model.get_input_embeddings()(ids), expected)
