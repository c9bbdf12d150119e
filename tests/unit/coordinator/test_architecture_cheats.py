"""Cheats that only some architectures allow: one that changed nothing would be honest work, and count as not caught."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from coordinator.calibration.architecture_cheats import DROPPED, architecture_edits
from coordinator.calibration.cheats import change_matrices, noise
from node.policy.config import config_fields

SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
MAKES = {
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "glm4_moe": {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
    "llama": {},
}
EXPERTS = {
    "an expert dropped",
    "1 % noise on routers",
    "10 % noise on routers",
    "experts in int4",
    "one expert fewer",
}
ALLOWED = {
    "mixtral": EXPERTS,
    "glm4_moe": EXPERTS,
    "gpt_oss": EXPERTS | {"half the window"},
    "gemma3_text": {"half the window"},
    "llama": set(),
}


def make(family):
    known = CONFIG_MAPPING[family]
    config = known(**{name: value for name, value in SIZES.items() if name in config_fields(known)} | MAKES[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for weight in model.parameters():
            weight.data.normal_(std=0.2)
    return model


def logits(model):
    """As a worker that serves the changed policy has them: of a model built anew."""
    served = AutoModelForCausalLM.from_config(model.config).eval()
    served.load_state_dict(model.state_dict())
    with torch.no_grad():
        return served(input_ids=torch.arange(24)[None]).logits


@pytest.mark.parametrize("family", MAKES)
def test_an_architecture_is_attacked_where_it_can_be_and_every_attack_changes_what_is_computed(family):
    model = make(family)
    edits = architecture_edits(model.config)
    assert edits.keys() == ALLOWED[family]
    honest = logits(model)
    for name, edit in edits.items():
        changed = copy.deepcopy(model)
        edit(changed)
        assert not torch.allclose(logits(changed), honest, atol=1e-5), name


def test_one_expert_of_each_layer_is_dropped_and_no_other():
    model = make("gpt_oss")
    dropped = copy.deepcopy(model)
    architecture_edits(model.config)["an expert dropped"](dropped)
    for (name, own), changed in zip(model.named_parameters(), dropped.parameters(), strict=True):
        if ".experts.down_proj" not in name:
            assert torch.equal(own, changed), name
        else:
            assert not changed[DROPPED].any()
            assert torch.equal(changed[DROPPED + 1 :], own[DROPPED + 1 :])


def test_a_change_of_matrices_reaches_those_of_every_expert():
    """Otherwise a policy that is mostly experts would be called noisy with its experts as they are."""
    model = make("mixtral")
    changed = copy.deepcopy(model)
    change_matrices(changed, noise)
    for (name, own), other in zip(model.named_parameters(), changed.parameters(), strict=True):
        is_matrix = ".layers." in name and own.ndim >= 2
        assert torch.equal(own, other) != is_matrix, name
        if name.endswith("experts.down_proj"):
            assert all(not torch.equal(*pair) for pair in zip(own, other, strict=True))
