"""`swarmproof dataset`: from a file to the lines of run.toml, and to rewards on rows that were held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from dataset_files import environment_of, made, sums

from coordinator.commands.dataset import dataset
from coordinator.errors import BadConfiguration
from coordinator.run.definition import read_run_file
from coordinator.training.evaluation import EvaluationSettings, evaluate_policy, judge_tasks
from coordinator.training.filtering import FilterSettings, filter_problems, filtered_spec
from node.environments.base import EnvironmentFault
from node.errors import DatasetFault
from node.protocol.run import RunSpec, SamplingSpec

FIRST = ["--prompt", "question", "--answer", "answer"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "My sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*sums(40), sums(1)[0]]))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(dataset, [str(each) for each in arguments])


def test_a_file_becomes_an_environment_of_a_run_that_starts(tmp_path: Path, file: Path) -> None:
    toml = tmp_path / "run.toml"
    done = run("add", file, *FIRST, "--held-out", "10%", "--to", tmp_path / "data", "--write", toml)
    assert done.exit_code == 0, done.output
    assert "left out, duplicate: My sums.jsonl:41" in done.output
    _, spec = read_run_file(toml, datasets=tmp_path / "data" / "datasets")
    assert [one.name for one in spec.environments] == ["dataset:my-sums"]
    with pytest.raises(DatasetFault) as missing:
        read_run_file(toml, datasets=tmp_path)
    assert missing.value.code == "dataset_missing"


def test_answers_that_the_operator_keeps_are_a_file_without_which_no_run_starts(tmp_path: Path, file: Path) -> None:
    toml, folder = tmp_path / "run.toml", tmp_path / "data" / "datasets"
    done = run("add", file, *FIRST, "--answers", "operator", "--to", tmp_path / "data", "--write", toml)
    assert done.exit_code == 0, done.output
    _, spec = read_run_file(toml, datasets=folder)
    assert (spec.environments[0].answers, len(spec.answers)) == ("operator", 1)
    assert {path.name for path in folder.iterdir()} == {f"{one.digest}.dataset" for one in spec.dataset_files}
    (folder / f"{spec.answers[0].digest}.dataset").unlink()
    with pytest.raises(DatasetFault) as missing:
        read_run_file(toml, datasets=folder)
    assert missing.value.code == "answers_missing"


def test_it_is_added_to_a_run_toml_once_and_comments_stay(tmp_path: Path, file: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('name = "t"  # ours\n[[environments]]\nname = "arithmetic"\n\n[sampling]\ngroup_size = 4\n')
    done = run("add", file, *FIRST, "--name", "sums", "--to", tmp_path / "a.dataset", "--write", toml)
    assert done.exit_code == 0, done.output
    text, spec = read_run_file(toml)
    assert "# ours" in text
    assert [one.name for one in spec.environments] == ["arithmetic", "dataset:sums"]
    again = run("add", file, *FIRST, "--name", "sums", "--to", tmp_path / "b.dataset", "--write", toml)
    assert isinstance(again.exception, BadConfiguration)
    assert not (tmp_path / "b.dataset").exists()


def test_a_run_toml_that_has_no_environment_yet_gets_its_first(tmp_path: Path, file: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('name = "t"\n[model]\ninitial = "random-tiny"\n')
    assert run("add", file, *FIRST, "--to", tmp_path / "a.dataset", "--write", toml).exit_code == 0
    assert read_run_file(toml)[1].model.initial == "random-tiny"
    toml.write_text('name = "t"\nsteps = 3\n')
    wrong = run("add", file, *FIRST, "--to", tmp_path / "b.dataset", "--write", toml)
    assert isinstance(wrong.exception, BadConfiguration)
    assert not (tmp_path / "b.dataset").exists()


def test_without_a_run_toml_the_lines_are_printed(tmp_path: Path, file: Path) -> None:
    done = run("add", file, *FIRST, "--name", "sums", "--to", tmp_path / "a.dataset")
    lines = done.stdout.partition("In run.toml:\n\n")[2]
    (tmp_path / "run.toml").write_text('name = "t"\n' + lines)
    assert read_run_file(tmp_path / "run.toml")[1].datasets[0].bytes == (tmp_path / "a.dataset").stat().st_size


@pytest.mark.parametrize(
    "wrong",
    [
        ["--answer", "answer"],
        [*FIRST, "--messages", "m"],
        [*FIRST, "--held-out", "60%"],
        [*FIRST, "--held-out", "some"],
        [*FIRST, "--grader", "eval"],
        [*FIRST, "--grader-option", "tolerance"],
        [*FIRST, "--grader-option", "tolerance=1"],
        [*FIRST, "--name", "A B"],
    ],
)
def test_a_wrong_option_is_a_usage_error_and_makes_nothing(tmp_path: Path, file: Path, wrong: list[str]) -> None:
    done = run("add", file, *wrong, "--to", tmp_path / "data")
    assert done.exit_code == 2, done.output
    assert not (tmp_path / "data").exists()


def test_show_verifies_the_file_and_no_row_steers_the_terminal(tmp_path: Path) -> None:
    found = made(tmp_path / "a.dataset", [{"question": "\x1b[2J\u202e", "answer": "\x07"}], system="\x1b]0;t\x07")
    done = run("show", found.path)
    assert found.spec.digest in done.output
    assert not {"\x1b", "\x07", "\u202e"} & set(done.output)
    found.path.write_bytes(b"SWPDATA1")
    assert isinstance(run("show", found.path).exception, DatasetFault)


def test_what_is_printed_as_json_is_what_a_program_needs(tmp_path: Path, file: Path) -> None:
    said = json.loads(run("add", file, *FIRST, "--to", tmp_path / "a.dataset", "--json").stdout)
    assert said["environment"] == "dataset:my-sums"
    assert said["skipped"] == {"duplicate": {"count": 1, "first": ["My sums.jsonl:41"], "detail": ""}}
    shown = json.loads(run("show", tmp_path / "a.dataset", "--json", "--rows", "1").stdout)
    assert (shown["digest"], len(shown["rows"])) == (said["dataset"]["digest"], 1)


# -- evaluation and filtering


def test_evaluation_draws_from_the_held_out_rows_alone_and_filtering_from_the_others(
    tmp_path: Path, tiny_policy_path: Path
) -> None:
    """A curve over rows that were trained on would show what was learned by heart."""
    found = made(tmp_path, sums(12), held_out=0.4)
    files = {found.spec.digest: found.path}
    spec = RunSpec(name="t", environments=(environment_of(found),), sampling=SamplingSpec(max_new_tokens=2))
    first, again = (
        judge_tasks(tiny_policy_path, spec=spec, settings=EvaluationSettings(problems=2, seed=seed), datasets=files)
        for seed in (0, 0)
    )
    held = [sources.prompt for sources in first[0]._problems]
    source = first[0].environment
    assert held == [each.prompt for each in again[0]._problems]
    assert set(held) <= {source.problem(index).prompt for index in range(found.header.leased, 12)}
    every = evaluate_policy(tiny_policy_path, spec=spec, settings=EvaluationSettings(problems=64), datasets=files)
    assert every.environments[0].problems == found.header.held_out
    settings = FilterSettings(count=100, samples=1, lowest=0, highest=1)
    kept = filter_problems(tiny_policy_path, spec=spec, settings=settings, datasets=files)
    assert (kept[0].count, filtered_spec(spec, kept).environments[0].dataset) == (found.header.leased, found.spec)


def test_an_evaluation_without_held_out_rows_says_so(tmp_path: Path, tiny_policy_path: Path) -> None:
    found = made(tmp_path)
    spec = RunSpec(name="t", environments=(environment_of(found),))
    with pytest.raises(EnvironmentFault) as error:
        evaluate_policy(
            tiny_policy_path,
            spec=spec,
            settings=EvaluationSettings(problems=1),
            datasets={found.spec.digest: found.path},
        )
    assert error.value.code == "no_held_out_rows"
