"""A dataset's file: every malformation is an error of ours, and none of them reads as a row.

What would break for whom: the file comes from a run's operator, whom a worker does not know; a parser that trusts it
gives that stranger the worker's memory, or its process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from dataset_files import environment_of, made, sums

from node.datasets import format as format_module
from node.datasets.format import MAGIC, MAX_HEADER_BYTES, MAX_ROW_BYTES, Dataset
from node.environments import load_environment
from node.environments.base import EnvironmentFault
from node.errors import DatasetFault
from node.protocol.environment_spec import MAX_PROBLEMS, DatasetSpec, EnvironmentSpec, LengthSpec, ProblemsSpec
from shardcast.wire import digest

ROW = b'{"prompt":"p","messages":null,"answer":"a","metadata":{}}'
BARE_ROW = b'{"prompt":"p","messages":null,"metadata":{}}'


def header(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "name": "sums",
        "grader": {"kind": "exact/1", "ignore_case": False},
        "system": "",
        "rows": 1,
        "held_out": 0,
        "columns": {"prompt": "q", "messages": None, "answer": "a", "metadata": []},
    }
    return json.dumps(fields | changes, separators=(",", ":")).encode()


def file_of(*rows: bytes, head: bytes | None = None, offsets: list[int] | None = None) -> bytes:
    text = header(rows=len(rows)) if head is None else head
    at = [0]
    for row in rows:
        at.append(at[-1] + len(row))
    table = b"".join(each.to_bytes(8, "little") for each in (at if offsets is None else offsets))
    return MAGIC + len(text).to_bytes(4, "little") + text + table + b"".join(rows)


def refused(folder: Path, data: bytes) -> str:
    path = folder / "data"
    path.write_bytes(data)
    with pytest.raises(DatasetFault) as error:
        Dataset.open(path)
    return error.value.code


def test_the_smallest_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(file_of(ROW))
    opened = Dataset.open(tmp_path / "data")
    assert (opened.row(0).prompt, opened.row(0).answer, opened.digest) == ("p", "a", digest(file_of(ROW)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SWPDATA2" + file_of(ROW)[8:],
        file_of(ROW)[:-1],
        file_of(ROW) + b" ",
        file_of(ROW)[:40],
        MAGIC + (MAX_HEADER_BYTES + 1).to_bytes(4, "little") + b"{" * (MAX_HEADER_BYTES + 1),
        MAGIC + (2**32 - 1).to_bytes(4, "little") + header(),
        file_of(ROW, head=header(rows=2)),
        file_of(ROW, head=header(rows=MAX_PROBLEMS)),
        file_of(ROW, head=header(rows=MAX_PROBLEMS + 1)),
        file_of(ROW, head=header(rows=0)),
        file_of(ROW, head=header(held_out=1)),
        file_of(ROW, head=header(held_out=-1)),
        file_of(ROW, head=header(name="../sums")),
        file_of(ROW, head=header(grader={"kind": "eval/1"})),
        file_of(ROW, head=header(system="s" * 16_385)),
        file_of(ROW, head=header(more=1)),
        file_of(ROW, head=header() + b" "),
        file_of(ROW, head=b"[" * 60_000),
        file_of(ROW, ROW, offsets=[0, 2 * len(ROW), 2 * len(ROW)]),
        file_of(ROW, ROW, offsets=[0, 2**64 - 1, 2 * len(ROW)]),
        file_of(ROW, ROW, offsets=[len(ROW), 0, 2 * len(ROW)]),
        file_of(ROW, ROW, offsets=[0, len(ROW), 2**63]),
        file_of(ROW + b" "),
        file_of(b'{"prompt":"p","prompt":"p","messages":null,"answer":"a","metadata":{}}'),
        file_of(b'{"prompt":"p","messages":null,"answer":"a"}'),
        file_of(b'{"prompt":null,"messages":null,"answer":"a","metadata":{}}'),
        file_of(b'{"prompt":"","messages":null,"answer":"a","metadata":{}}'),
        file_of(b'{"prompt":"p","messages":[{"role":"user","content":"u"}],"answer":"a","metadata":{}}'),
        file_of(b'{"prompt":null,"messages":[],"answer":"a","metadata":{}}'),
        file_of(b'{"prompt":null,"messages":[{"role":"root","content":"u"}],"answer":"a","metadata":{}}'),
        file_of(b'{"prompt":null,"messages":[{"role":"assistant","content":"u"}],"answer":"a","metadata":{}}'),
        file_of(b'{"prompt":"p","messages":null,"answer":"","metadata":{}}'),
        file_of(b'{"prompt":"p","messages":null,"answer":"a","metadata":{"a":{}}}'),
        file_of(b'{"prompt":"p","messages":null,"answer":"a","metadata":{"a":1e999}}'),
        file_of(b'{"prompt":"p","messages":null,"answer":"a","metadata":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001),
        file_of(b'{"prompt":"\xff","messages":null,"answer":"a","metadata":{}}'),
        file_of(b'{"prompt":"\\ud800","messages":null,"answer":"a","metadata":{}}'),
        file_of(ROW.replace(b'"p"', b'"' + b"p" * MAX_ROW_BYTES + b'"')),
        file_of(ROW, BARE_ROW),
        file_of(BARE_ROW, ROW),
        file_of(b'{"prompt":"p","messages":null,"metadata":{"a":1}}'),
        file_of(BARE_ROW, head=header(salt="A" * 43 + "=")),
        file_of(ROW, head=header(salt="AAAA")),
    ],
)
def test_a_malformed_file_is_a_typed_error(tmp_path: Path, data: bytes) -> None:
    assert refused(tmp_path, data) == "dataset_malformed"


def test_a_file_of_another_size_is_refused_before_it_is_hashed(tmp_path: Path) -> None:
    dataset = made(tmp_path)
    dataset.path.write_bytes(dataset.path.read_bytes() + b" ")
    with pytest.raises(DatasetFault) as error:
        Dataset.open(dataset.path, dataset.spec)
    assert error.value.code == "dataset_changed"


def test_a_missing_file_and_a_row_that_is_none_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(DatasetFault) as error:
        Dataset.open(tmp_path / "nothing")
    assert error.value.code == "dataset_missing"
    opened = Dataset.open(made(tmp_path).path)
    for index in (-1, 30, 2**63 - 1):
        with pytest.raises(DatasetFault):
            opened.row(index)


def test_a_file_that_changes_while_it_is_open_gives_no_other_problem(tmp_path: Path) -> None:
    dataset = made(tmp_path)
    source = load_environment(environment_of(dataset), {dataset.spec.digest: dataset.path})
    dataset.path.chmod(0o600)
    with dataset.path.open("r+b") as file:
        file.seek(dataset.spec.bytes - 400)
        file.write(b"x" * 400)
    with pytest.raises(EnvironmentFault):
        source.problem(29)


def test_a_row_that_is_replaced_by_another_one_in_place_is_not_given_out(tmp_path: Path) -> None:
    """A worker would work on a problem that is not the run's, and a verifier judge honest work by another answer."""
    path, other = tmp_path / "data", ROW.replace(b'"a"', b'"b"')
    path.write_bytes(file_of(ROW, ROW))
    opened = Dataset.open(path)
    with path.open("r+b") as file:
        file.seek(-len(ROW), os.SEEK_END)
        file.write(other)
    assert opened.row(0).answer == "a"
    with pytest.raises(DatasetFault) as error:
        opened.row(1)
    assert error.value.code == "dataset_changed"


def test_a_file_that_changes_between_its_hash_and_its_parsing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.write_bytes(file_of(ROW, ROW))
    spec = Dataset.open(path)
    verified = format_module._OpenFile.digest

    def then_changed(file: format_module._OpenFile) -> str:
        found = verified(file)
        path.write_bytes(file_of(ROW, ROW.replace(b'"a"', b'"b"')))
        return found

    monkeypatch.setattr(format_module._OpenFile, "digest", then_changed)
    with pytest.raises(DatasetFault) as error:
        Dataset.open(path, DatasetSpec(digest=spec.digest, bytes=spec.bytes))
    assert error.value.code == "dataset_changed"


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_file_that_is_cut_short_while_it_is_open_is_a_typed_error(tmp_path: Path, left: int) -> None:
    """A mapped one would end the worker with SIGBUS, and with it every slot that it holds."""
    dataset = made(tmp_path)
    opened = Dataset.open(dataset.path, dataset.spec)
    dataset.path.chmod(0o600)
    os.truncate(dataset.path, left % dataset.spec.bytes)
    with pytest.raises(DatasetFault) as error:
        opened.row(29)
    assert error.value.code == "dataset_changed"


def test_a_file_that_is_removed_or_replaced_while_it_is_open_goes_on_as_it_was(tmp_path: Path) -> None:
    dataset = made(tmp_path)
    opened = Dataset.open(dataset.path, dataset.spec)
    row = opened.row(29)
    dataset.path.unlink()
    dataset.path.write_bytes(file_of(ROW))
    assert opened.row(29) == row


# -- the environment over it


def test_a_problem_is_its_row_for_whoever_has_the_file(tmp_path: Path) -> None:
    """The chain from a slot's index to a prompt is worker's, verifier's and auditor's alike."""
    dataset = made(tmp_path, columns=msgspec.structs.replace(made(tmp_path).header.columns, metadata=("answer",)))
    source = load_environment(environment_of(dataset), {dataset.spec.digest: dataset.path})
    problem = source.problem(3)
    assert (problem.prompt, problem.messages) == (sums(4)[3]["question"], ())
    assert problem.data == {"answer": "16", "metadata": {"answer": 16}}
    assert [source.reward(problem, said) for said in ("16", "think</think> 16 ", "17", "16</think>")] == [1, 1, 0, 0]


def test_a_system_text_and_messages_make_a_conversation_and_a_prompt_that_shows_it(tmp_path: Path) -> None:
    rows = [{"question": [{"role": "user", "content": "1+1?"}], "answer": "2"}]
    columns = msgspec.structs.replace(made(tmp_path).header.columns, prompt=None, messages="question")
    dataset = made(tmp_path, rows, columns=columns, system="Be exact.")
    source = load_environment(environment_of(dataset), {dataset.spec.digest: dataset.path})
    problem = source.problem(0)
    assert problem.prompt == "Be exact.\n\n1+1?"
    assert problem.messages == (
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "1+1?"},
    )
    targets = environment_of(dataset, length=LengthSpec(targets=(8,), form="short"))
    asked = load_environment(targets, {dataset.spec.digest: dataset.path}).problem(0)
    assert asked.prompt == "Be exact.\n\nT:8\n1+1?"


def test_a_run_that_draws_more_rows_than_are_leased_is_refused_at_its_start(tmp_path: Path) -> None:
    """Held-out rows would be trained on, and nobody would see it."""
    dataset = made(tmp_path, held_out=0.3)
    assert 0 < dataset.header.held_out < 30
    more = environment_of(dataset, problems=ProblemsSpec(count=dataset.header.leased + 1))
    with pytest.raises(EnvironmentFault) as error:
        load_environment(more, {dataset.spec.digest: dataset.path})
    assert error.value.code == "bad_arguments"


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "dataset:x"},
        {"name": "dataset:x", "problems": {"count": 1}},
        {"name": "dataset:x", "dataset": {"digest": "0" * 64, "bytes": 1}},
        {"name": "arithmetic", "dataset": {"digest": "0" * 64, "bytes": 1}, "problems": {"count": 1}},
        {"name": "dataset:x", "dataset": {"digest": "0" * 63, "bytes": 1}, "problems": {"count": 1}},
        {"name": "dataset:x", "dataset": {"digest": "0" * 64, "bytes": 2**32 + 1}, "problems": {"count": 1}},
    ],
)
def test_an_environment_has_a_dataset_a_name_for_it_and_a_count_or_none_of_them(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, EnvironmentSpec)
