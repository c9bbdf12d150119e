"""A teacher says of every token what rewards say of none: its gradient, whom it may teach, and what it costs.

What would break for whom: an operator whose policy follows another teacher than the folder's, or flees it, would see
it after days, in rewards that fall.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from model_folders import edit_json, make_folder
from trainers import groups_of, spec_with
from transformers import LlamaConfig, LlamaForCausalLM

from coordinator.errors import UnfitModel
from coordinator.run import first_policy
from coordinator.training.checkpoint import checkpoints
from coordinator.training.distributed_learner import Team
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import Execution, train_step
from coordinator.training.optimizers import make_optimizer
from coordinator.training.teacher import TEACHER, write_teacher
from node.cli import main
from node.doctor import model as doctor_model
from node.policy.file import save_policy
from node.policy.folder import validate_folder
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer
from node.protocol.run import LoraSpec, RunSpec, TeacherSpec

PROMPT = (3, 4, 5)
COMPLETIONS = ((13, 14, 1), (15, 1), (16, 17, 18, 19, 1), (20,))


def policy_of(seed: int) -> LlamaForCausalLM:
    """A policy of 32 tokens that prefers some of them."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, initializer_range=0.3, **sizes))


def taught(coefficient: float = 0.3, *, folder: Path = Path("teacher"), **recipe: Any) -> RunSpec:
    """The rules with a teacher, whose completions have at most 48 tokens behind 128."""
    teacher = TeacherSpec(folder=str(folder), coefficient=coefficient)
    return spec_with(**{"teacher": teacher, "warmup_steps": 0, "minibatches": 1, **recipe})


def logprobs(model: LlamaForCausalLM, completion: tuple[int, ...]) -> torch.Tensor:
    """One completion's log-probabilities, from whole logits."""
    logits = model(input_ids=torch.tensor([PROMPT + completion])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits, -1)[range(len(completion)), list(completion)]


def test_a_step_has_the_gradient_and_the_loss_of_a_plain_loop() -> None:
    """Packed rows, chunks of logits and bounds are ways to compute it; some ratios here are beyond `clip_delta`."""
    model, teacher = policy_of(0), policy_of(1).requires_grad_(False)
    plain, spec = copy.deepcopy(model), taught(0.3, gradient_clip=1e9, normalize_advantage=False, clip_delta=1.5)
    samples = [Sample(PROMPT, each, tuple(-3.2 - 0.1 * at for at in range(len(each)))) for each in COMPLETIONS]
    losses = []
    for sample, advantage in zip(samples, (0.625, -0.375, -0.375, 0.125), strict=True):
        now, theirs = (logprobs(each, sample.completion_ids) for each in (plain, teacher))
        ratio = (now - torch.tensor(sample.logprobs)).exp()
        objective = torch.minimum(ratio.clamp(max=1.5) * advantage, ratio.clamp(0.8, 1.2) * advantage)
        losses += [*(-objective + 0.3 * ratio.clamp(max=1.5) * (now.detach() - theirs))]
    wanted = sum(losses) / len(losses)
    wanted.backward()
    stats = train_step(
        model,
        make_optimizer(model, spec.training),
        [Group(0, (1.0, 0.0, 0.0, 0.5), tuple(samples))],
        spec=spec,
        step=0,
        teacher=teacher,
        execution=Execution(row_tokens=12),
    )
    assert stats["loss"] == pytest.approx(wanted.item(), abs=1e-5)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_a_student_nears_its_teacher_on_its_own_words_where_all_rewards_are_equal() -> None:
    """Nothing else pulls here, and groups without signal are dropped where nobody teaches."""
    student, teacher = policy_of(0), policy_of(1).requires_grad_(False)
    spec, draw = taught(1.0, learning_rate=1e-2, clip_delta=1e9), torch.Generator().manual_seed(0)
    optimizer = make_optimizer(student, spec.training)

    @torch.no_grad()
    def distributions() -> tuple[torch.Tensor, torch.Tensor]:
        mine, theirs = (each(input_ids=torch.tensor([PROMPT])).logits[0, -1] for each in (student, teacher))
        return mine.log_softmax(-1), theirs.log_softmax(-1)

    def divergence() -> float:
        mine, theirs = distributions()
        return float((mine.exp() * (mine - theirs)).sum())

    before, stats = divergence(), dict[str, float]()
    for step in range(25):
        mine, _ = distributions()
        drawn = torch.multinomial(mine.exp(), 64, replacement=True, generator=draw).tolist()
        samples = tuple(Sample(PROMPT, (token,), (float(mine[token]),)) for token in drawn)
        group = Group(step, (1.0,) * 64, samples)
        stats = train_step(student, optimizer, [group], spec=spec, step=step, teacher=teacher)
    assert stats["groups_kept"] == 1
    assert before > 0.5
    assert divergence() < before / 4
    assert stats["teacher_kl"] == pytest.approx(divergence(), abs=0.3)


# -- In a run.


def learner_of(state: Path, spec: RunSpec) -> Team:
    state.mkdir()
    save_policy(MAKERS["tiny"](1), make_tokenizer(), state / "policy-0.safetensors")
    write_teacher(spec, state)
    team = Team(state, Execution())
    team.restore(spec)
    return team


def test_a_run_is_taught_by_the_folder_which_is_read_once_and_in_no_checkpoint(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "big", num_hidden_layers=3)
    spec = taught(folder=folder, lora=LoraSpec(rank=1, alpha=1.0))
    team = learner_of(tmp_path / "state", spec)
    teacher = team.learner.teacher
    assert teacher is not None
    assert len(teacher.model.layers) == 3
    assert not any(each.requires_grad for each in teacher.parameters())
    team.save(team.train(groups_of(0)))
    team.end()
    assert team.learner.stats["teacher_kl"] != 0
    (path,) = checkpoints(tmp_path / "state" / "checkpoints")
    trained = sum(each.numel() for each in team.learner.model.parameters() if each.requires_grad)
    assert sum(each.stat().st_size for each in path.glob("*.safetensors")) < 12 * trained + 20_000
    before = (tmp_path / "state" / TEACHER).read_bytes()
    write_teacher(taught(folder=tmp_path / "gone"), tmp_path / "state")
    assert (tmp_path / "state" / TEACHER).read_bytes() == before


def swap_two_ids(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    first, second, *_ = sorted(vocabulary)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


UNFIT = {
    "another_vocabulary": ({}, "another vocabulary"),
    "a_smaller_embedding": ({"vocab_size": 120}, "fewer rows"),
    "fewer_positions": ({"max_position_embeddings": 64}, "64 .*176 tokens"),
}


def unfit_folder(folder: Path, case: str) -> Path:
    make_folder(folder, **UNFIT[case][0])
    if case == "another_vocabulary":
        edit_json(folder / "tokenizer.json", swap_two_ids)
    return folder


@pytest.mark.parametrize("case", UNFIT)
def test_a_teacher_that_cannot_teach_this_policy_is_refused_by_the_trainer(tmp_path: Path, case: str) -> None:
    """An id that means another word to the teacher would teach the policy to talk nonsense."""
    spec = taught(folder=unfit_folder(tmp_path / "big", case))
    with pytest.raises(UnfitModel, match=f"training.teacher.folder: .*{UNFIT[case][1]}"):
        learner_of(tmp_path / "state", spec)


def test_a_recurrent_teacher_of_a_policy_with_attention_is_refused(tmp_path: Path) -> None:
    """Rows are packed for one or the other."""
    (tmp_path / "state").mkdir()
    save_policy(MAKERS["finch"](1), make_tokenizer(), tmp_path / "state" / TEACHER)
    save_policy(MAKERS["tiny"](1), make_tokenizer(), tmp_path / "state" / "policy-0.safetensors")
    with pytest.raises(UnfitModel, match="one is recurrent"):
        Team(tmp_path / "state", Execution()).restore(taught())


def test_a_folder_that_is_no_model_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(UnfitModel, match=r"training\.teacher\.folder: .*config\.json"):
        write_teacher(taught(folder=tmp_path), tmp_path)


# -- Before a run.


@pytest.fixture
def _inspected_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is inspected in this process: starting another one takes seconds."""
    monkeypatch.setattr(doctor_model, "inspect_folder", validate_folder)


@pytest.mark.usefixtures("_inspected_here")
@pytest.mark.parametrize("case", [None, *UNFIT])
def test_a_run_begins_with_no_teacher_that_its_trainer_would_refuse(tmp_path: Path, case: str | None) -> None:
    """Rules are fixed with the log's first entry: who learns of it from the trainer begins again with a new key."""
    policy = make_folder(tmp_path / "policy")
    fit = {"num_hidden_layers": 3}
    folder = unfit_folder(tmp_path / "big", case) if case else make_folder(tmp_path / "big", **fit)
    spec = taught(folder=folder)
    spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, initial=str(policy)))
    if case is None:
        first_policy.startable(spec, model_elsewhere=False, uncalibrated=True)
        return
    with pytest.raises(UnfitModel, match=UNFIT[case][1]):
        first_policy.startable(spec, model_elsewhere=False, uncalibrated=True)


def test_what_a_teacher_takes_is_in_the_warning_and_in_the_plan(tmp_path: Path) -> None:
    """Else the operator's trainer ends in its first step, for want of memory that nobody had counted."""
    names = [make_folder(tmp_path / f"{layers}", num_hidden_layers=layers) for layers in (2, 3)]
    policy, teacher = map(validate_folder, names)
    alone, together = (doctor_model.check_fit(policy, taught(), teacher=each)[-1] for each in (None, teacher))
    assert f"4 bytes for each of its teacher's {teacher.parameters:,}" in together.sentence
    assert "teacher" not in alone.sentence

    text, run, found = 'name = "x"\n[[environments]]\nname = "arithmetic"\n', tmp_path / "run.toml", []
    for more in ("", f'[training.teacher]\nfolder = "{names[1]}"\ncoefficient = 0.1\n'):
        run.write_text(text + more)
        options = ["--model", str(names[0]), "--gpus", "2x24GB", "--run", str(run)]
        done = CliRunner().invoke(main, ["plan", *options, "--json"])
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.output))
    without, beside = ({item["name"]: item["bytes"] for item in each["memory"][0]["items"]} for each in found)
    ranks = found[1]["settings"]["ranks"]
    assert beside["teacher, float32"] == math.ceil(4 * teacher.parameters / ranks)
    assert sum(beside.values()) >= sum(without.values()) + beside["teacher, float32"]
    disks = [{item["name"]: item["bytes"] for item in each["disk"]} for each in found]
    assert disks[1].keys() - disks[0].keys() == {"trainer: teacher"}
    assert disks[1]["trainer: teacher"] == 2 * teacher.parameters
    operations = [each["work"]["trainer_operations"] for each in found]
    assert operations[1] > 1.3 * operations[0], "a forward pass of a larger model, beside three of the policy's size"
    assert max(map(len, CliRunner().invoke(main, ["plan", *options]).output.splitlines())) <= 80
