"""Making a dataset: what is left out is counted and named, and the same files make the same bytes.

What would break for whom: an operator who loses rows without a word trains on other data than they think, and one
whose rerun makes another digest cannot start their own run again.
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from dataset_files import COLUMNS, made, source_rows, sums
from msgspec import structs

from node.datasets import sources
from node.datasets.convert import MAX_NAMES, ConvertSettings, convert
from node.datasets.format import MAX_ROW_BYTES, Columns, Dataset
from node.datasets.sources import read_rows, source_files
from node.errors import ConfigError, NodeError
from node.graders import check_answer
from node.protocol.grading import ExactGrader


def prompts(path: Path) -> list[str | None]:
    opened = Dataset.open(path)
    return [opened.row(index).prompt for index in range(opened.header.rows)]


def test_the_same_rows_make_the_same_bytes_and_another_setting_others(tmp_path: Path) -> None:
    first, again = made(tmp_path / "a.dataset"), made(tmp_path / "b.dataset")
    assert first.spec == again.spec
    others = [made(tmp_path / "c.dataset", system="s"), made(tmp_path / "d.dataset", sums(29))]
    assert len({each.spec.digest for each in (first, *others)}) == 3


def test_rows_that_are_none_are_counted_and_named_by_line(tmp_path: Path) -> None:
    rows: list[Any] = [
        *sums(2),
        {"question": "q"},
        {"question": " ", "answer": 1},
        {"question": "q", "answer": ""},
        sums(1)[0] | {"answer": 99},
        {"question": "q" * MAX_ROW_BYTES, "answer": 1},
        *({"question": None, "answer": 1} for _ in range(7)),
    ]
    found = made(tmp_path, rows)
    assert found.header.rows == 2
    assert {code: (one.count, one.first) for code, one in found.skipped.items()} == {
        "missing_column": (1, ["rows.jsonl:3"]),
        "empty_prompt": (8, ["rows.jsonl:4", *(f"rows.jsonl:{line}" for line in range(8, 12))]),
        "empty_answer": (1, ["rows.jsonl:5"]),
        "duplicate": (1, ["rows.jsonl:6"]),
        "too_large": (1, ["rows.jsonl:7"]),
    }


def test_an_answer_that_nothing_can_match_is_left_out(tmp_path: Path) -> None:
    def refuse(_spec: object, answer: str) -> None:
        if answer == "10":
            raise NodeError("no completion can be this")

    settings = ConvertSettings(name="sums", columns=COLUMNS, grader=ExactGrader())
    found = convert(source_rows(sums(3)), settings, to=tmp_path, check_answer=refuse)
    assert found.skipped["bad_answer"].first == ["rows.jsonl:1"]


def test_nothing_that_is_left_is_a_sentence_with_the_first_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing_column, first at rows\.jsonl:1 \(no 'answer' among 'q', 'a'\)"):
        made(tmp_path, [{"q": 1, "a": 2}])
    many = {f"column {at}": at for at in range(1000)}
    with pytest.raises(ConfigError) as raised:
        made(tmp_path, [many])
    assert len(str(raised.value)) < MAX_NAMES + 150


def test_a_row_stays_held_out_when_others_come_and_its_answer_is_corrected(tmp_path: Path) -> None:
    """Else a corrected file would train on what the curves were measured with."""
    few = made(tmp_path / "few.dataset", sums(100), held_out=0.2)
    corrected = [row | {"answer": -1} for row in sums(300)]
    many = made(tmp_path / "many.dataset", reversed(corrected), held_out=0.2)
    held = set(prompts(few.path)[few.header.leased :])
    assert 5 < len(held) < 40
    assert held <= set(prompts(many.path)[many.header.leased :])
    assert not held & set(prompts(many.path)[: many.header.leased])


def test_a_dot_leads_into_objects_and_other_values_become_json(tmp_path: Path) -> None:
    columns = Columns(prompt="q.text", messages=None, answer="reward.truth", metadata=("extra",))
    rows = [{"q.text": "flat", "reward": {"truth": ["a", 1]}, "extra": {"k": [None]}}]
    rows += [{"q": {"text": "deep"}, "reward": {"truth": True}, "extra": 1.5}]
    opened = Dataset.open(made(tmp_path, rows, columns=columns).path)
    assert [(opened.row(at).prompt, opened.row(at).answer, opened.row(at).metadata) for at in range(2)] == [
        ("flat", '["a",1]', {"extra": '{"k":[null]}'}),
        ("deep", "true", {"extra": 1.5}),
    ]


def test_conversations_come_as_lists_or_as_json_and_end_with_a_question(tmp_path: Path) -> None:
    columns = structs.replace(COLUMNS, prompt=None, messages="question")
    turns = [{"role": "user", "content": "u"}]
    rows: list[Any] = [
        {"question": turns, "answer": "a"},
        {"question": json.dumps([{"role": "system", "content": "s"}, *turns]), "answer": "a"},
        {"question": [*turns, {"role": "assistant", "content": "a"}], "answer": "a"},
        {"question": "u", "answer": "a"},
        {"question": [{"role": "user", "content": None}], "answer": "a"},
    ]
    found = made(tmp_path, rows, columns=columns)
    assert (found.header.rows, found.skipped["bad_messages"].count) == (2, 3)


def test_every_kind_of_file_gives_the_same_dataset(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"question": f'q "{at}",\n', "answer": str(at)} for at in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "a.csv").write_text(
        "question,answer\n"
        + "".join('"{}",{}\n'.format(row["question"].replace('"', '""'), row["answer"]) for row in rows)
    )
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    settings = ConvertSettings(name="a", columns=COLUMNS, grader=ExactGrader())
    found = [
        convert(read_rows(tmp_path / name), settings, to=tmp_path, check_answer=check_answer)
        for name in ("a.jsonl", "a.csv", "a.parquet")
    ]
    assert {one.header.rows for one in found} == {300}
    assert len({one.spec.digest for one in found}) == 1


def test_bad_lines_are_passed_over_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 200)
    good = json.dumps(sums(1)[0])
    bad = "[1]\n{\n" + '"' + "x" * 1000 + '"\n' + "[" * 150 + "\n\n"
    (tmp_path / "a.jsonl").write_text(bad + good)
    assert [(row.line, row.complaint) for row in read_rows(tmp_path / "a.jsonl")] == [
        (1, "not_an_object"),
        (2, "not_json"),
        (3, "line_too_long"),
        (4, "not_json"),
        (6, ""),
    ]
    (tmp_path / "a.csv").write_text("question,answer\nq,a\nq\nq,a,b\n")
    assert [(row.line, row.complaint) for row in read_rows(tmp_path / "a.csv")] == [
        (2, ""),
        (3, "wrong_columns"),
        (4, "wrong_columns"),
    ]


def test_a_column_without_a_name_and_a_byte_order_mark_cost_no_row(tmp_path: Path) -> None:
    """pandas writes its index under no name, and some editors begin a file with a byte order mark."""
    (tmp_path / "a.csv").write_bytes(codecs.BOM_UTF8 + b",question,answer\n0,q,1\n1,r,2\n")
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"question": "q", "answer": 1}\n')
    assert [row.complaint for row in read_rows(tmp_path / "a.csv")] == ["", ""]
    assert [row.complaint for row in read_rows(tmp_path / "a.jsonl")] == [""]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """Python's reader takes the last one, of which nobody would hear."""
    (tmp_path / "a.csv").write_text("question,answer,answer\nq,1,2\n")
    with pytest.raises(ConfigError, match="two columns 'answer'"):
        list(read_rows(tmp_path / "a.csv"))


def test_files_that_cannot_be_read_are_errors_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no data in"):
        source_files(tmp_path)
    (tmp_path / "a.csv").write_bytes(b"question,answer\n\xff,1\n")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing PAR1")
    for name, why in (("a.csv", "not in UTF-8"), ("a.parquet", "Parquet")):
        with pytest.raises(ConfigError, match=f"{name} .*{why}"):
            list(read_rows(tmp_path / name))
    assert [file.name for file in source_files(tmp_path)] == ["a.csv", "a.parquet"]
