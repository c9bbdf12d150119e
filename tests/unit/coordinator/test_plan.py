"""What a plan says of a model is what the model is: an operator buys machines by these figures.

Formulas are compared with tensors that real models have, keep and write, at sizes that a test can afford.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result
from family_cases import IS_TIED, families
from forked import forked  # noqa: F401  (a fixture)
from model_folders import SIZES, make_folder
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.modelling.families import telling_fields
from coordinator.errors import BadConfiguration, UnfitModel
from coordinator.planning import formulas, roles
from coordinator.planning.amounts import Cards, parse_cards, parse_rate
from coordinator.planning.experts import plan_experts
from coordinator.planning.plan import Machines, make_plan
from coordinator.planning.proposal import first_spec
from coordinator.planning.shape import ModelShape, read_shape
from coordinator.training.groups import Sample
from coordinator.training.head import final_states
from coordinator.training.lora import add_adapters
from coordinator.training.optimizers import make_optimizer
from coordinator.training.packing import Scored, pack
from node.cli import main
from node.keys.identity import create_key
from node.policy.families import ATTENTION_FAMILIES
from node.policy.packed_attention import packed_attention
from node.policy.products import use_blocks
from node.policy.skeleton import unique_tensors
from node.protocol.run import LoraSpec, TrainingSpec, parse_run_toml

MODELS = Path(__file__).parents[3] / "benchmarks" / "data" / "models"


@functools.cache
def published(name: str) -> ModelShape:
    return read_shape(MODELS / name)


def write_config(folder: Path, *, family: str = "qwen3", **fields: Any) -> Path:
    config = CONFIG_MAPPING[family](**SIZES | {"sliding_window": None} | fields)
    path = folder / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    return path


def small_shape(folder: Path, **fields: Any) -> tuple[ModelShape, Any]:
    path = write_config(folder, **fields)
    config = CONFIG_MAPPING[json.loads(path.read_text())["model_type"]].from_pretrained(folder)
    return read_shape(path), AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", families(others=pytest.mark.system))
def test_what_is_counted_is_what_the_model_has(tmp_path: Path, family: str) -> None:
    is_tied = IS_TIED[family]
    fields = telling_fields(family, layers=2) | {"tie_word_embeddings": is_tied}
    shape, model = small_shape(tmp_path, family=family, **fields)
    assert shape.runs_here
    kept = model(torch.zeros(1, 3, dtype=torch.int64), use_cache=True).past_key_values.layers
    cached = [(layer.keys.shape, layer.values.shape) for layer in kept if hasattr(layer, "keys")]
    keys, values = cached[0]
    assert len(cached) == shape.attending
    assert (shape.kv_heads, shape.head_dim) == (keys[1], keys[3]) or shape.latent == keys[3] + values[3]
    layers = [sum(each.numel() for each in layer.parameters()) for layer in model.model.layers]
    assert shape.parameters == sum(each.numel() for each in unique_tensors(model).values())
    assert (shape.active < shape.parameters) == (ATTENTION_FAMILIES[family].experts is not None)
    assert shape.largest_layer == max(layers)
    assert shape.outside_layers == shape.parameters - sum(layers)
    assert shape.largest_tensor == max(each.numel() for each in model.parameters())
    assert shape.is_tied is is_tied


def lora(rank: int, *targets: Any) -> LoraSpec:
    return LoraSpec(rank=rank, alpha=1.0, targets=targets) if targets else LoraSpec(rank=rank, alpha=1.0)


TRAININGS = {
    "adamw": TrainingSpec(),
    "muon": TrainingSpec(optimizer="muon"),
    "adapters": TrainingSpec(lora=lora(8)),
    "adapters of some layers, of a rank above their width": TrainingSpec(lora=lora(300, "q_proj", "down_proj")),
}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_the_optimizers_state_is_what_a_step_leaves(tmp_path: Path, training: TrainingSpec) -> None:
    shape, model = small_shape(tmp_path)
    if isinstance(training.lora, LoraSpec):
        use_blocks(model)
        add_adapters(model, training.lora)
    made = make_optimizer(model, training)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    made.step()
    states = [made.state_of(parameter) for parameter in model.parameters()]
    kept = sum(each.nbytes for state in states for each in state.values() if torch.is_tensor(each) and each.ndim)
    assert formulas.optimizer_bytes(shape, training) == kept
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert formulas.trained_parameters(shape, training) == trained


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("autocast", [False, True])
def test_activations_are_what_autograd_keeps(tmp_path: Path, family: str, autocast: bool) -> None:
    """A layer more keeps as much more as the plan says, prompts that samples share included."""
    kept = []
    for layers in (1, 3):
        folder = tmp_path / str(layers)
        folder.mkdir()
        shape, model = small_shape(folder, family=family, num_hidden_layers=layers)
        prompt = tuple(range(40))
        samples = [Sample(prompt, tuple(range(60)), (-1.0,) * 60) for _ in range(3)]
        (row,) = pack([Scored(each, 1.0, (0,) * 60) for each in samples], row_tokens=512)
        assert row.layout is not None
        kept.append(_saved_bytes(model, row, autocast=autocast))
    planned = formulas.layer_activation_bytes(
        shape, tokens=row.ids.numel(), padded=row.layout.columns.numel(), autocast=autocast
    )
    assert (kept[1] - kept[0]) / 2 == pytest.approx(planned, rel=0.01)


def _saved_bytes(model: Any, row: Any, *, autocast: bool) -> int:
    """Sum up the storages that the graph of a row's final states keeps, but for the model's own and casts of these."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    shapes = {tuple(each.shape) for each in model.parameters() if each.ndim == 2}
    saved: dict[int, int] = {}
    held = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)  # so that no storage's address is used twice
        is_cast = (
            tensor.dtype == torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.t().shape)} & shapes
            if tensor.ndim == 2
            else False
        )
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and not is_cast:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    with (
        packed_attention(model),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        final_states(model, row)
    return sum(saved.values())


def test_keys_and_values_are_those_of_a_cache(tmp_path: Path) -> None:
    shape, model = small_shape(tmp_path)
    with torch.no_grad():
        cache = model(torch.zeros(1, 10, dtype=torch.int64), use_cache=True).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert formulas.cache_bytes_per_token(shape, dtype="bfloat16") * 10 == 2 * numbers
    assert formulas.cache_bytes_per_token(shape, dtype="bfloat16", parts=4) * 2 == formulas.cache_bytes_per_token(
        shape, dtype="bfloat16"
    ), "no GPU holds less than one head of keys"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen3-0.6B", 596_049_920), ("Qwen3-4B", 4_022_468_096), ("Qwen3-32B", 32_762_123_264)],
)
def test_published_models_have_the_sizes_that_they_are_published_with(name: str, parameters: int) -> None:
    shape = published(name)
    assert (shape.name, shape.parameters, shape.runs_here, shape.dtype) == (name, parameters, True, "bfloat16")


def test_of_a_model_with_experts_is_counted_what_a_token_meets(tmp_path: Path) -> None:
    for family, runs_here in (("qwen3_moe", True), ("olmoe", False)):
        config = write_config(tmp_path, family=family, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
        shape, expert = read_shape(config), 3 * 128 * 48
        assert shape.runs_here == runs_here
        assert shape.parameters - shape.active == 2 * 6 * expert, "two layers, in which a token meets 2 of 8 experts"
        assert shape.feed_forward == 2 * 48
        assert (shape.experts, shape.chosen, shape.routed_layers, shape.routed) == (8, 2, 2, 2 * 8 * expert)
        assert shape.largest_dense == shape.largest_layer - 8 * expert


def test_with_expert_parallelism_states_move_in_place_of_experts() -> None:
    """Who rents by this plan would have GPUs for gathered experts, or links for none of the tokens' states."""
    shape = published("GLM-4.5-Air")
    spec = first_spec(shape, initial="/model", context=None, group_size=None)
    settings = roles.TrainerOptions(ranks=32, row_tokens=4096, recompute=False, autocast=True)
    found = plan_experts(shape, spec, settings, tokens=32 * 4096)
    assert found is not None
    assert found.most_of_a_layer == 4
    gathers = sum(item.bytes for item in roles.trainer_items(shape, spec, settings))
    met = next(item.bytes for item in found.items if item.name.startswith("states"))
    layer = 10 * (shape.largest_layer - shape.largest_dense)
    assert found.total == pytest.approx(gathers - layer + met + roles.CUDA_BYTES), "a gathered layer has no experts"
    there_and_back = 2 * 45 * 8 * 4096 * 2 * 4096
    assert found.sent_bytes == pytest.approx(2 * there_and_back * 31 / 32), "of 4,096 tokens, and of gradients"
    assert plan_experts(published("Qwen3-4B"), spec, settings, tokens=4096) is None
    alone = msgspec.structs.replace(settings, ranks=1)
    assert plan_experts(shape, spec, alone, tokens=4096) is None


def test_adapters_of_a_model_that_is_planned_on_paper_are_refused(tmp_path: Path) -> None:
    """The plan was that of a run that trains all weights, and said nothing."""
    config = write_config(tmp_path, family="olmoe", num_experts=8, num_experts_per_tok=2)
    run = tmp_path / "run.toml"
    run.write_text('name = "x"\n[[environments]]\nname = "arithmetic"\n[training.lora]\nrank = 8\nalpha = 16\n')
    done = plan("--model", str(config), "--gpus", "4x80GB", "--run", str(run))
    assert done.exit_code == 1
    assert "no adapters for experts: leave it out" in done.output
    assert "CANNOT RUN" in plan("--model", str(config), "--gpus", "4x80GB").output


def test_adapters_take_what_they_train_and_no_more(tmp_path: Path) -> None:
    """An operator would rent four times the GPUs; a high rank costs nearly as much as all weights, and is said to."""
    shape, settings = (
        published("Qwen3-4B"),
        roles.TrainerOptions(ranks=4, row_tokens=4096, recompute=True, autocast=True),
    )
    spec = first_spec(shape, initial="/model", context=None, group_size=None)
    totals = []
    for training in (TrainingSpec(lora=lora(8)), TrainingSpec(lora=lora(1024)), TrainingSpec(kl_coefficient=0.1)):
        *held, _ = roles.step_items(shape, msgspec.structs.replace(spec, training=training), settings)
        totals.append(4 * sum(item.bytes for item in held) / shape.parameters)
    low, high, full = totals
    assert 4.0 < low < 4.2, "4 bytes for each frozen weight"
    assert high == pytest.approx(4 + 16 * formulas.adapter_parameters(shape, TrainingSpec(lora=lora(1024)))
                                 / shape.parameters, rel=0.01)  # fmt: skip
    assert full == pytest.approx(20.0), "weights, gradients, two moments, and the first policy"
    with_adapters = msgspec.structs.replace(spec, training=TrainingSpec(lora=lora(8)))
    checkpoints = [roles.disk_items(shape, each)[0].bytes for each in (spec, with_adapters)]
    assert checkpoints[1] < checkpoints[0] / 100


@pytest.mark.parametrize(
    ("standing", "limits", "share"),
    [
        ({}, {"second_looks": 0.0}, 1.0),
        ({}, {"second_looks": 0.05}, 1.2),
        ({}, {"second_looks": 0.05, "suspects": ()}, 1.0),
        ({}, {"second_looks": 0.0, "readings": 2}, 2.0),
        ({"full_rate_floor": 0.1}, {"second_looks": 0.0}, 0.1 + 0.9 / 8),
    ],
)
def test_verifiers_do_what_the_rules_ask_of_them(
    standing: dict[str, Any], limits: dict[str, Any], share: float
) -> None:
    """A second look is two prefills for each suspect; who is trusted has one of eight rows measured."""
    spec = first_spec(published("Qwen3-4B"), initial="/model", context=None, group_size=8)
    spec = msgspec.structs.replace(
        spec,
        standing=msgspec.structs.replace(spec.standing, **standing),
        limits=msgspec.structs.replace(spec.limits, **limits),
    )
    assert formulas.prefilled_share(spec, tokens=8 * spec.sampling.most_tokens) == pytest.approx(share)


def test_a_prompt_is_verified_once_for_its_group_where_one_prefill_shares_it() -> None:
    """The reference prefill does, and one row of a trusted node takes its prompt with it; vLLM reads rows whole."""
    shape = published("Qwen3-4B")
    spec = first_spec(shape, initial="/model", context=4096, group_size=8)
    sampling = spec.sampling
    assert formulas.prefilled_tokens(shape, spec) == sampling.max_prompt_tokens + 8 * sampling.max_new_tokens
    hybrid = msgspec.structs.replace(shape, attending=shape.layers - 1)
    assert formulas.prefilled_tokens(hybrid, spec) == 8 * sampling.most_tokens
    given: dict[str, Any] = {
        "cards": parse_cards("2x80GB"), "workers": 4, "worker_cards": parse_cards("1x24GB"), "relays": 2,
        "uplink": 1.25e8, "downlink": 1.25e8,
    }  # fmt: skip
    with_torch, with_vllm = (
        make_plan(shape, spec, Machines(verifier_cards=cards, **given), is_given=False).work for cards in (0, 1)
    )
    assert with_torch.verified_share == pytest.approx(formulas.prefilled_share(spec, tokens=1))
    assert with_vllm.verified_share > 1.2 * with_torch.verified_share


def test_a_verifier_keeps_a_prompts_keys_and_values_for_its_other_rows() -> None:
    """As many as it computes in the first row, where later rows use them at all."""
    shape = published("Qwen3-4B")
    spec = first_spec(shape, initial="/model", context=4096, group_size=8)
    tokens = spec.sampling.max_prompt_tokens
    cache = formulas.cache_bytes_per_token(shape, dtype=spec.model.dtype)
    assert formulas.kept_context_bytes(shape, spec) == tokens * cache > 0
    assert formulas.kept_context_bytes(msgspec.structs.replace(shape, experts=8), spec) == 0


@pytest.mark.parametrize(("lr", "ratio"), [(3e-7, 305.31), (1e-6, 125.0), (1e-5, 24.35)])
def test_deltas_are_as_small_as_they_were_measured(lr: float, ratio: float) -> None:
    assert formulas.delta_bytes(1e9, learning_rate=lr, dtype="bfloat16") == pytest.approx(1e9 / ratio, rel=0.05)


def test_a_delta_that_is_not_worth_its_time_is_the_policy() -> None:
    assert formulas.delta_bytes(1e9, learning_rate=1.0, dtype="bfloat16") == 1e9


def test_links_are_limited_by_whoever_has_the_least() -> None:
    """One relay for many workers is the bottleneck, and a slow downlink is, where relays are many."""
    links: dict[str, Any] = {"uplink": 1e8, "downlink": 1e7}
    slow = formulas.broadcast_seconds(1e9, relays=1, workers=100, **links)
    assert slow * formulas.TREE_SHARE == pytest.approx(1000)
    many = formulas.broadcast_seconds(1e9, relays=100, workers=100, **links)
    assert many * formulas.TREE_SHARE == pytest.approx(100)


@pytest.mark.parametrize("text", ["", "80GB", "0x80GB", "4x0GB", "4x80", "99999x80GB", "4x80GB4x80GB", "-1x80GB"])
def test_nonsense_is_no_gpu(text: str) -> None:
    with pytest.raises(BadConfiguration, match="4x80GB"):
        parse_cards(text)


@pytest.mark.parametrize("text", ["", "1", "0Gbit", "1GB", "-1Gbit", "1e9Gbit", "nanGbit"])
def test_nonsense_is_no_rate(text: str) -> None:
    with pytest.raises(BadConfiguration, match="200Mbit"):
        parse_rate(text)


def test_amounts_are_decimal() -> None:
    assert parse_cards("4x80GB") == Cards(4, 80_000_000_000)
    assert parse_rate("1Gbit") == 125_000_000


def _machines(cards: str, **changed: Any) -> Machines:
    settings: dict[str, Any] = {
        "cards": parse_cards(cards), "verifier_cards": None, "workers": 4, "worker_cards": parse_cards("1x24GB"),
        "relays": 2, "uplink": 1e8, "downlink": 1e8,
    }  # fmt: skip
    return Machines(**settings | changed)


def test_what_does_not_fit_says_how_much_is_missing_and_what_would_fit() -> None:
    """Following the advice makes it fit; a rank less does not."""
    shape = published("Qwen3-4B")
    spec = first_spec(shape, initial="/model", context=None, group_size=None)
    memory = roles.plan_trainer(shape, spec, Cards(1, 24 * 10**9))[1]
    assert memory.missing == memory.total - 24 * 10**9 > 0
    enough = int(memory.advice.split()[3])
    assert not roles.plan_trainer(shape, spec, Cards(enough, 24 * 10**9))[1].missing
    assert roles.plan_trainer(shape, spec, Cards(enough - 1, 24 * 10**9))[1].missing
    assert f"1 of {roles.gigabytes(memory.total)} GB each" in memory.advice


def test_a_group_takes_no_longer_than_its_lease() -> None:
    shape = published("Qwen3-4B")
    spec = first_spec(shape, initial="/model", context=None, group_size=16)
    found = make_plan(shape, spec, _machines("4x80GB"), is_given=False)
    assert found.spec.batch.lease_seconds >= 3 * found.work.slot_seconds > 60
    assert make_plan(shape, spec, _machines("4x80GB"), is_given=True).spec == spec, "a given run.toml stays as it is"


def read_once(path: Path) -> ModelShape:
    """A published model's forward pass on paper takes a second, and its shape is the same in every test."""
    return published(path.name) if path.parent == MODELS else read_shape(path)


def plan(*arguments: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordinator.planning.shape.read_shape", read_once)
        return CliRunner().invoke(main, ["plan", *arguments])


@pytest.mark.service  # `--check` inspects the folder in a process of its own
def test_the_proposed_run_toml_is_one_that_a_coordinator_begins_with(tmp_path: Path) -> None:
    folder, written = make_folder(tmp_path / "model"), tmp_path / "run.toml"
    done = plan("--model", str(folder), "--gpus", "2x24GB", "--write", str(written))
    assert done.exit_code == 0, done.output
    spec = parse_run_toml(written.read_text())
    assert (spec.model.initial, spec.model.dtype, spec.sampling.most_tokens) == (str(folder), "bfloat16", 512)
    create_key(tmp_path / "run.key")
    options = ["--run", str(written), "--key", str(tmp_path / "run.key"), "--data", str(tmp_path / "run")]
    checked = CliRunner().invoke(main, ["coordinator", "--check", "--uncalibrated", *options])
    assert checked.exit_code == 0, checked.output
    again = plan("--model", str(folder), "--gpus", "2x24GB", "--write", str(written))
    assert again.exit_code == 2
    assert "exists" in again.output


def test_the_text_is_no_wider_than_a_terminal() -> None:
    for name in ("Qwen3-4B", "Qwen3-32B", "GLM-4.5-Air"):
        done = plan("--model", str(MODELS / name), "--gpus", "8x80GB", "--worker-gpus", "4x80GB")
        assert max(map(len, done.output.splitlines())) <= 80
        assert "CANNOT RUN" not in done.output


def test_programs_read_the_same_as_people() -> None:
    done = plan("--model", str(MODELS / "Qwen3-32B"), "--gpus", "2x24GB", "--json")
    found = json.loads(done.output)
    assert (done.exit_code, found["fits"]) == (1, False)
    trainer = found["memory"][0]
    assert trainer["missing"] == trainer["total"] - 24 * 10**9
    assert trainer["total"] == sum(item["bytes"] for item in trainer["items"])


def test_a_given_run_toml_is_planned_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('name = "x"\n[[environments]]\nname = "arithmetic"\n[sampling]\ngroup_size = 3\n')
    options = ("--model", str(MODELS / "Qwen3-4B"), "--gpus", "4x80GB", "--run", str(run))
    assert json.loads(plan(*options, "--json").output)["spec"]["sampling"]["group_size"] == 3
    assert plan(*options, "--group-size", "4").exit_code == 2


REFUSED = {
    "another_family": ({"model_type": "gpt2"}, "supported are .*llama, ministral"),
    "no_sizes": ({"hidden_size": None}, "not the configuration of a language model"),
    "sizes_of_a_stranger": ({"hidden_size": 2**40}, "not the configuration of a language model"),
    "a_window_of_no_tokens": (
        {"sliding_window": 0, "use_sliding_window": True, "layer_types": None},
        "unsupported_model",
    ),
    "heads_that_do_not_divide": ({"num_attention_heads": 3, "num_key_value_heads": 2}, "makes no model|not the conf"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_be_planned_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    changes, said = REFUSED[case]
    path = write_config(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnfitModel, match=said):
        read_shape(path)


def test_a_folder_without_a_config_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    assert "cannot be read" in plan("--model", str(tmp_path), "--gpus", "1x24GB").output
    (tmp_path / "config.json").write_text("{" * 100)
    assert "not the configuration" in plan("--model", str(tmp_path), "--gpus", "1x24GB").output


def test_sequences_longer_than_the_positions_are_refused() -> None:
    done = plan("--model", str(MODELS / "Qwen3-4B"), "--gpus", "1x80GB", "--context", "50000")
    assert done.exit_code == 1
    assert "positions for 40960" in done.output


def test_groups_that_no_submission_can_hold_are_refused() -> None:
    long = ("--context", "131072", "--group-size", "1024")
    done = plan("--model", str(MODELS / "GLM-4.5-Air"), "--gpus", "8x80GB", *long)
    assert done.exit_code == 1
    assert "make --group-size or --context smaller" in done.output


def test_a_verifier_leaves_the_trainer_a_gpu() -> None:
    done = plan("--model", str(MODELS / "Qwen3-4B"), "--gpus", "2x80GB", "--verifier-gpus", "2")
    assert done.exit_code == 2
    assert "leaves the trainer none" in done.output


def test_more_gpus_share_the_state_and_nothing_else() -> None:
    """What is whole on every rank does not shrink with their number."""
    shape = published("Qwen3-4B")
    spec = first_spec(shape, initial="/model", context=None, group_size=None)
    eight, sixteen = (
        sum(item.bytes for item in roles.trainer_items(shape, spec, settings))
        for settings in (
            roles.TrainerOptions(ranks=ranks, row_tokens=4096, recompute=True, autocast=True) for ranks in (8, 16)
        )
    )
    assert eight - sixteen == pytest.approx(shape.parameters * 16 * (1 / 8 - 1 / 16), rel=1e-6)


def test_several_gpus_gather_a_layer_at_a_time_and_no_vocabulary() -> None:
    """A plan with whole embeddings, or 16-bit copies of all layers, on each GPU would have an operator buy too many."""
    shape = published("Qwen3-32B")
    spec = first_spec(shape, initial="/model", context=None, group_size=None)
    settings = roles.TrainerOptions(ranks=16, row_tokens=4096, recompute=False, autocast=True)
    *held, passing = roles.step_items(shape, spec, settings)
    assert sum(item.bytes for item in held) == pytest.approx(shape.parameters * 16 / 16, rel=1e-6)
    with_layers = formulas.gathered_layer_bytes(shape, spec.training, 16, autocast=True)
    assert with_layers == 10 * shape.largest_layer
    assert passing.bytes > with_layers


def test_old_policies_take_the_disk_of_deltas_and_the_next_one_is_whole() -> None:
    shape = published("Qwen3-4B")
    spec = first_spec(shape, initial="/model", context=None, group_size=None)
    policy = formulas.weight_bytes(shape, dtype=spec.model.dtype)
    verifier, relay = (
        item.bytes for item in roles.disk_items(shape, spec) if item.name.startswith(("verifier", "relay"))
    )
    assert 3 * policy < verifier < relay < 3.5 * policy
