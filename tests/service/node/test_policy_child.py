"""A process that reads a stranger's folder is not trusted with this process's memory or time."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from node.policy import child
from node.policy.child import NoAnswer, ask_child


class Answer(msgspec.Struct):
    number: int


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write what the process runs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "program_of_a_test.py").write_text


def ask(*arguments: str, seconds: float = 60) -> Answer:
    return ask_child("program_of_a_test", *arguments, answer=Answer, seconds=seconds)


def test_the_answer_is_the_last_line_below_what_libraries_print(program) -> None:
    program("import sys; print('loading\\n{\"number\": 1}'); print(f'{{\"number\": {sys.argv[1]}}}')")
    assert ask("7") == Answer(number=7)


def test_a_flood_is_cut_off_at_its_limit_and_not_at_the_deadline(program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read whole, a process that prints without end would take all of a coordinator's memory until its deadline."""
    monkeypatch.setattr(child, "MAX_OUTPUT_BYTES", 2**20)
    program("while True: print('x' * 1000)")
    began = time.monotonic()
    with pytest.raises(NoAnswer, match="printed more than 1048576 bytes"):
        ask()
    assert time.monotonic() - began < 50


def test_many_errors_stop_no_answer_and_the_last_tells_why_there_is_none(program) -> None:
    flood = "import sys; sys.stderr.write('e' * 2**20 + chr(10) + 'the last one' + chr(10))"
    program(f"{flood}; print('{{\"number\": 1}}')")
    assert ask() == Answer(number=1)
    program(flood)
    with pytest.raises(NoAnswer, match=r"^ended with: the last one$"):
        ask()


@pytest.mark.parametrize("closing", ["", "import os; os.close(1); os.close(2); "])
def test_a_process_that_hangs_is_killed(program, closing: str) -> None:
    program(f"{closing}import time; time.sleep(600)")
    with pytest.raises(NoAnswer, match="did not end within 0 s"):
        ask(seconds=0.3)


def test_a_process_that_dies_without_a_word_is_named_by_its_code(program) -> None:
    program("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(NoAnswer, match="exit code -9"):
        ask()
