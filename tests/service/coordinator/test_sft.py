"""`swarmproof sft` in one process: the loss of a plain loop, the folder that a run takes, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fine_tuning import CHAT, Watcher, chat_folder, conversations, job_in, run_job, write_rows
from model_folders import edit_json
from msgspec.structs import replace as changed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from coordinator.errors import BadConfiguration, UnfitModel
from coordinator.sft.rows import BadData
from coordinator.sft.run import SftResult, SftStopped
from coordinator.training import world
from coordinator.training.checkpoint import checkpoints
from coordinator.training.export import FolderNotEmpty, export_file
from coordinator.training.lora import merge
from node.cli import main
from node.policy.file import save_policy
from node.policy.folder import open_folder
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import EOS, make_tokenizer
from node.protocol.run import LoraSpec
from shardcast.errors import LocalFault


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat_folder(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", conversations())
    return tmp_path


SHORT: dict[str, Any] = {"epochs": 1, "batch": 24}
"""One step over all rows, for what needs no training but its end."""


@pytest.fixture(scope="module")
def done() -> list[SftResult]:
    """What `undisturbed` has made, whose process for the chat template is a fork in tests alone."""
    return []


@pytest.fixture
def undisturbed(done: list[SftResult], tmp_path_factory: pytest.TempPathFactory) -> SftResult:
    """What a fine-tuning of such a folder makes that nobody stops."""
    if not done:
        folder = tmp_path_factory.mktemp("undisturbed")
        chat_folder(folder / "model")
        write_rows(folder / "rows.jsonl", conversations())
        result = run_job(job_in(folder))
        assert result is not None
        done.append(result)
    return done[0]


def plain_losses(folder: Path, *, epochs: int, batch: int, peak: float) -> list[float]:
    """Each step's loss by a loop without packing, masks or chunks: one conversation at a time, and whole logits."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line)["messages"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.0)
    steps, step, losses = epochs * math.ceil(len(rows) / batch), 0, []
    for epoch in range(epochs):
        order = list(range(len(rows)))
        Random(f"0 {epoch}").shuffle(order)
        for start in range(0, len(rows), batch):
            total, count = torch.zeros(()), 0
            for messages in (rows[number] for number in order[start : start + batch]):
                ids = tokenizer.apply_chat_template(messages, return_dict=False, return_tensors="pt")
                labels, at = torch.full_like(ids, -100), 0
                for message in messages:
                    begin = at + len(f"{message['role']}:")
                    turn = tokenizer(message["content"])["input_ids"]
                    at = begin + len(turn) + 2  # the end mark, and the newline behind it
                    if message["role"] == "assistant":
                        labels[0, begin : at - 1] = ids[0, begin : at - 1]
                        assert labels[0, at - 2] == EOS
                assert at == ids.shape[1]
                logits = model(input_ids=ids).logits[0, :-1]
                total = total + torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
                count += int((labels != -100).sum())
            for group in optimizer.param_groups:
                group["lr"] = peak * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
            optimizer.zero_grad()
            loss = total / count
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            step += 1
    return losses


def test_every_loss_is_that_of_a_plain_loop(folder: Path) -> None:
    """Packing, masks and chunks are ways to compute it, and nothing else."""
    result = run_job(job_in(folder, held_out=0.0, epochs=2, batch=8, warmup_steps=0))
    expected = plain_losses(folder, epochs=2, batch=8, peak=1e-3)
    assert len(expected) == 6
    assert result is not None
    assert result.losses == pytest.approx(expected, abs=1e-5)
    assert result.losses[-1] < result.losses[0] - 0.1


def test_a_run_takes_the_folder_with_all_that_the_first_one_said(folder: Path) -> None:
    """A lost end mark would have policies that never end; a lost template, chats that nobody can begin."""
    assert run_job(job_in(folder, **SHORT)) is not None
    before, after = open_folder(folder / "model"), open_folder(folder / "tuned")
    assert (after.eos_ids, after.tokenizer.chat_template) == (before.eos_ids, CHAT)
    assert {tensor.dtype for tensor in after.tensors.values()} == {"BF16"}
    generation = json.loads((folder / "tuned" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["top_k"], generation["temperature"]) == ([1, 7], 20, 0.6)


def test_a_named_end_mark_becomes_the_models(folder: Path) -> None:
    """A base model does not end at its chat template's mark; once it has learnt to, whoever generates must know."""
    (folder / "model" / "chat_template.jinja").write_text(CHAT.replace("<eos>", "~"))
    with pytest.raises(BadConfiguration, match=r"line 1: message 2: .*--end-mark"):
        run_job(job_in(folder))
    with pytest.raises(BadConfiguration, match="'<no>' is no token"):
        run_job(job_in(folder, end_mark="<no>"))
    run_job(job_in(folder, end_mark="~", **SHORT))
    mark = AutoTokenizer.from_pretrained(folder / "tuned").convert_tokens_to_ids("~")
    assert mark in open_folder(folder / "tuned").eos_ids
    assert mark in json.loads((folder / "tuned" / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("at", [3, 4])
def test_a_stopped_one_goes_on_and_ends_alike(folder: Path, undisturbed: SftResult, at: int) -> None:
    job, steps = job_in(folder), list[int]()
    with pytest.raises(SftStopped, match=f"after step {at} of 15"):
        run_job(job, watcher=Watcher(steps.append), stop=lambda: at in steps)
    assert not job.to.exists()
    watcher = Watcher()
    assert run_job(job, watcher=watcher) == undisturbed
    assert (watcher.done, min(watcher.losses), sorted(watcher.held_out)) == (at, at + 1, [4, 8, 12, 15][at == 4 :])


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_taken(folder: Path, undisturbed: SftResult) -> None:
    job, steps = job_in(folder), list[int]()
    with pytest.raises(SftStopped):
        run_job(job, watcher=Watcher(steps.append), stop=lambda: 6 in steps)
    newest = checkpoints(job.state / "checkpoints")[-1] / "shard-00000.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    watcher = Watcher()
    assert run_job(job, watcher=watcher) == undisturbed
    assert watcher.done == 4


def test_another_fine_tuning_is_not_continued_with(folder: Path) -> None:
    """What is half of one and half of another would be neither, without a word about it."""
    job, steps = job_in(folder), list[int]()
    with pytest.raises(SftStopped):
        run_job(job, watcher=Watcher(steps.append), stop=lambda: 2 in steps)
    with pytest.raises(BadConfiguration, match="with another batch, learning_rate"):
        run_job(replace(job, recipe=changed(job.recipe, batch=6, learning_rate=1e-4)))
    edit_json(folder / "model" / "generation_config.json", {"top_k": 5})
    write_rows(folder / "rows.jsonl", conversations(25))
    with pytest.raises(BadConfiguration, match="with another model, data"):
        run_job(job)


def test_a_killed_preparation_is_done_again(folder: Path) -> None:
    data = folder / "state" / "data"
    data.mkdir(parents=True)
    (data / "tokens.bin").write_bytes(b"half of i")
    assert run_job(job_in(folder, **SHORT)) is not None


def test_nothing_is_done_where_it_could_not_be_written(folder: Path) -> None:
    job = job_in(folder)
    job.to.mkdir()
    (job.to / "config.json").write_text("{}")
    with pytest.raises(FolderNotEmpty):
        run_job(job)
    assert not job.state.exists()


def test_a_folder_of_the_users_own_stays_where_the_data_are_refused(folder: Path) -> None:
    job = job_in(folder)
    job.state.mkdir()
    (job.state / "notes.txt").write_text("mine")
    job.data.write_text("{}\n")
    with pytest.raises(BadData):
        run_job(job)
    assert (job.state / "notes.txt").exists()


def test_two_at_once_in_one_folder_are_refused(folder: Path) -> None:
    job, refusals = job_in(folder, **SHORT), list[str]()

    def again(_step: int) -> None:
        with pytest.raises(LocalFault) as refused:
            run_job(job)
        refusals.append(refused.value.code)

    run_job(job, watcher=Watcher(again))
    assert set(refusals) == {"in_use"}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_families_learn(tmp_path: Path, family: str) -> None:
    chat_folder(tmp_path / "model", family=family)
    write_rows(tmp_path / "rows.jsonl", conversations(10))
    result = run_job(job_in(tmp_path, epochs=5, optimizer="muon"))
    assert result is not None
    assert result.held_out_losses[-1] < result.held_out_losses[0]


def test_adapters_are_trained_and_the_merged_model_is_the_folder(folder: Path) -> None:
    """What is written must be the model that was trained, and nothing of it but the layers that were named."""
    job = job_in(folder, lora=LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "down_proj")), learning_rate=1e-2)
    result = run_job(job)
    assert result is not None
    assert result.held_out_losses[-1] < result.held_out_losses[0] - 0.1
    export = ["export", "policy", "latest", "--adapter", "--state", str(job.state), "--to", str(folder / "adapter")]
    done = CliRunner().invoke(main, export)
    assert done.exit_code == 0, done.output
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(job.model))
    adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
    (shard,) = checkpoints(job.state / "checkpoints")[-1].glob("*.safetensors")
    numbers = sum(each.numel() for each in adapters.values())
    assert 12 * numbers < shard.stat().st_size < 12 * numbers + 20_000, "weights and two moments of the adapters"
    before, after = (AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("model", "tuned"))
    for name, weight in before.items():
        wanted = weight
        if name.split(".")[-2] in ("q_proj", "down_proj"):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (adapters.pop(f"{layer}.lora_{factor}.weight") for factor in "AB")
            wanted = merge(weight, a, b, scale=2.0).bfloat16()
            assert not torch.equal(wanted, weight)
        assert torch.equal(after[name], wanted)
    assert adapters == {}


def test_stopped_adapters_go_on_and_end_alike_and_only_with_themselves(folder: Path) -> None:
    job, steps = job_in(folder, epochs=1, lora=LoraSpec(rank=2, alpha=4.0)), list[int]()
    undisturbed = run_job(replace(job, to=folder / "other", state=folder / "other-state"))
    with pytest.raises(SftStopped, match="after step 3 of 5"):
        run_job(job, watcher=Watcher(steps.append), stop=lambda: 3 in steps)
    for lora in (None, LoraSpec(rank=2, alpha=2.0)):
        with pytest.raises(BadConfiguration, match="with another lora"):
            run_job(replace(job, recipe=changed(job.recipe, lora=lora)))
    watcher = Watcher()
    assert run_job(job, watcher=watcher) == undisturbed
    assert watcher.done == 3


def test_a_model_without_the_named_layers_is_refused_before_its_data_are_read(folder: Path) -> None:
    save_policy(MAKERS["finch"](0), make_tokenizer(), folder / "finch.safetensors")
    export_file(folder / "finch.safetensors", folder / "finch")
    job = job_in(folder, lora=LoraSpec(rank=1, alpha=1.0))
    with pytest.raises(UnfitModel, match="--lora-targets: a finch model has no q_proj"):
        run_job(replace(job, model=folder / "finch"))
    assert not job.state.exists()


def invoke(folder: Path, *arguments: str, **changes: Path) -> Any:
    paths = {"model": folder / "model", "data": folder / "rows.jsonl", "to": folder / "tuned"} | changes
    named = [each for name, path in paths.items() for each in (f"--{name}", str(path))]
    return CliRunner().invoke(main, ["sft", *named, *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--held-out", "x"), "'x' is no percentage"),
        (("--held-out", "60%"), "0% to 50%"),
        (("--learning-rate", "0"), "--learning-rate"),
        (("--lora", "x"), "'x' is neither RANK nor RANK:ALPHA"),
        (("--lora", "0"), "--lora: Expected `int` >= 1"),
        (("--lora", "4:0"), "--lora: Expected `float` > 0"),
        (("--lora", "4", "--lora-targets", "q_proj,lm_head"), "--lora: Invalid enum value 'lm_head'"),
        (("--lora", "4", "--optimizer", "muon"), "--lora: training.lora needs the optimizer adamw"),
        (("--lora-targets", "q_proj"), "give both"),
        (("--max-tokens", "100000"), "the model has 512 positions"),
        (("--messages", "chats"), "line 1: has neither 'chats' nor both"),
        (("--tensorboard", "t", "--no-tensorboard"), "contradict"),
    ],
)
def test_a_wrong_option_is_refused_in_a_sentence(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    ended = invoke(folder, *arguments)
    assert ended.exit_code in (1, 2), ended.output
    assert said in ended.output
    assert "hint:" in ended.output
    assert not (folder / "tuned").exists()
    is_prepared = (folder / "tuned.sft" / "sft.json").exists()
    assert (folder / "tuned.sft").exists() == is_prepared, "else there is nothing that the next try would go on with"


def test_a_folder_that_is_no_model_is_refused(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    with pytest.raises(UnfitModel, match=r"--model: .*config\.json"):
        run_job(job_in(folder))


def test_the_command_trains_and_says_so(folder: Path) -> None:
    ended = invoke(folder, "--batch", "8", "--evaluate-every", "1", "--held-out", "10%")
    assert ended.exit_code == 0, ended.output
    assert "22 examples to train on, 2 held out" in ended.output
    assert "step 3/3" in ended.output
    assert f'model.initial = "{folder / "tuned"}"' in ended.output
    assert (folder / "tuned.sft" / "curve.jsonl").read_text().count("held_out_loss") == 4
    if find_spec("tensorboardX") is not None:
        assert list((folder / "tuned.sft" / "tensorboard").iterdir())


def test_layers_are_gathered_in_what_their_matrices_are_multiplied_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes would each keep a copy of every whole layer until the backward pass."""
    gathered_in, open_world = [], world.open_world

    def opened(**given: Any) -> Any:
        gathered_in.append(given.get("gathered_in"))
        return open_world(**given)

    monkeypatch.setattr(world, "open_world", opened)
    ended = invoke(folder, "--batch", "24", "--autocast", "bfloat16")
    assert ended.exit_code == 0, ended.output
    assert gathered_in == [torch.bfloat16]
