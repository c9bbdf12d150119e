"""Policies with experts: stored as published checkpoints are, read in parts, and computed as transformers does.

A file under other names would be of no use to vLLM, or to whoever exports the policy; a reader that mixed experts up
would hold another model without an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import edit_json, make_folder
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.moe import batched_mm_experts_forward

from benchmarks.modelling.families import small_model, telling_fields
from node.policy import layout
from node.policy.errors import MalformedPolicy
from node.policy.experts import compute_experts, routers
from node.policy.families import ATTENTION_FAMILIES
from node.policy.file import load_policy, save_policy
from node.policy.folder import open_folder
from node.policy.header import stored_tensors
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.routing import choices_of_lines, noted_choices, replayed_choices
from node.policy.skeleton import unique_tensors

MIXTURES = sorted(name for name, family in ATTENTION_FAMILIES.items() if family.experts)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_policy_has_the_names_and_numbers_of_a_published_checkpoint(family: str, tmp_path: Path) -> None:
    model = small_model(family, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    save_policy(model, make_tokenizer(), tmp_path / "policy")
    with safe_open(tmp_path / "model.safetensors", "pt") as published, safe_open(tmp_path / "policy", "pt") as ours:
        assert sorted(published.keys()) == sorted(ours.keys())
        for name in published.keys():  # noqa: SIM118  (not a mapping)
            wanted, found = published.get_tensor(name), ours.get_tensor(name)
            assert torch.equal(wanted.to(found.dtype), found), name
    assert {tensor.dtype for name, tensor in stored_tensors(tmp_path / "policy").items() if layout.EXACT in name} <= {
        "F32"
    }


class _Parts:
    """Of several processes the one that holds part `rank` of every tensor, cut in the middle of an expert."""

    size = 2
    device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.parts: dict[int, tuple[Tensor, int]] = {}

    def shard(self, model: Any) -> None:
        """Leave the model whole; only its parts are filled."""

    def own_part(self, tensor: Tensor) -> tuple[Tensor, int]:
        flat = tensor.detach().view(-1)
        cut = len(flat) * 3 // 8
        return (flat[:cut], 0) if self._rank == 0 else (flat[cut:], cut)

    def largest(self, values: Tensor) -> Tensor:
        return values


def test_processes_read_their_parts_of_experts_wherever_these_are_cut(tmp_path: Path) -> None:
    model = small_model("qwen3_moe")
    save_policy(model, make_tokenizer(), tmp_path / "policy")
    expected = unique_tensors(model)
    for rank in (0, 1):
        part = _Parts(rank)
        found = load_policy(tmp_path / "policy", dtype=torch.float32, shards=part).model
        for name, tensor in unique_tensors(found).items():
            own, first = part.own_part(tensor)
            assert torch.equal(own, expected[name].detach().view(-1)[first : first + len(own)]), name


def test_layers_that_predict_further_tokens_are_left_out_of_a_folder(tmp_path: Path) -> None:
    """GLM-4.5 and DeepSeek V3 are published with one behind the last, which no policy has."""
    folder = make_folder(tmp_path / "model", family="glm4_moe", **telling_fields("glm4_moe", layers=2))
    edit_json(folder / "config.json", {"num_nextn_predict_layers": 1})
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}
    save_file(extra, folder / "model-mtp.safetensors")
    index["weight_map"] |= dict.fromkeys(extra, "model-mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = open_folder(folder)
    assert found.config.num_mtp_layers == 0
    assert not found.tensors.keys() & extra.keys()
    edit_json(folder / "config.json", {"num_nextn_predict_layers": 0})
    with pytest.raises(MalformedPolicy, match="eh_proj"):
        open_folder(folder)


def test_a_configuration_cannot_ask_for_more_experts_than_a_file_may_have_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 layers of 1,024 experts are three million names, of a file of a few kilobytes."""
    save_policy(small_model("qwen3_moe"), make_tokenizer(), tmp_path / "policy")
    monkeypatch.setattr(layout, "MAX_TENSORS", 20)
    with pytest.raises(MalformedPolicy, match="more than 20 tensors"):
        load_policy(tmp_path / "policy", dtype=None)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_and_their_gradients_are_those_of_transformers(family: str) -> None:
    """The one computes by sorted tokens, with or without gradients; the other gathers each token's matrices."""
    model = small_model(family)
    (experts,) = [module for module in model.modules() if hasattr(module, "gate_up_proj_bias") or _is_experts(module)][
        :1
    ]
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(40, model.config.hidden_size, generator=generator, requires_grad=True)
    scores = torch.randn(40, routers(model)[0].num_experts, generator=generator)
    weights, chosen = scores.softmax(-1).topk(routers(model)[0].top_k)
    given = [states, *experts.parameters()]
    wanted = batched_mm_experts_forward(experts, states, chosen, weights)
    found = compute_experts(experts, states, chosen, weights)
    torch.testing.assert_close(found, wanted)
    direction = torch.randn(wanted.shape, generator=generator)
    for ours, theirs in zip(
        *(torch.autograd.grad((out * direction).sum(), given) for out in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    with torch.inference_mode():
        torch.testing.assert_close(compute_experts(experts, states, chosen, weights), wanted)


def _is_experts(module: Any) -> bool:
    return isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter)


@pytest.mark.parametrize("family", MIXTURES)
def test_replayed_tokens_meet_given_experts_by_the_routers_own_weights(family: str) -> None:
    """A trainer's gradient would go through other experts than the verifier's, or weigh the right ones wrongly."""
    model: Any = small_model(family)
    found = routers(model)
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))

    def states() -> tuple[Tensor, list[Tensor]]:
        with noted_choices(found) as noted:
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden, [chosen for (chosen,) in noted]

    plain, own = states()
    choices, every = choices_of_lines(own, lines=2), torch.ones(18, dtype=torch.bool)
    assert choices is not None
    with replayed_choices(model, choices.flatten(0, 1), every):
        torch.testing.assert_close(states()[0], plain)
    others = [(chosen + 1) % router.num_experts for chosen, router in zip(own, found, strict=True)]
    choices = choices_of_lines(others, lines=2)
    assert choices is not None
    is_known = every.clone()
    is_known[5:7] = False
    with replayed_choices(model, choices.flatten(0, 1), is_known):
        changed, met = states()
    assert not torch.allclose(changed, plain)
    for chosen, other in zip(met, others, strict=True):
        assert torch.equal(chosen[is_known], other[is_known])
    assert torch.equal(met[0][5:7], own[0][5:7]), "a token of which nothing is known meets its router's"
    with (
        pytest.raises(ValueError, match="not the choices of this model"),
        replayed_choices(model, choices[0, :, 1:], every[:9]),
    ):
        pass


def test_a_layer_of_many_experts_takes_two_bytes_for_each() -> None:
    """The 300th expert would be the 44th."""
    model: Any = small_model("qwen3_moe", num_experts=300, num_experts_per_tok=2)
    (router,) = routers(model)
    given = torch.tensor([[299, 44]] * 3, dtype=torch.int16)
    choices = choices_of_lines([given], lines=1)
    assert choices is not None
    with replayed_choices(model, choices[0], torch.ones(3, dtype=torch.bool)):
        assert router(torch.randn(3, model.config.hidden_size))[2].tolist() == given.tolist()
