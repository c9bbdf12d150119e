"""Every error with which a command can end says what to do: a person who reads "what", and not "what now", gives up."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import coordinator
import node
import shardcast
import toploc
from node.cli import main
from node.commands.click_ext import Commands, CouldNotRun, reported
from node.commands.hints import HINTS, REPORT, hint_for
from node.errors import ConfigError, NodeError, Refused, StateError
from node.protocol.control import ControlReason, ControlRefusal
from node.protocol.reasons import Reason, Refusal
from shardcast.errors import LocalFault, PeerFault, ShardcastError, TooSlow

ROOTS = {"node_error", "shardcast_error", "coordinator_error"}
"""Of classes that nobody raises: what is known of their hints says next to nothing."""


@cache
def _texts():
    """The text of every module of the packages, by name."""
    texts = {}
    for package in (node, coordinator, shardcast, toploc):
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            name = ".".join((package.__name__, *path.relative_to(folder).with_suffix("").parts))
            texts[name.removesuffix(".__init__")] = path.read_text()
    return texts


@cache
def _trees():
    """The tree of every module that gives a code, by name."""
    return {name: ast.parse(text) for name, text in _texts().items() if re.search(r"\bcode\s*=(?!=)", text)}


def _error_classes():
    """Every class of errors that has a code of its own."""
    for name, tree in _trees().items():
        for found in ast.walk(tree):
            if isinstance(found, ast.ClassDef) and any(_sets_code(line) for line in found.body):
                cls = getattr(importlib.import_module(name), found.name)
                if issubclass(cls, Exception):
                    yield cls


def _sets_code(line):
    return isinstance(line, ast.Assign) and [getattr(each, "id", None) for each in line.targets] == ["code"]


def _raised(cls):
    """One, however its constructor looks."""
    return cls.__new__(cls)


@cache
def _classes():
    return sorted(set(_error_classes()), key=lambda cls: (cls.__module__, cls.__name__))


def test_every_class_of_errors_has_a_hint():
    for cls in _classes():
        hint = hint_for(_raised(cls))
        assert re.fullmatch(r"[A-Z`].*[.`)0-9]|.*slots = 8", hint), f"{cls.__name__}: {hint}"
        if cls.code not in ROOTS:
            assert hint not in {HINTS[root] for root in ROOTS}, f"{cls.__name__} has only what any error has"


def test_the_trees_were_found():
    names = {cls.__name__ for cls in _classes()}
    assert {
        "StateError",
        "Unavailable",
        "DoesNotFit",
        "SandboxFailed",
        "CorruptChunk",
        "StorageFault",
        "KeepsDying",
    } <= names
    assert len(names) > 40


def test_no_hint_is_for_a_code_that_nobody_raises():
    others = "".join(text for name, text in _texts().items() if name != "node.commands.hints")
    hinted = {key.rpartition(":")[2] for key in HINTS} - {cls.code for cls in _classes()}
    assert [code for code in sorted(hinted) if f'"{code}"' not in others] == []


def test_a_refusal_says_what_its_reason_asks_for_whoever_says_it():
    for reason in Reason:
        assert hint_for(Refusal(reason, "")) == reason.todo
        assert hint_for(Refused("no", code=reason.value, status=403)) == reason.todo


def test_a_node_that_refuses_control_says_what_to_do():
    for reason in ControlReason:
        assert hint_for(ControlRefusal(reason)).endswith("."), reason


def test_a_code_of_the_broadcast_is_not_taken_for_a_coordinators():
    """`bad_signature` is both, and means another thing in each."""
    assert hint_for(PeerFault("x", code="bad_signature")) == HINTS["bad_signature"]
    assert hint_for(Refused("x", code="bad_signature", status=401)) == Reason.BAD_SIGNATURE.todo


def test_the_hint_of_a_command_comes_before_its_codes_and_that_before_its_class():
    assert hint_for(StateError("x", code="spec_changed")) == HINTS["spec_changed"]
    assert hint_for(StateError("x", code="tomorrows")) == HINTS["state_error"]
    error = ShardcastError("x", code="disk_full")
    assert hint_for(error, "publish") == HINTS["publish:disk_full"]
    assert hint_for(error, "worker") == HINTS["disk_full"]
    assert "name a source" in hint_for(TooSlow("x"))


def test_a_hint_names_the_command_within_its_group(tmp_path):
    assert "`swarmproof dataset add --help`" in hint_for(ConfigError("x"), "dataset add")
    assert "env check" not in hint_for(NodeError("x", code="environment_died"), "env check")
    said = CliRunner().invoke(
        main, ["dataset", "add", __file__, "--prompt", "a", "--answer", "b", "--to", str(tmp_path)]
    )
    assert "`swarmproof dataset add --help`" in said.output, said.output


@click.command()
@click.option("--number", type=int)
@click.option("--what")
def command(number, what):
    errors = {
        "config": ConfigError("that is wrong"),
        "node": NodeError("that is so"),
        "os": PermissionError(13, "Permission denied", "/root/x"),
        "defect": ZeroDivisionError("by nothing"),
    }
    if what == "answer":
        with reported(CouldNotRun):
            raise errors["defect"]
    raise errors[what]


@pytest.mark.parametrize(
    ("arguments", "code", "said", "hint"),
    [
        (("--what", "config"), 1, "that is wrong", "`swarmproof command --help`"),
        (("--what", "os"), 1, "/root/x: Permission denied", "rights"),
        (("--what", "defect"), 70, "Something unexpected happened: ZeroDivisionError: by nothing.", REPORT),
        (("--what", "answer"), 2, "Something unexpected happened", REPORT),
        (("--number", "x"), 2, "Invalid value for '--number'", "`swarmproof command --help`"),
        (("--nope",), 2, "No such option", "`swarmproof command --help`"),
    ],
)
def test_a_failure_is_two_lines_with_its_exit_code(arguments, code, said, hint):
    group = Commands("swarmproof", commands={"command": command})
    result = CliRunner().invoke(group, ["command", *arguments], prog_name="swarmproof")
    lines = [line for line in result.output.splitlines() if not line.startswith("Usage: ")]
    assert result.exit_code == code
    assert [line.partition(": ")[0] for line in lines] == ["Error", "hint"]
    assert said in lines[0]
    assert hint in lines[1]


STANDS_FOR = {
    "COMMAND": "worker",
    "URL": "http://192.0.2.1:8700",
    "ID": "5f" * 32,
    "FILE": "a.key",
    "BACKUP": "/mnt/backup",
    "NEW": "new/",
}
"""What whoever follows a hint writes for its words in capitals."""

ALL_HINTS = [
    *HINTS.items(),
    *((reason.value, text) for reason in Reason for text in (reason.todo, reason.advice)),
    *((reason.value, reason.advice) for reason in ControlReason),
]
WITH_COMMAND = [(key, hint) for key, hint in ALL_HINTS if "`swarmproof " in hint]
WITH_OPTION = [(key, hint) for key, hint in HINTS.items() if "--" in re.sub(r"`[^`]*`", "", hint)]


def command_of(words):
    """The context and the command that the first of `words` name, and the words after these."""
    ctx, found = click.Context(main, info_name="swarmproof"), main
    while words and isinstance(found, click.Group) and not words[0].startswith("-"):
        inner = found.get_command(ctx, words[0])
        assert inner is not None, f"no such command: {words[0]}"
        ctx, found, words = click.Context(inner, info_name=words[0], parent=ctx), inner, words[1:]
    return ctx, found, words


@pytest.mark.parametrize(("key", "hint"), WITH_COMMAND, ids=[key for key, _ in WITH_COMMAND])
def test_a_command_line_in_a_hint_is_one_that_the_program_takes(key, hint):
    """A hint that leads to "No such option" is worse than none: whoever reads it is in trouble already."""
    for line in re.findall(r"`swarmproof ([^`]+)`", hint):
        words = [STANDS_FOR.get(word, word) for word in line.split() if word not in {"-v", "…"}]
        ctx, command, rest = command_of(words)
        if not rest or "--help" in rest:
            continue
        parser = command.make_parser(ctx)
        values, left, _ = parser.parse_args(list(rest))  # an unknown option raises
        assert not left, f"{line}: {left} is more than it takes"
        if key != "unavailable":  # names a part of the doctor's options
            missing = [each.name for each in command.params if each.required and values.get(each.name) in {None, ()}]
            assert not missing, f"{line}: {missing} is missing"


@pytest.mark.parametrize(("key", "hint"), WITH_OPTION, ids=[key for key, _ in WITH_OPTION])
def test_an_option_in_a_hint_is_one_of_the_command_that_failed(key, hint):
    outside = re.sub(r"`[^`]*`", "", hint)
    before = key.rpartition(":")[0]
    for option in re.findall(r"--[a-z-]+", outside):
        if before in main.list_commands(click.Context(main)):
            takers = [command_of([before])[1]]
        else:
            takers = [main, *(found for _, found in _commands(main))]
        taken = {"--help", *(name for taker in takers for each in taker.params for name in each.opts)}
        assert option in taken, f"{key}: nobody takes {option}"


def _commands(group, ctx=None):
    ctx = ctx or click.Context(group)
    for name in group.list_commands(ctx):
        found = group.get_command(ctx, name)
        if isinstance(found, click.Group):
            yield from _commands(found, click.Context(found, info_name=name, parent=ctx))
        elif found is not None:
            yield name, found


def test_a_trainer_is_never_told_to_name_another_folder():
    """It would be refused: a second --state is a second history."""
    for error in (LocalFault("x", code=code) for code in ("in_use", "disk_full", "read_only", "no_access", "damaged")):
        assert not re.search(r"(another|new) (one|folder).* with --state", hint_for(error, "trainer"))
        assert hint_for(error, "trainer") != hint_for(error, "worker")
