"""Who follows a page has to notice where it is wrong: otherwise the tests of the tutorials test nothing."""

from __future__ import annotations

import os

import psutil
import pytest
from tutorials import Substitution, Unreadable, matches, read_page, reader

SERVER = """bash -c 'trap "echo down; exit" INT; echo up; while :; do sleep 0.1; done'"""


def console(*lines, title=""):
    info = f' title="{title}"' if title else ""
    return "\n".join([f"```console{info}", *lines, "```\n"])


def follow(folder, *fences, **substituted):
    with reader(folder, {"PATH": os.defpath}, logs=folder, substitution=Substitution(**substituted)) as somebody:
        somebody.follow(read_page("\n".join(fences)))
        return {name: psutil.Process(terminal.pid) for name, terminal in somebody.terminals.items()}


def test_one_shell_keeps_what_the_last_command_changed(tmp_path):
    (tmp_path / "below").mkdir()
    follow(tmp_path, console("$ cd below; name=value", "$ echo $name \\", "    ${PWD##*/}", "value below"))


def test_a_file_is_where_the_reader_is(tmp_path):
    (tmp_path / "below").mkdir()
    follow(tmp_path, console("$ cd below"), '```toml title="run.toml"\nport = 8700\n```\n', ports={8700: 1})
    assert (tmp_path / "below" / "run.toml").read_text() == "port = 1\n"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["$ echo other", "this"], id="another output"),
        pytest.param(["$ echo said"], id="output that the page does not show"),
        pytest.param(["$ true", "said"], id="no output"),
        pytest.param(["$ false"], id="a command that fails"),
        pytest.param(["$ false", "$ echo $?", "0"], id="another exit status"),
        pytest.param(["$ no-such-command", "..."], id="no such command"),
    ],
)
def test_what_is_not_as_the_page_says_is_noticed(tmp_path, lines):
    with pytest.raises(AssertionError):
        follow(tmp_path, console(*lines))


def test_an_error_that_is_announced_is_none(tmp_path):
    follow(tmp_path, console("$ (exit 3)", "$ echo $?", "3"))


def test_what_runs_on_gets_ctrl_c_and_nothing_is_left(tmp_path):
    shells = follow(
        tmp_path,
        console(f"$ {SERVER}", "up", title="Terminal 2: a server"),
        console("$ echo meanwhile", "meanwhile"),
        console("^C", "down", title="Terminal 2: a server"),
        console("$ sleep 60 & sleep 61", "...", title="Terminal 3"),
    )
    assert not any(shell.is_running() for shell in shells.values())
    assert not [process for process in psutil.process_iter() if _is_in(process, tmp_path)]


def _is_in(process, folder):
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False


def test_placeholders_and_ports_are_replaced_and_other_numbers_are_not(tmp_path):
    replaced = Substitution(ports={8700: 1}, texts={"RUN_ID": "5f3c", "swarmproof://RUN_ID/x": "string"})
    assert replaced("swarmproof://RUN_ID/x RUN_ID :8700/ 87001 18700 8700.5") == "string 5f3c :1/ 87001 18700 8700.5"


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("a  b\nc\n", "a b c"),
        ("a long line", "a ... line"),
        ("first\nsecond\nthird", "first\n...\nthird"),
        ("23:59:59 INFO x", "12:00:00 INFO x"),
        ("┏━━━━━━┓", "┏━━━━━━━━━┓"),
        ("anything", "..."),
        ("", "..."),
    ],
)
def test_what_may_differ(output, shown):
    assert matches(output, shown)


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("", "a"),
        ("a", ""),
        ("a b", "a ... a b"),
        ("first third", "first ... second ... third"),
        ("Traceback: agree", "agree"),
        ("agree, Error", "agree"),
        ("aba", "ab...ba"),
    ],
)
def test_what_may_not(output, shown):
    assert not matches(output, shown)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("```\n$ swarmproof demo\n```\n", id="a fence of nothing"),
        pytest.param("```bash\nswarmproof demo\n```\n", id="commands without a prompt"),
        pytest.param("```console\nswarmproof demo\n```\n", id="output without a command"),
        pytest.param("Then\n\n    swarmproof demo\n", id="an indented block"),
        pytest.param('```console title="Elsewhere"\n$ true\n```\n', id="a terminal without a number"),
    ],
)
def test_what_would_be_shown_and_not_run_is_refused(page):
    with pytest.raises(Unreadable):
        read_page(page)
