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
from node.commands.click_ext import Commands, CouldNotRun, reported
from node.commands.hints import HINTS, REPORT, hint_for
from node.errors import ConfigError, NodeError, Refused, StateError
from node.protocol.control import ControlReason, ControlRefusal
from node.protocol.reasons import Reason, Refusal
from shardcast.errors import PeerFault, ShardcastError, TooSlow

ROOTS = {"node_error", "shardcast_error", "coordinator_error"}
"""Of classes that nobody raises: what is known of their hints says next to nothing."""


@cache
def _sources():
    """Every module of the packages that mentions a code: its name and its tree."""
    return list(_read_sources())


def _read_sources():
    for package in (node, coordinator, shardcast, toploc):
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            name = ".".join((package.__name__, *path.relative_to(folder).with_suffix("").parts))
            if "code" in (text := path.read_text()):
                yield name.removesuffix(".__init__"), ast.parse(text)


def _error_classes():
    """Every class of errors that has a code of its own."""
    for name, tree in _sources():
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


def _codes():
    """Every code that is given where an error is raised."""
    for _, tree in _sources():
        for found in ast.walk(tree):
            if isinstance(found, ast.keyword) and found.arg == "code" and isinstance(found.value, ast.Constant):
                yield str(found.value.value)


CLASSES = sorted(set(_error_classes()), key=lambda cls: (cls.__module__, cls.__name__))


def test_every_class_of_errors_has_a_hint():
    for cls in CLASSES:
        hint = hint_for(_raised(cls))
        assert re.fullmatch(r"[A-Z`].*[.`)0-9]|.*slots = 8", hint), f"{cls.__name__}: {hint}"
        if cls.code not in ROOTS:
            assert hint not in {HINTS[root] for root in ROOTS}, f"{cls.__name__} has only what any error has"


def test_the_trees_were_found():
    names = {cls.__name__ for cls in CLASSES}
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
    used = {cls.code for cls in CLASSES} | set(_codes())
    constants = {
        found.value
        for name, tree in _sources()
        if name != "node.commands.hints"
        for found in ast.walk(tree)
        if isinstance(found, ast.Constant) and isinstance(found.value, str)
    }
    assert {key.rpartition(":")[2] for key in HINTS} <= used | constants


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
