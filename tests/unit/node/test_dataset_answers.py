"""A dataset whose answers the operator keeps: what travels has none, and nobody takes one file for the other.

What would break for whom: an operator who pays for answers gives them to every stranger that joins; or a verifier
grades the completions of one question by the answer to another.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from dataset_files import SALT, environment_of, made, sums
from msgspec import UNSET, UnsetType

from node.datasets.convert import Converted
from node.datasets.folder import match_answers
from node.datasets.format import Dataset
from node.environments import check_rewards, load_environment
from node.errors import ConfigError, DatasetFault
from node.protocol.grading import UnitTestsGrader
from node.protocol.run import DatasetSpec, EnvironmentSpec, FileSpec, ProblemsSpec, RunSpec, parse_run_toml
from node.verification.plan import Rules
from shardcast.content import file_digest
from shardcast.errors import Malformed

SECRETS = [{"question": f"Q:{at}", "answer": f"secret-{at}", "note": f"worked-{at}"} for at in range(20)]


def apart(folder: Path, rows: list[dict[str, object]] | None = None, **changes: object) -> Converted:
    return made(folder, rows, **({"salt": SALT} | changes))


def files(dataset: Converted) -> dict[str, Path]:
    """What the operator has."""
    assert dataset.answers is not None
    return {dataset.spec.digest: dataset.path, dataset.spec.answers.digest: dataset.answers}


def test_what_travels_has_every_question_and_neither_answers_nor_metadata(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", SECRETS, held_out=0.3)
    dataset = apart(tmp_path / "apart", SECRETS, held_out=0.3)
    prompts, kept = dataset.path.read_bytes(), dataset.answers.read_bytes()
    assert b"secret" not in prompts
    assert b"secret" in kept
    shown, known = Dataset.open(dataset.path, dataset.spec), Dataset.open(dataset.answers, dataset.spec.answers)
    rows = [Dataset.open(whole.path).row(at) for at in range(20)]
    assert [known.row(at) for at in range(20)] == rows
    assert [shown.row(at) for at in range(20)] == [
        msgspec.structs.replace(row, answer=UNSET, metadata={}) for row in rows
    ]
    assert (shown.header, known.header.salt) == (whole.header, SALT)


def test_metadata_may_hold_a_solution_and_stays_with_the_answers(tmp_path: Path) -> None:
    columns = msgspec.structs.replace(made(tmp_path / "any", SECRETS).header.columns, metadata=("note",))
    dataset = apart(tmp_path / "apart", SECRETS, columns=columns)
    assert b"worked" in dataset.answers.read_bytes()
    assert b"worked" not in dataset.path.read_bytes()


def test_test_cases_are_answers(tmp_path: Path) -> None:
    """A worker that has the cases of `unit-tests/1` could write a table of them."""
    cases = {"function": "f", "cases": [{"arguments": [4711], "output": 4712}]}
    rows = [{"question": "Write f(x): add 1.", "answer": cases}]
    dataset = apart(tmp_path / "apart", rows, grader=UnitTestsGrader())
    assert b"4711" in dataset.answers.read_bytes()
    assert b"4711" not in dataset.path.read_bytes()


def test_the_digest_of_few_answers_tells_nothing_and_that_of_the_prompts_is_always_the_same(tmp_path: Path) -> None:
    """Without the salt, whoever knows the prompts could try all answers against the digest in the rules."""
    one, other = (apart(tmp_path / salt.hex()[:4], sums(1), salt=salt) for salt in (SALT, bytes(32)))
    assert one.spec.digest == other.spec.digest
    assert one.spec.answers.digest != other.spec.answers.digest


def test_the_answers_are_readable_for_their_owner_alone(tmp_path: Path) -> None:
    dataset = apart(tmp_path / "sums.dataset")
    assert dataset.answers == tmp_path / "sums.answers.dataset"
    assert dataset.answers.stat().st_mode & 0o777 == 0o600
    assert dataset.path.stat().st_mode & 0o777 == 0o644


def test_without_answers_there_are_the_same_prompts_and_no_rewards(tmp_path: Path) -> None:
    dataset = apart(tmp_path, held_out=0.2)
    spec = environment_of(dataset)
    worker, verifier = (load_environment(spec, each) for each in ({dataset.spec.digest: dataset.path}, files(dataset)))
    problems = [(worker.problem(at), verifier.problem(at)) for at in range(30)]
    assert all((ours.prompt, ours.messages) == (theirs.prompt, theirs.messages) for ours, theirs in problems)
    assert {str(ours.data) for ours, _ in problems} == {"{}"}
    with pytest.raises(DatasetFault) as missing:
        worker.reward(problems[0][0], "</think>10")
    assert missing.value.code == "answers_missing"
    assert verifier.reward(problems[0][1], f"</think>{problems[0][1].data['answer']}") == 1.0


def test_a_verifier_does_not_begin_without_answers_and_an_auditor_does(tmp_path: Path) -> None:
    """A verifier that judged all the same would log groups that are worth nothing."""
    dataset = apart(tmp_path)
    spec = RunSpec(name="t", environments=(environment_of(dataset),))
    bare = [load_environment(spec.environments[0], {dataset.spec.digest: dataset.path})]
    with pytest.raises(DatasetFault) as missing:
        Rules("0" * 64, spec, bare)
    assert missing.value.code == "answers_missing"
    Rules("0" * 64, spec, bare, need_answers=False)
    check_rewards([load_environment(spec.environments[0], files(dataset))])


def test_answers_to_other_prompts_are_refused(tmp_path: Path) -> None:
    """An operator who signed for two files that do not belong together is told at the start, and by every auditor."""
    dataset, other = apart(tmp_path / "one"), apart(tmp_path / "other", sums(31))
    mixed = msgspec.structs.replace(dataset.spec, answers=other.spec.answers)
    spec = msgspec.structs.replace(environment_of(dataset), dataset=mixed)
    with pytest.raises(DatasetFault) as differ:
        load_environment(spec, {**files(other), dataset.spec.digest: dataset.path})
    assert differ.value.code == "answers_differ"


def file_spec(path: Path) -> FileSpec:
    return FileSpec(digest=file_digest(path), bytes=path.stat().st_size)


def refusal(dataset: DatasetSpec, *files: Path) -> str:
    """The code of what is wrong with `files` in these places of the rules."""
    answers = UNSET if isinstance(dataset.answers, UnsetType) else "operator"
    spec = EnvironmentSpec(name="dataset:sums", dataset=dataset, problems=ProblemsSpec(count=20), answers=answers)
    with pytest.raises(DatasetFault) as wrong:
        load_environment(spec, {file_digest(path): path for path in files})
    return wrong.value.code


def test_neither_file_passes_for_the_other(tmp_path: Path) -> None:
    """An operator who puts the file with the answers where the prompts belong would send them to everybody."""
    dataset = apart(tmp_path)
    prompts, kept = file_spec(dataset.path), file_spec(dataset.answers)
    assert refusal(DatasetSpec(prompts.digest, prompts.bytes), dataset.path) == "dataset_malformed"
    leaking = DatasetSpec(kept.digest, kept.bytes)
    assert refusal(leaking, dataset.answers) == "dataset_malformed"
    assert refusal(msgspec.structs.replace(leaking, answers=prompts), dataset.answers) == "dataset_malformed"


def test_a_file_with_answers_for_everybody_is_none_that_the_operator_keeps(tmp_path: Path) -> None:
    """Without a salt its digest, which is in the rules, tells whoever knows the prompts when an answer is right."""
    dataset, whole = apart(tmp_path / "apart"), made(tmp_path / "whole")
    unsalted = msgspec.structs.replace(dataset.spec, answers=file_spec(whole.path))
    assert refusal(unsalted, whole.path) == "dataset_malformed"
    leaking = msgspec.structs.replace(whole.spec, answers=dataset.spec.answers)
    assert refusal(leaking, whole.path) == "dataset_malformed"


@pytest.mark.parametrize("answers", ["", 'answers = "operator"\n'])
def test_the_rules_say_who_has_the_answers_and_name_their_file_or_neither(answers: str) -> None:
    digest = "0" * 64
    file = f'digest = "{digest}", bytes = 9'
    kept = "" if answers else f", answers = {{ {file} }}"
    text = f'[[environments]]\nname = "dataset:a"\ndataset = {{ {file}{kept} }}\n{answers}problems = {{ count = 1 }}\n'
    with pytest.raises(Malformed, match=r"environments\.answers"):
        parse_run_toml('name = "t"\n' + text)


def test_an_auditor_who_is_given_another_file_is_told(tmp_path: Path) -> None:
    """Else its rewards would count as nobody's to check, and it would think that it had checked them."""
    dataset = apart(tmp_path / "apart")
    spec = RunSpec(name="t", environments=(environment_of(dataset),))
    assert match_answers([dataset.answers], spec) == {dataset.spec.answers.digest: dataset.answers}
    with pytest.raises(ConfigError):
        match_answers([dataset.answers, dataset.path], spec)
