"""Installed environments: where tests find them, and how they start one without the sandbox around it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from locations import ROOT

from node.environments.base import Environment, EnvironmentFault
from node.environments.isolated.environment import environment_over, load_of
from node.environments.isolated.messages import A, Load, Loaded, Query
from node.environments.isolated.process import GUEST_PROGRAM, LOAD_SECONDS, GuestProcess
from node.environments.isolated.store import EnvironmentStore, InstalledEnvironment
from node.protocol.chat import ChatFormat
from node.protocol.environment_spec import Argument, EnvironmentSpec, LengthSpec, ProblemsSpec

ROOMS = EnvironmentStore(ROOT / "build" / "environments")
"""What `make environments` installs: legacy-examples, v1-examples and reasoning-gym, each with all that it needs."""


def guest_command(python: Path | str = sys.executable, *, variables: dict[str, str] | None = None) -> list[str]:
    """Return the command of a guest in an interpreter, with more environment variables."""
    settings = [f"{name}={value}" for name, value in (variables or {}).items()]
    return ["/usr/bin/env", *settings, str(python), "-P", "-s", "-B", "-u", str(GUEST_PROGRAM)]


class Room:
    """One process that loads one environment after the other: a process of each would import its package again.

    `first` is one that loads for certain, with which the process begins.
    """

    def __init__(self, command: list[str], *, first: str) -> None:
        self.process = GuestProcess(first, command, load_of(EnvironmentSpec(name=first)), answer_seconds=LOAD_SECONDS)
        self._loaded: tuple[int | None, Load] | None = None

    def load(
        self,
        name: str,
        *,
        chat: ChatFormat | None = None,
        bound: int | None = None,
        length: LengthSpec | None = None,
        **arguments: Argument,
    ) -> Environment:
        """Return an environment over this process; raises EnvironmentFault as `load_isolated`."""
        spec = EnvironmentSpec(name=name, arguments=arguments, length=length)
        if bound is not None:
            spec = msgspec.structs.replace(spec, problems=ProblemsSpec(count=bound))
        return environment_over(_Shared(self, spec), spec, chat)

    def ask(self, load: Load, query: Query, answer: type[A]) -> A:
        """Send a query to the environment of `load`."""
        if self._loaded != (self.process.pid, load):
            self.start(load)
        return self.process.ask(query, answer)

    def start(self, load: Load) -> Loaded:
        """Load an environment in place of the last one."""
        self._loaded = None
        loaded = self.process.ask(load, Loaded)
        self._loaded = (self.process.pid, load)
        return loaded


class _Shared(GuestProcess):
    """Stands in for a process of one environment's own."""

    def __init__(self, shared: Room, spec: EnvironmentSpec) -> None:
        self._shared, self._spec = shared, spec

    def start(self) -> Loaded:
        return self._shared.start(load_of(self._spec))

    def ask(self, query: Query, answer: type[A]) -> A:
        return self._shared.ask(load_of(self._spec), query, answer)

    def close(self) -> None:
        """Leave the process to the others."""


def room(name: str) -> InstalledEnvironment:
    """Return the installed environment of the package `name`; skips the test where it is not made."""
    try:
        return ROOMS.select(name)
    except EnvironmentFault:
        pytest.skip(f"the environment {name} is not installed: make environments")
