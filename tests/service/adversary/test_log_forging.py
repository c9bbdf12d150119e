"""Whoever can have something logged tries to write the operator's log: forged lines, a terminal's codes, cut lines.

Error texts quote what workers, relays and coordinators send, so each of these is a stranger's.
"""

from __future__ import annotations

import io
import json
import logging
import unicodedata

import pytest

from node.runtime import logs
from node.runtime.logs import JsonLines, TextLines, bound

FORGED = "12:00:00 INFO    slot 1/1 of 00000000… admitted"
FORGED_JSON = '{"time": "2026-01-01T00:00:00.000Z", "level": "info", "message": "admitted"}'
BREAKS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
CODES = ["\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x9b31m", "\b" * 40, "\x00", "\u202e", "\u2066", "\ufeff", "\ud800"]
JOURNALD_LINE_BYTES = 48 * 1024
"""systemd's LineMax=: what is longer goes on in an entry of its own."""


def raised(said: str) -> ValueError:
    try:
        int(said)
    except ValueError as error:
        error.args = (said,)
        return error
    raise AssertionError


def written(formatter: logging.Formatter, message: str, *arguments: object, error: BaseException | None = None) -> str:
    """What stderr gets of one call."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    caught = None if error is None else (type(error), error, error.__traceback__)
    handler.handle(logging.LogRecord("node.x", logging.WARNING, __file__, 1, message, arguments, caught))
    assert stream.getvalue().endswith("\n")
    return stream.getvalue()


@pytest.fixture(autouse=True)
def of_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the names that a command gave this process in another test."""
    monkeypatch.setattr(logs, "_OF_PROCESS", {})


@pytest.mark.parametrize("broken", BREAKS, ids=ascii)
@pytest.mark.parametrize("forged", [FORGED, FORGED_JSON], ids=["text", "json"])
def test_a_line_break_in_a_strangers_text_begins_no_line(broken: str, forged: str):
    said = f"no such slot{broken}{forged}"
    assert len(written(TextLines(), "refused: %s", said).splitlines()) == 1
    (line,) = written(JsonLines(), "refused: %s", said).splitlines()
    assert json.loads(line)["message"] == f"refused: {said}", "it is data, and arrives as such"


@pytest.mark.parametrize("broken", BREAKS, ids=ascii)
def test_a_line_break_in_an_error_of_a_traceback_begins_no_line(broken: str):
    error = raised(f"no such slot{broken}{FORGED}")
    text, json_lines = written(TextLines(), "failed", error=error), written(JsonLines(), "failed", error=error)
    first, *others = text.splitlines()
    assert first.endswith("WARNING failed")
    assert others
    assert all(line.startswith("    ") for line in others), text
    assert len(json_lines.splitlines()) == 1


@pytest.mark.parametrize("code", CODES, ids=ascii)
def test_a_terminals_codes_and_reversed_writing_reach_no_terminal(code: str):
    for formatter in (TextLines(), JsonLines()):
        seen = written(formatter, "relay says %s", f"a{code}b").removesuffix("\n")
        assert not [c for c in seen if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}], ascii(seen)


def test_a_json_object_in_a_strangers_text_adds_no_field():
    (line,) = written(JsonLines(), "%s", f'", "level": "info", "submission": "{"0" * 64}').splitlines()
    assert set(json.loads(line)) == {"time", "level", "logger", "message"}


def test_an_id_that_a_stranger_chose_forges_nothing_either():
    with bound(lease=f"x\n{FORGED_JSON}", node="\x1b[2J" + "n" * 100_000):
        (line,) = written(JsonLines(), "lease").splitlines()
        assert len(written(TextLines(), "lease").splitlines()) == 1
    assert len(line) < 2000


@pytest.mark.parametrize("filler", ["x", "\n", "\U0001f4a5", "é"], ids=ascii)
def test_a_long_text_does_not_push_a_forged_line_behind_the_collectors_limit(filler: str):
    """journald cuts a line after 48 KiB, and what follows begins an entry of its own."""
    said = filler * (4 * JOURNALD_LINE_BYTES) + FORGED_JSON
    with bound(lease=said, node=said, run=said, submission=said):
        for formatter in (TextLines(), JsonLines()):
            lines = written(formatter, "%s", said, error=ValueError(said)).encode().splitlines()
            assert max(map(len, lines)) < JOURNALD_LINE_BYTES


def test_a_name_of_a_thread_or_process_is_escaped_too(monkeypatch):
    monkeypatch.setattr(logs, "_OF_PROCESS", {})
    logs.name_process(name=f"verifier\n{FORGED_JSON}")
    assert len(written(JsonLines(), "x").splitlines()) == 1
