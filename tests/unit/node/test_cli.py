"""What a newcomer meets first: help that can be acted on, and mistakes that cost one sentence, not an evening."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
from importlib import metadata

import click
import pytest
from click.testing import CliRunner
from locations import ROOT
from rich.console import Console

from node import cli
from node.commands.click_ext import Commands
from node.errors import ConfigError
from node.keys.identity import load_key, node_id
from node.policy.config import FAMILIES
from node.policy.families import engines_of
from node.protocol.run import run_id_of
from node.runtime.logs import RepeatFilter
from node.worker.events import EventKind
from node.worker.view.watching import WorkerIdentity, observe_worker

RUN_ID = "ab" * 32


@pytest.fixture(autouse=True)
def quiet_root_logger():
    """The command sets up logging for its process; tests share one."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]
    for package in ("node", "coordinator", "shardcast"):
        logging.getLogger(package).setLevel(logging.NOTSET)


def swarmproof(*arguments, **environment):
    return CliRunner().invoke(cli.main, arguments, env=environment, prog_name="swarmproof")


@pytest.fixture
def seen(monkeypatch):
    """What the worker command would start with; the worker itself does not run."""
    seen = {}

    async def record(settings, **_):
        seen["settings"] = settings

    monkeypatch.setattr("node.worker.daemon.run_worker", record)
    return seen


# -- help


def _commands(group, path=()):
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_every_command_explains_itself_with_an_example_and_every_option_has_help():
    found = dict(_commands(cli.main))
    assert {("worker",), ("relay",), ("audit",), ("keys", "new"), ("keys", "show"), ("keys", "run-id")} <= found.keys()
    for path, command in found.items():
        result = swarmproof(*path, "--help")
        assert result.exit_code == 0, result.output
        assert "Example" in result.output, path
        assert f"swarmproof {' '.join(path)}" in result.output, path
        for option in command.params:
            documented = path[0] not in cli.main.commands or not isinstance(option, click.Option) or option.help
            assert documented, (path, option.name)


def test_the_help_of_the_whole_names_the_ways_to_take_part():
    result = swarmproof("--help")
    assert result.exit_code == 0
    for line in (
        "swarmproof worker --join swarmproof://...",
        "swarmproof audit URL --run-id ID",
        "SWARMPROOF_WORKER_",
    ):
        assert line in result.output


def test_the_help_of_the_whole_has_each_command_once_in_its_section():
    """A contributor does not read through an operator's thirty commands; and none may fall out of the list."""
    output = swarmproof("--help").output
    sections = re.split(r"^(\w+):$", output[output.index("Contribute:\n") :], flags=re.MULTILINE)
    listed = {
        head: re.findall(r"^  ([a-z-]+) ", body, re.MULTILINE)
        for head, body in zip(sections[1::2], sections[2::2], strict=True)
    }
    assert [name for names in listed.values() for name in names].count("worker") == 1
    assert sorted(name for names in listed.values() for name in names) == cli.main.list_commands(
        click.Context(cli.main)
    )
    assert "worker" in listed["Contribute"]
    assert "audit" in listed["Verify"]
    assert set(listed["Tools"]) == {"completion", "keys"}, "name its section in node.commands.click_ext.SECTIONS"


def test_every_family_is_listed_with_the_engines_that_serve_it():
    """An operator who picks a model by this list begins no run that its workers' engines refuse."""
    rows = {row["family"]: row for row in json.loads(swarmproof("models", "--json").output)}
    assert rows.keys() == FAMILIES
    assert all(row["engines"] == ", ".join(sorted(engines_of(family))) for family, row in rows.items())
    lines = swarmproof("models").output.splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == sorted(rows)
    assert (rows["gemma2"]["layers"], rows["finch"]["layers"]) == ("full attention, windows", "recurrent")


@pytest.mark.system
def test_the_module_runs_as_a_program():
    command = [sys.executable, "-m", "node.cli", "keys", "--help"]
    assert "Usage:" in subprocess.check_output(command, cwd=ROOT, text=True, timeout=60)


# -- keys


def test_keys_are_made_once_for_their_owner_and_shown_without_the_secret(tmp_path):
    path = tmp_path / "run.key"
    made = swarmproof("keys", "new", str(path))
    key = load_key(path)
    assert made.output == node_id(key) + "\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert swarmproof("keys", "show", str(path)).output == node_id(key) + "\n"
    assert swarmproof("keys", "run-id", str(path)).output == run_id_of(key.public_key().public_bytes_raw()) + "\n"
    again = swarmproof("keys", "new", str(path))
    assert again.exit_code == 1
    assert "never replaced" in again.output
    secret = key.private_bytes_raw().hex()
    assert secret not in made.output + again.output


def test_what_is_no_key_is_not_to_be_given_other_rights(tmp_path):
    """The advice for a key that others can read is chmod, which would lock users out of /etc/passwd."""
    (tmp_path / "other").write_text("root:x:0:0\n")
    (tmp_path / "other").chmod(0o644)
    result = swarmproof("keys", "show", str(tmp_path / "other"))
    assert ("is not a key file" in result.output, "chmod" in result.output) == (True, False)


def test_a_missing_key_says_how_to_make_one(tmp_path):
    result = swarmproof("keys", "show", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert f"swarmproof keys new {tmp_path / 'none'}" in result.output
    assert "Traceback" not in result.output


# -- flags over environment over TOML over defaults


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (((), {}, ""), 4),
        (((), {}, "slots = 5"), 5),
        (((), {"SWARMPROOF_WORKER_SLOTS": "6"}, "slots = 5"), 6),
        ((("--slots", "7"), {"SWARMPROOF_WORKER_SLOTS": "6"}, "slots = 5"), 7),
    ],
)
def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path, seen, given, expected):
    flag, environment, toml = given
    config = tmp_path / "config.toml"
    config.write_text(f'[worker]\ncoordinator = "http://h:1"\nrun-id = "{RUN_ID}"\nstate = "{tmp_path}/s"\n{toml}\n')
    result = swarmproof("--config", str(config), "worker", *flag, **environment)
    assert result.exit_code == 0, result.output
    assert seen["settings"].slots == expected
    assert seen["settings"].join.run_id == RUN_ID


def test_everything_can_come_from_the_environment(tmp_path, seen):
    result = swarmproof(
        "worker",
        SWARMPROOF_WORKER_COORDINATOR="http://h:1",
        SWARMPROOF_WORKER_RUN_ID=RUN_ID,
        SWARMPROOF_WORKER_STATE=str(tmp_path / "s"),
        SWARMPROOF_WORKER_ONCE="1",
    )
    assert result.exit_code == 0, result.output
    assert seen["settings"].once is True


def test_a_wrong_variable_is_blamed_itself_and_a_mistyped_one_is_not_ignored(tmp_path, seen):
    """Who has typed no flag looks for it in vain; and a limit that was mistyped is none."""
    join = ("--coordinator", "http://127.0.0.1:9", "--run-id", RUN_ID, "--state", str(tmp_path))
    bad = swarmproof("worker", *join, SWARMPROOF_WORKER_SLOTS="many")
    assert (bad.exit_code, "Invalid value of the environment variable SWARMPROOF_WORKER_SLOTS" in bad.output) == (
        2,
        True,
    )
    typo = swarmproof("worker", *join, SWARMPROOF_WORKER_SLOT="3", SWARMPROOF_RELAY_PROT="1")
    assert (typo.exit_code, "did you mean SWARMPROOF_WORKER_SLOTS?" in typo.output) == (1, True)
    assert seen == {}


def test_lists_and_flags_in_the_file_mean_what_they_say(tmp_path, monkeypatch):
    seen = {}

    async def record(settings, **_):
        seen["settings"] = settings

    monkeypatch.setattr("node.relay.daemon.run_relay", record)
    config = tmp_path / "config.toml"
    config.write_text(
        f'[relay]\ncoordinator = "http://h:1"\nrun_id = "{RUN_ID}"\nstate = "{tmp_path}/s"\n'
        'upstream = ["http://a:1", "http://b:2"]\nport = 0\nquota-gb = 1.5\n'
    )
    result = swarmproof("--config", str(config), "relay")
    assert result.exit_code == 0, result.output
    assert seen["settings"].join.coordinators == ("http://h:1",)
    assert seen["settings"].upstreams == ("http://a:1", "http://b:2")
    assert seen["settings"].quota_bytes == 1_500_000_000


@pytest.mark.parametrize(
    "given",
    [
        (("--coordinator", "http://a:1", "--coordinator", "http://b:2"), {}, ""),
        ((), {"SWARMPROOF_WORKER_COORDINATOR": "http://a:1 http://b:2"}, ""),
        ((), {}, 'coordinator = ["http://a:1", "http://b:2"]'),
    ],
)
def test_a_worker_may_be_told_of_several_coordinators(tmp_path, seen, given):
    flags, environment, toml = given
    config = tmp_path / "config.toml"
    config.write_text(f'[worker]\nrun-id = "{RUN_ID}"\nstate = "{tmp_path}/s"\n{toml}\n')
    result = swarmproof("--config", str(config), "worker", *flags, **environment)
    assert result.exit_code == 0, result.output
    assert seen["settings"].join.coordinators == ("http://a:1", "http://b:2")


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[worker]\nslot = 3", "no setting 'slot' in [worker]; did you mean 'slots'?"),
        ("[wroker]\nslots = 3", "no command 'wroker' in the configuration file; did you mean 'worker'?"),
        ("[keys.nwe]\nfile = 'x'", "no command 'nwe' in [keys]; did you mean 'new'?"),
        ("slots = 3", "no command 'slots'"),
        ("worker = 3", "worker must be a table"),
        ("[worker]\nonce = 'yes'", "worker.once must be true or false"),
        ("[worker]\nslots = true", "worker.slots must be a string or a number"),
        ("[worker]\nslots = [3]", "worker.slots must be a string or a number"),
        ("[relay]\nupstream = [true]", "relay.upstream must be a string or a number"),
        ("[worker", "is not a TOML file"),
        ("[worker]\nslots = 1\nslots = 2", "is not a TOML file"),
    ],
)
def test_a_mistake_in_the_file_is_named_and_nothing_starts(tmp_path, seen, toml, sentence):
    config = tmp_path / "config.toml"
    config.write_text(toml)
    result = swarmproof("--config", str(config), "worker", "--coordinator", "http://h", "--run-id", RUN_ID)
    assert result.exit_code == 1
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert seen == {}


def test_a_wrong_value_in_the_file_is_judged_like_one_on_the_command_line(tmp_path, seen):
    config = tmp_path / "config.toml"
    config.write_text("[worker]\nslots = 0")
    result = swarmproof("--config", str(config), "worker", "--coordinator", "http://h", "--run-id", RUN_ID)
    assert result.exit_code == 2
    assert "slots" in result.output


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"x" * 300_000, None])
def test_a_file_that_is_no_configuration_is_one_sentence(tmp_path, content):
    config = tmp_path / "config.toml"
    if content is not None:
        config.write_bytes(content)
    result = swarmproof("--config", str(config), "keys", "show", "x")
    assert result.exit_code == 1
    assert [line.partition(":")[0] for line in result.output.splitlines()] == ["Error", "hint"]


# -- mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("worker",), "--coordinator"),
        (("worker", "--coordinator", "http://h", "--run-id", "abc"), "64 hexadecimal digits"),
        (("worker", "--coordinator", "http://h", "--run-id", RUN_ID, "--slots", "0"), "--slots"),
        (("wrok",), "No such command 'wrok'"),
        (("audit", "http://h", "--run-id", RUN_ID, "--all", "--sample", "3"), "not both"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(arguments, sentence):
    result = swarmproof(*arguments)
    assert result.exit_code == 2
    assert sentence in result.output


@pytest.mark.parametrize("command", ["worker", "relay"])
def test_an_address_that_is_none_is_one_sentence_and_code_1(tmp_path, command):
    result = swarmproof(command, "--coordinator", "h:8000", "--run-id", RUN_ID, "--state", str(tmp_path / "s"))
    assert result.exit_code == 1
    assert "give one such as http://" in result.output
    assert "Traceback" not in result.output


def test_a_relay_that_nobody_could_reach_is_refused(tmp_path):
    result = swarmproof(
        *("relay", "--coordinator", "http://127.0.0.1:1", "--run-id", RUN_ID),
        *("--state", str(tmp_path / "s"), "--host", "0.0.0.0"),
    )
    assert result.exit_code == 1
    assert "--public-url" in result.output


def test_a_state_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    result = swarmproof(
        "worker", "--coordinator", "http://h", "--run-id", RUN_ID, "--state", str(tmp_path / "file" / "state")
    )
    assert result.exit_code == 1
    assert [line.partition(":")[0] for line in result.output.splitlines()] == ["Error", "hint"]


def test_the_unexpected_has_a_traceback_only_with_debug(monkeypatch, tmp_path):
    async def broken(*_, **__):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("node.worker.daemon.run_worker", broken)
    arguments = ("worker", "--coordinator", "http://h", "--run-id", RUN_ID, "--state", str(tmp_path))
    plain = swarmproof(*arguments)
    assert plain.exit_code == 70
    assert "Something unexpected happened: ZeroDivisionError: by nothing." in plain.output
    assert "with --debug (or SWARMPROOF_DEBUG=1)" in plain.output.splitlines()[-1]
    assert "Traceback" not in plain.output
    assert isinstance(swarmproof("--debug", *arguments).exception, ZeroDivisionError)
    assert isinstance(swarmproof(*arguments, SWARMPROOF_DEBUG="1").exception, ZeroDivisionError)


# -- output that nobody reads any more


def unread(command, arguments, name="stdout"):
    """Run `command` with a pipe as stdout, buffered as Python's own, whose reader has ended; return its exit code.

    It may be written to in vain when it is closed, as at Python's exit: that must not fail.
    """
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.MonkeyPatch.context() as patch, os.fdopen(writer, "w") as output:
        patch.setattr(sys, name, output)
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
    return ended.value.code


def _broken_pipe():
    raise BrokenPipeError(32, "Broken pipe")


WRITES = {
    "click": lambda: click.echo("a line"),
    "rich": lambda: Console().print("a table"),
    "buffered": lambda: sys.stdout.write("flushed while Python exits"),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("debug", [False, True])
def test_a_command_whose_reader_has_ended_ends_without_a_word(monkeypatch, capfd, how, debug):
    """`swarmproof status | head -1` is no error; pipelines (`set -o pipefail`) know 141 from every other program."""
    group = Commands(name="swarmproof", params=[click.Option(["--debug"], is_flag=True)])
    group.add_command(click.Command("say", callback=WRITES[how]))
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    assert unread(group, ["--debug", "say"] if debug else ["say"]) == 141
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("arguments", [["--help"], ["keys", "--help"]])
def test_so_does_help(capfd, arguments):
    assert unread(cli.main, arguments) == 141
    assert capfd.readouterr().err == ""


def test_an_error_that_nobody_reads_says_nothing_else(tmp_path):
    """With `2>&1 | head`, what went wrong has no reader either."""
    assert unread(cli.main, ["keys", "show", str(tmp_path / "none")], name="stderr") == 141


def test_a_broken_pipe_of_something_else_is_an_error_as_any_other():
    group = Commands(name="swarmproof", commands={"say": click.Command("say", callback=_broken_pipe)})
    result = CliRunner().invoke(group, ["say"])
    assert result.exit_code == 1
    assert "Broken pipe" in result.output


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


async def test_a_worker_whose_events_cannot_be_written_fails_once_it_has_ended(monkeypatch):
    """Its slots are handed back first; a full disk is no reason to end as if all was well."""
    monkeypatch.setattr(sys, "stdout", FullDisk())
    stop, has_ended = asyncio.Event(), False
    with pytest.raises(OSError, match="No space left"):
        async with observe_worker(
            WorkerIdentity(run_id=RUN_ID, node="ab", coordinators=()), as_json=True, stop=stop
        ) as observer:
            observer.notify(EventKind.STARTED)
            await stop.wait()
            has_ended = True
    assert has_ended


# -- audit's exit codes


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_audits_answer_is_the_exit_code(monkeypatch, tmp_path, code):
    seen = {}

    async def audited(url, **arguments):
        seen.update(arguments, url=url)
        return code

    monkeypatch.setattr("node.audit.auditor.run_audit", audited)
    arguments = ("--run-id", RUN_ID, "--sample", "3", "--seed", "9", "--json", "--state", str(tmp_path))
    (tmp_path / "kept").touch()
    arguments += ("--source", "http://origin", "--policy-memory", "1.5", "--answers", str(tmp_path / "kept"))
    assert swarmproof("audit", "http://h", *arguments).exit_code == code
    assert callable(seen.pop("prefills"))
    assert seen == {
        "url": "http://h",
        "run_id": RUN_ID,
        "sample": 3,
        "sources": ("http://origin",),
        "witnesses": None,
        "answers": (tmp_path / "kept",),
        "all_": False,
        "seed": 9,
        "state_dir": tmp_path,
        "as_json": True,
        "policy_memory": 3 * 2**29,
    }


@pytest.mark.parametrize("error", [ConfigError("no such address"), ZeroDivisionError()])
def test_an_audit_that_fails_is_never_taken_for_a_disagreement(monkeypatch, error):
    async def failing(*_, **__):
        raise error

    monkeypatch.setattr("node.audit.auditor.run_audit", failing)
    assert swarmproof("audit", "http://h", "--run-id", RUN_ID).exit_code == 2


# -- commands of other packages


def _entry_point(monkeypatch, value):
    entry = metadata.EntryPoint(name="operator", value=value, group="swarmproof.commands")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [entry])


def test_operator_commands_that_are_not_installed_are_missed_by_nobody_else(monkeypatch, tmp_path):
    _entry_point(monkeypatch, "no_such_package.cli:COMMANDS")
    group = Commands(name="swarmproof", commands=dict(cli.main.commands))
    runner = CliRunner()
    assert runner.invoke(group, ["keys", "new", str(tmp_path / "key")]).exit_code == 0
    assert runner.invoke(group, ["--help"]).exit_code == 0
    missing = runner.invoke(group, ["coordinator"])
    assert missing.exit_code == 2
    assert "no_such_package" in missing.output
    assert "[operator]" in missing.output


def test_operator_commands_appear_with_their_variables(monkeypatch):
    _entry_point(monkeypatch, f"{__name__}:COMMANDS")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    group = Commands(name="swarmproof")
    result = CliRunner().invoke(group, ["operate"], env={"SWARMPROOF_OPERATE_RUN_FILE": "x.toml"})
    assert result.output == "x.toml\n"


@click.command()
@click.option("--run-file", "file")
def operate(file):
    click.echo(file)


COMMANDS = [operate]


# -- logs


def test_an_outage_is_a_line_a_minute_not_a_line_a_retry():
    unrepeated = RepeatFilter()

    def passes(text):
        return unrepeated.filter(logging.LogRecord("x", logging.WARNING, "", 0, text, None, None))

    assert [passes("away"), passes("away"), passes("other"), passes("away")] == [True, False, True, False]


@pytest.mark.system
def test_a_worker_that_is_interrupted_while_it_waits_ends_in_peace(tmp_path):
    command = [sys.executable, "-m", "node.cli", "worker", "--coordinator", "http://127.0.0.1:9", "--run-id", RUN_ID]
    process = subprocess.Popen(
        [*command, "--state", str(tmp_path)], cwd=ROOT, env={**os.environ}, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = []
        while not any("is away" in line for line in lines):
            line = process.stderr.readline()
            assert line, lines
            lines.append(line)
        process.terminate()
        _, rest = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in "".join(lines) + rest
    # A summary is due each minute, and on a busy machine the imports alone take one.
    assert len([line for line in lines if "slots generated" not in line]) == 2, lines


def test_an_error_of_several_lines_keeps_them():
    """What pip says, or the choices of an argument, in one line of escapes could not be read."""
    said = CliRunner().invoke(cli.main, ["completion"]).stderr.splitlines()
    assert [line.strip(" ,") for line in said[-4:-1]] == ["bash", "zsh", "fish"]
    assert all(line.startswith("    ") for line in said[-4:-1]), "or one could pass for a hint"
