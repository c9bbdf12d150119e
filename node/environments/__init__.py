"""The environments that a run can train on, by the names that run.toml gives them.

One of this package is a file with a class like `Arithmetic`, which stands in `_BUILT_IN` and its type. Those of other
packages need no change here: each runs in a process of its own (`node.environments.isolated`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec import UnsetType

from node.environments.arithmetic import Arithmetic
from node.environments.base import Conversation, DatasetChanged, Environment, EnvironmentFault, Problem, configure
from node.environments.calculator import Calculator
from node.environments.chat import Chat
from node.environments.code import Code
from node.environments.dataset import DatasetProblems, load_rows
from node.environments.isolated.environment import load_isolated
from node.environments.isolated.missing import NotInstalled
from node.environments.isolated.sandbox import guest_command
from node.environments.isolated.store import EnvironmentStore
from node.environments.lengths import LengthTargets, with_lengths
from node.environments.python_tool import ChatPythonTool, PythonTool, check_tool, in_format
from node.environments.reverse import Reverse
from node.environments.terminal import TerminalTarget
from node.graders import check_grader
from node.protocol.chat import ChatFormat
from node.protocol.environment_spec import DATASET, EnvironmentSpec, PackageSpec, ToolSpec
from node.protocol.run import RunSpec

REASONING_GYM = "reasoning_gym:"
NO_DATASETS: Mapping[str, Path] = MappingProxyType({})
_BUILT_IN: dict[str, type[Arithmetic | Reverse | Calculator | Code | TerminalTarget]] = {
    environment.name: environment for environment in (Arithmetic, Reverse, Calculator, Code, TerminalTarget)
}


def load_environments(
    spec: RunSpec, datasets: Mapping[str, Path] = NO_DATASETS, *, some: bool = False
) -> list[Environment]:
    """Return the run's environments, in its order, with its chat format; raises as `load_environment`.

    With `some`, those that are not installed here are left to others (`missing_environments`).
    """
    chat = spec.sampling.chat
    if isinstance(chat, str):
        raise EnvironmentFault(f"sampling.chat is still the name {chat!r}: the run has not begun", code="open_chat")
    loaded: list[Environment] = []
    for environment in spec.environments:
        try:
            shown = None if isinstance(chat, UnsetType) else chat
            loaded.append(load_environment(environment, datasets, chat=shown))
        except EnvironmentFault as fault:
            if not (some and fault.code == "not_installed"):
                raise
            loaded.append(NotInstalled(environment.name, fault))
    return loaded


def known_answer(spec: EnvironmentSpec, problem: int) -> str | None:
    """Return the right answer of a problem of one of this package's environments, which anybody can derive.

    None for others, and where what is right is not one text.
    """
    cls = _BUILT_IN.get(spec.name)
    if cls is None:
        return None
    answer = configure(cls, spec.arguments).problem(problem).data.get("answer")
    return answer if isinstance(answer, str) else None


def missing_environments(environments: Iterable[Environment]) -> tuple[int, ...]:
    """Return which of a run's environments, by their place in its list, are not installed here."""
    return tuple(number for number, one in enumerate(environments) if isinstance(one, NotInstalled))


def load_environment(
    spec: EnvironmentSpec, datasets: Mapping[str, Path] = NO_DATASETS, *, chat: ChatFormat | None = None
) -> Environment:
    """Return the environment that `spec` asks for, with its arguments, its length targets and the run's chat format.

    `datasets` are the files of datasets that are here, by digest. Raises EnvironmentFault where there is none, or where
    its package does not work, and DatasetFault where the file it needs is missing or another.
    """
    environment = _load(spec, datasets, chat)
    if isinstance(environment, TerminalTarget):
        # Either would stand on a frame-based policy's screen, where the cursor can go, and not on the reward's.
        for what, is_set in (
            ("length targets", spec.length is not None),
            ("chat format", chat is not None),
            ("tool", isinstance(spec.tool, ToolSpec)),
        ):
            if is_set:
                raise EnvironmentFault(f"terminal takes no {what}, which its frames would show", code="bad_arguments")
    return with_lengths(environment, spec)


def _load(spec: EnvironmentSpec, datasets: Mapping[str, Path], chat: ChatFormat | None) -> Environment:
    """Return the environment without length targets."""
    if spec.name.startswith(DATASET):
        return in_format(load_rows(spec, datasets), spec, chat)
    if isinstance(spec.package, PackageSpec):
        if spec.name in _BUILT_IN:
            raise EnvironmentFault(f"{spec.name} is swarmproof's own: leave its package out", code="claimed_twice")
        installed = EnvironmentStore.default().find(spec.package)
        return load_isolated(spec, guest_command(installed), chat)
    if spec.name.startswith(REASONING_GYM):
        from node.environments.reasoning_gym import load_dataset  # noqa: PLC0415  (an optional package, 3 s)

        return in_format(load_dataset(spec.name.removeprefix(REASONING_GYM), spec.arguments), spec, chat)
    cls = _BUILT_IN.get(spec.name)
    if cls is None:
        known = ", ".join((*_BUILT_IN, DATASET + "<name>", REASONING_GYM + "<dataset>"))
        raise EnvironmentFault(
            f"no environment {spec.name!r}; there are: {known}, and those of packages, which run.toml names with their "
            "package",
            code="unknown_environment",
        )
    environment: Environment = configure(cls, spec.arguments)
    return environment if isinstance(environment, TerminalTarget) else in_format(environment, spec, chat)


def check_rewards(environments: Iterable[Environment], *, need_answers: bool = True) -> None:
    """Raise EnvironmentFault, SandboxFailed or DatasetFault where this machine cannot compute the rewards of one.

    Only who computes rewards needs to ask: a worker asks `check_replies`. Without `need_answers`, answers that the
    operator keeps may be missing.
    """
    environments = list(environments)
    check_replies(environments)
    for environment in environments:
        plain = _plain(environment)
        if isinstance(plain, Code):
            plain.check_machine()
        elif isinstance(plain, DatasetProblems) and (need_answers or plain.dataset.has_answers):
            plain.check_answers()
            check_grader(plain.dataset.header.grader)


def check_replies(environments: Iterable[Environment]) -> None:
    """Raise EnvironmentFault or SandboxFailed where this machine cannot run the tool that one of them has."""
    for environment in environments:
        shown = environment.inner if isinstance(environment, LengthTargets) else environment
        if isinstance(shown, PythonTool | ChatPythonTool):
            check_tool(shown.tool)


def lacks_answers(environment: Environment) -> bool:
    """Return whether the operator keeps the answers of `environment`, and they are not here."""
    plain = _plain(environment)
    return isinstance(plain, DatasetProblems) and not plain.dataset.has_answers


def held_out_rows(environment: Environment) -> range | None:
    """Return the indexes of a dataset's held-out problems; None for an environment that has problems without end."""
    plain = _plain(environment)
    return plain.held_out if isinstance(plain, DatasetProblems) else None


def _plain(environment: Environment) -> Environment:
    while isinstance(environment, LengthTargets | Chat | PythonTool):
        environment = environment.inner
    return environment


__all__ = [
    "NO_DATASETS",
    "Conversation",
    "DatasetChanged",
    "Environment",
    "EnvironmentFault",
    "Problem",
    "check_replies",
    "check_rewards",
    "held_out_rows",
    "lacks_answers",
    "load_environment",
    "load_environments",
    "missing_environments",
]
