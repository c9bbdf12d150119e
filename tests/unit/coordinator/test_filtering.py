"""Offline filtering: which problems a run is left with, and that its run.toml says exactly that."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner, Result

from coordinator.commands.problems import filtered_text
from coordinator.errors import BadConfiguration
from coordinator.training import evaluation, filtering
from coordinator.training.evaluation import EvaluationSettings, judge_tasks
from coordinator.training.filtering import (
    Filtered,
    FilterSettings,
    _filtered,
    bitmap_of,
    filter_problems,
    filtered_spec,
    measured_digest,
)
from coordinator.training.measured import (
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    CompletionOutcome,
    MeasuredBefore,
    MeasuredFile,
    NothingMeasured,
)
from node.cli import main
from node.environments import load_environment
from node.policy.file import save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.run import EnvironmentSpec, ProblemsSpec, RunSpec, parse_run_toml
from node.protocol.slots import kept_problems
from shardcast.errors import LocalFault

RUN_TOML = """
name = "t"  # a run
[sampling]
max_new_tokens = 8

[[environments]]
name = "arithmetic"  # sums
weight = 3
[environments.length]
targets = [2, 6]
penalty = 0.02
form = "short"

[[environments]]
name = "reverse"

[batch]
groups_per_step = 4
"""
SPEC = parse_run_toml(RUN_TOML)
SETTINGS = FilterSettings(count=10, samples=2, lowest=0.0, highest=0.5)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "policy.safetensors"
    save_policy(make_model(0), make_tokenizer(), path)
    return path


def test_problems_are_kept_by_their_rate_with_both_bounds() -> None:
    """0.0 and 1.0 have groups without signal; what could not be judged here is not kept as if it had a rate."""
    rates = [0.0, 0.125, 0.5, None, 0.875, 1.0, 0.9, 0.25, 0.1, 0.0]
    found = _filtered(SPEC.environments[1], rates, FilterSettings(lowest=0.1, highest=0.875))
    assert found == Filtered(
        name="reverse",
        count=10,
        kept=5,
        below=2,
        above=2,
        unjudged=1,
        rate=pytest.approx(3.75 / 9),
        bitmap=bytes([0b10010110, 0b00000001]),
    )
    problems = ProblemsSpec(count=10, kept=found.bitmap)
    assert list(kept_problems(problems)) == [1, 2, 4, 7, 8]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 65_536])
def test_a_bitmap_of_any_length_is_one_that_a_run_takes(count: int) -> None:
    kept = [at % 3 == 0 for at in range(count)]
    problems = ProblemsSpec(count=count, kept=bitmap_of(kept))
    assert list(kept_problems(problems)) == list(range(0, count, 3))


def test_the_first_problems_are_measured_and_not_held_out_ones(policy: Path) -> None:
    """What is kept is said by index: rates of other problems would keep the wrong ones."""
    drawn = judge_tasks(policy, spec=SPEC, settings=EvaluationSettings(problems=3), indexes=range(3))
    asked = [tasks._problems for tasks in drawn]
    again = judge_tasks(policy, spec=SPEC, settings=EvaluationSettings(problems=3))
    assert [len(problems) for problems in asked] == [3, 3]
    assert asked != [tasks._problems for tasks in again]
    sources = [tasks.environment for tasks in drawn]
    assert asked == [[source.problem(index) for index in range(3)] for source in sources]


def test_the_same_seed_keeps_the_same_problems(policy: Path) -> None:
    found = filter_problems(policy, spec=SPEC, settings=SETTINGS)
    assert found == filter_problems(policy, spec=SPEC, settings=SETTINGS)
    assert [one.name for one in found] == ["arithmetic", "reverse"]
    assert [one.kept + one.below + one.above + one.unjudged for one in found] == [10, 10]


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="lowest <= highest"):
        FilterSettings(lowest=0.6, highest=0.5)
    with pytest.raises(ValueError, match=r"problems \* samples"):
        FilterSettings(count=65_536, samples=1024)


def filtered(*bitmaps: bytes) -> list[Filtered]:
    about = {"count": 10, "kept": 1, "below": 0, "above": 0, "unjudged": 0, "rate": 0.5}
    return [
        Filtered(name=environment.name, bitmap=bitmap, **about)
        for environment, bitmap in zip(SPEC.environments, bitmaps, strict=True)
    ]


@pytest.mark.parametrize(
    "text",
    [
        RUN_TOML,
        RUN_TOML + "[training]\nsteps = 3\n",
        RUN_TOML.replace("[batch]", "[environments.problems]\ncount = 3\n\n[batch]"),
    ],
    ids=["plain", "more tables", "filtered before"],
)
def test_the_written_file_is_the_run_with_its_comments(text: str) -> None:
    wanted = filtered_spec(parse_run_toml(text), filtered(b"\x29\x02", b"\x01\x00"))
    written = filtered_text(text, wanted)
    assert parse_run_toml(written) == wanted
    assert "# a run" in written
    assert "# sums" in written
    assert [environment.problems for environment in wanted.environments] == [
        ProblemsSpec(count=10, kept=b"\x29\x02"),
        ProblemsSpec(count=10, kept=b"\x01\x00"),
    ]


def test_a_run_without_a_problem_left_is_none() -> None:
    with pytest.raises(ValueError, match="keep a problem"):
        filtered_spec(SPEC, filtered(b"\x01\x00", b"\x00\x00"))
    other = filtered_spec(SPEC, filtered(b"\x01\x00", b"\x01\x00"))
    with pytest.raises(BadConfiguration, match="cannot be written"):
        filtered_text(RUN_TOML + '[[environments]]\nname = "code"\n', other)


def invoke(folder: Path, *arguments: str) -> Result:
    (folder / "run.toml").write_text(RUN_TOML)
    return CliRunner().invoke(main, ["problems", "--run", str(folder / "run.toml"), *arguments])


def test_the_command_writes_a_run_toml_whose_slots_are_of_kept_problems(tmp_path: Path, policy: Path) -> None:
    """End to end: measured, written, and read as the coordinator reads it."""
    given = ("--policy", str(policy), "--count", "12", "--samples", "2", "--min", "0", "--json")
    result = invoke(tmp_path, *given)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    spec = parse_run_toml((tmp_path / "run.filtered.toml").read_text())
    assert said["out"] == str(tmp_path / "run.filtered.toml")
    for environment, one in zip(spec.environments, said["environments"], strict=True):
        assert isinstance(environment.problems, ProblemsSpec)
        assert len(kept_problems(environment.problems)) == one["kept"] > 0
        assert one["count"] == environment.problems.count == 12
    assert spec.environments[0].length == SPEC.environments[0].length
    assert [type(environment) for environment in spec.environments] == [EnvironmentSpec] * 2


def test_a_problem_whose_prompt_is_too_long_is_left_out(tmp_path: Path, policy: Path) -> None:
    """Nobody could work on its slots; `reverse` asks for 12 to 14 tokens."""
    text = '[sampling]\nmax_prompt_tokens = 13\nmax_new_tokens = 4\n[[environments]]\nname = "reverse"\n'
    spec = parse_run_toml('name = "t"\n' + text)
    (found,) = filter_problems(policy, spec=spec, settings=FilterSettings(count=24, samples=1, lowest=0.0, highest=1.0))
    fits = [len(load_environment(spec.environments[0]).problem(index).prompt) <= 13 for index in range(24)]
    assert 0 < sum(fits) < 24
    assert (found.bitmap, found.unjudged) == (bitmap_of(fits), 24 - sum(fits))


def test_a_folder_that_is_not_there_is_named_before_anything_is_measured(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filtering, "filter_problems", None)  # calling it would be another error
    result = invoke(tmp_path, "--policy", str(policy), "--out", str(tmp_path / "nowhere" / "run.toml"))
    assert result.exit_code != 0
    assert "nowhere is no folder" in result.output.replace("\n", "")


def test_environments_that_take_no_tables_are_named_before_anything_is_measured(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filtering, "filter_problems", None)
    (tmp_path / "run.toml").write_text('name = "t"\nenvironments = [{ name = "reverse" }]\n')
    given = ["problems", "--run", str(tmp_path / "run.toml"), "--policy", str(policy), "--json"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code != 0
    assert "cannot be written into this run.toml" in result.output.replace("\n", " ")


class Counting(NothingMeasured):
    """Counts the batches that were drawn."""

    def __init__(self, inner: MeasuredBefore) -> None:
        self.inner, self.drawn = inner, 0

    def known(self, environment: int, first: int, *, count: int) -> Sequence[CompletionOutcome] | None:
        return self.inner.known(environment, first, count=count)

    def add(self, environment: int, first: int, outcomes: Sequence[CompletionOutcome]) -> None:
        self.drawn += 1
        self.inner.add(environment, first, outcomes)


def measure(policy: Path, file: Path, *, of: str = "run", **settings: Any) -> tuple[list[Filtered], int]:
    """What is kept, and how many batches of six completions were drawn for that."""
    with MeasuredFile(file, of=of) as measured, pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "IN_FLIGHT", 6)
        counting = Counting(measured)
        found = filter_problems(policy, spec=SPEC, settings=replace(SETTINGS, **settings), measurements=counting)
    return found, counting.drawn


class Before(NamedTuple):
    """A measurement of all 10 problems, and the file that it left."""

    found: list[Filtered]
    file: bytes

    def copy(self, folder: Path) -> Path:
        (folder / "file").write_bytes(self.file)
        return folder / "file"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Before:
    """Two environments of 10 problems with 2 completions each are 4 batches each."""
    file = tmp_path_factory.mktemp("measured") / "file"
    found, drawn = measure(policy, file)
    assert drawn == 8
    return Before(found, file.read_bytes())


def test_what_was_measured_before_a_kill_is_not_measured_again(tmp_path: Path, policy: Path, before: Before) -> None:
    """The kill comes within the fifth batch."""
    lines = before.file.splitlines(keepends=True)
    assert len(lines) == 1 + 8
    file = tmp_path / "killed"
    file.write_bytes(b"".join(lines[:5]) + lines[5][:-9])
    assert measure(policy, file) == (before.found, 4)
    assert file.read_bytes() == before.file
    assert measure(policy, file) == (before.found, 0)


def test_more_problems_or_other_bounds_measure_only_what_is_new(tmp_path: Path, policy: Path, before: Before) -> None:
    file = before.copy(tmp_path)
    assert measure(policy, file, lowest=0.0, highest=1.0)[1] == 0
    more, drawn = measure(policy, file, count=12)
    assert drawn == 2, "three whole batches of each are known; the fourth was not whole"
    assert more == measure(policy, tmp_path / "other", count=12)[0]


def test_what_was_measured_of_something_else_is_not_believed(
    tmp_path: Path, policy: Path, before: Before, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator who edits run.toml would else filter by the pass rates of another run."""
    assert measure(policy, before.copy(tmp_path), of="another") == (before.found, 8)
    assert "measuring anew" in caplog.text


def test_the_digest_of_a_measurement_tells_all_apart_that_decides_it(tmp_path: Path, policy: Path) -> None:
    def digest(*, spec: RunSpec = SPEC, engine: str = "torch", file: Path = policy, **settings: Any) -> str:
        return measured_digest(file, spec=spec, settings=replace(SETTINGS, **settings), engine=engine)

    (tmp_path / "other").write_bytes(b"another policy")
    longer = msgspec.structs.replace(SPEC.sampling, max_new_tokens=25)
    different = [
        digest(spec=msgspec.structs.replace(SPEC, sampling=longer)),
        digest(engine="vllm"),
        digest(file=tmp_path / "other"),
        digest(seed=1),
        digest(samples=3),
    ]
    assert len({digest(), *different}) == 6
    assert digest() == digest(count=11) == digest(lowest=0.25, highest=0.75)


def test_a_completion_that_could_not_be_judged_is_tried_again(tmp_path: Path) -> None:
    """Bubblewrap was missing: the operator installs it, and starts the command again."""
    outcomes = [CompletionOutcome(3, False, 1.0), CompletionOutcome(4, True, None)]
    with MeasuredFile(tmp_path / "file", of="run") as measured:
        measured.add(0, 0, outcomes)
        measured.add(0, 2, outcomes[:1])
    with MeasuredFile(tmp_path / "file", of="run") as measured:
        assert measured.known(0, 0, count=2) is None
        assert measured.known(0, 2, count=1) == (outcomes[0],)
        assert measured.known(0, 2, count=2) is None


def test_two_processes_do_not_measure_into_one_file(tmp_path: Path) -> None:
    with MeasuredFile(tmp_path / "file", of="run"), pytest.raises(LocalFault) as error:
        MeasuredFile(tmp_path / "file", of="run")
    assert error.value.code == "in_use"


def test_the_command_says_so_where_nothing_is_left_and_writes_no_file(tmp_path: Path, policy: Path) -> None:
    result = invoke(tmp_path, "--policy", str(policy), "--count", "4", "--samples", "1", "--min", "1", "--max", "1")
    assert result.exit_code != 0
    assert "widen the bounds" in result.output
    assert not (tmp_path / "run.filtered.toml").exists()
    assert invoke(tmp_path, "--min", "0.5", "--max", "0.4").exit_code == 2


def test_a_file_that_somebody_filled_takes_no_more_memory_than_its_lines(tmp_path: Path) -> None:
    """Read at once, a file of zeros as long as the disk would end the command, and each one after it."""
    path, outcomes = tmp_path / "file", (CompletionOutcome(3, False, 1.0),)
    with MeasuredFile(path, of="run") as measured:
        measured.add(0, 0, outcomes)
    kept = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(MAX_FILE_BYTES)
    tracemalloc.start()
    with MeasuredFile(path, of="run") as measured:
        assert measured.known(0, 0, count=1) == outcomes
    assert tracemalloc.get_traced_memory()[1] < 16 * MAX_LINE_BYTES
    tracemalloc.stop()
    assert path.read_bytes() == kept
    with path.open("r+b") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with MeasuredFile(path, of="run") as measured:
        assert measured.known(0, 0, count=1) is None
    assert path.with_name("file.old").stat().st_size > MAX_FILE_BYTES
