"""A dataset's file, and what is made of its rows: a run's operator may be an attacker of those who join the run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from random import Random

from benchmarks.fuzzing.mutation import bytes_mutator, json_mutator, mixed
from benchmarks.fuzzing.target import Harness, Mutator, Target
from node.datasets.convert import ConvertSettings, convert
from node.datasets.format import LENGTH_BYTES, MAGIC, OFFSET_BYTES, Columns, Dataset
from node.datasets.sources import SourceRow
from node.environments.dataset import DatasetProblems
from node.errors import DatasetFault
from node.graders import check_answer
from node.protocol.grading import ExactGrader

SAID = "think</think> 3 \u202e\x00"
ROWS = [
    {"q": "Q:1+2=?", "m": [{"role": "user", "content": "1+2?"}], "a": 3, "x": 1.5},
    {
        "q": "é\u2028",
        "m": [{"role": "system", "content": ""}, {"role": "tool", "content": "\x00"}],
        "a": "3",
        "x": None,
    },
]
EDIT_TEXT = json_mutator()


def _seeds(folder: Path) -> list[bytes]:
    """Return files of prompts and of conversations, as they are made for a run, with and without their answers."""
    files = []
    for prompt, messages in (("q", None), (None, "m")):
        columns = Columns(prompt=prompt, messages=messages, answer="a", metadata=("x",))
        settings = ConvertSettings(name="fuzz", columns=columns, grader=ExactGrader(), system="s")
        lines = [SourceRow(folder, line, row) for line, row in enumerate(ROWS, 1)]
        made = convert(lines, settings, to=folder / "seed.dataset", check_answer=check_answer)
        files += [made.path.read_bytes(), b"".join(Dataset.open(made.path).prompts())]
    return files


def _parts(data: bytes) -> list[bytes]:
    """Take a seed apart: its header, and each of its rows."""
    begin = len(MAGIC) + LENGTH_BYTES
    end = begin + int.from_bytes(data[len(MAGIC) : begin], "little")
    count = len(ROWS)
    start = end + OFFSET_BYTES * (count + 1)
    at = [int.from_bytes(data[end + OFFSET_BYTES * row :][:OFFSET_BYTES], "little") for row in range(count + 1)]
    return [data[begin:end], *(data[start + at[row] : start + at[row + 1]] for row in range(count))]


def _texts(seeds: Sequence[bytes]) -> Mutator:
    """Edit the JSON of a header or row, and lay the file out around it."""

    def mutate(rng: Random, _corpus: Sequence[bytes]) -> bytes:
        parts = _parts(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2))):
            index = rng.randrange(len(parts))
            parts[index] = EDIT_TEXT(rng, [parts[index]])
        header, *rows = parts
        offsets = accumulate(map(len, rows), initial=0)
        table = b"".join(each.to_bytes(OFFSET_BYTES, "little") for each in offsets)
        return MAGIC + len(header).to_bytes(LENGTH_BYTES, "little") + header + table + b"".join(rows)

    return mutate


def _file(stack: ExitStack) -> Harness:
    """Feed a file, and draw, render and grade every row of what is accepted."""
    memory = Path("/dev/shm")  # noqa: S108  (a folder of this target's own in it)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)))
    seeds, path = _seeds(folder), folder / "data"

    def run(data: bytes) -> str:
        path.write_bytes(data)
        dataset = Dataset.open(path)
        source = DatasetProblems("dataset:fuzz", dataset)
        for index in range(dataset.header.rows):
            problem = source.problem(index)
            assert 0 <= problem.opening <= len(problem.prompt)
            assert not dataset.has_answers or 0.0 <= source.reward(problem, SAID) <= 1.0
        assert b"".join(dataset.prompts())
        return str((dataset.header.rows, dataset.header.held_out))

    tokens = (bytes(OFFSET_BYTES), b"\xff" * OFFSET_BYTES, MAGIC)
    return Harness(seeds, run, (DatasetFault,), mixed((2, _texts(seeds)), (1, bytes_mutator(*tokens))))


TARGETS = (Target("dataset.file", "the run's operator, to whoever joins", 20, _file),)
