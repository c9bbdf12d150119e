"""The environments that a run can train on, by the names that run.toml gives them.

One of this package is a file with a class like `Arithmetic`, and a line here. Other packages name theirs as entry
points (`node.environments.installed`) and need no change here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec import UnsetType

from node.environments.arithmetic import Arithmetic
from node.environments.base import Conversation, DatasetChanged, Environment, EnvironmentFault, Problem, configure
from node.environments.calculator import Calculator
from node.environments.chat import Chat, with_chat
from node.environments.code import Code
from node.environments.dataset import DatasetProblems, load_rows
from node.environments.installed import installed_environment, installed_names
from node.environments.lengths import LengthTargets, with_lengths
from node.environments.reverse import Reverse
from node.environments.terminal import TerminalTarget
from node.environments.verifiers import load_verifiers
from node.graders import check_grader
from node.protocol.chat import ChatFormat
from node.protocol.environment_spec import DATASET, EnvironmentSpec
from node.protocol.run import RunSpec

REASONING_GYM = "reasoning_gym:"
VERIFIERS = "verifiers:"
NO_DATASETS: Mapping[str, Path] = MappingProxyType({})
_BUILT_IN: dict[str, type[Arithmetic | Reverse | Calculator | Code | TerminalTarget]] = {
    environment.name: environment for environment in (Arithmetic, Reverse, Calculator, Code, TerminalTarget)
}


def load_environments(spec: RunSpec, datasets: Mapping[str, Path] = NO_DATASETS) -> list[Environment]:
    """Return the run's environments, in its order, with its chat format; raises as `load_environment`."""
    chat = spec.sampling.chat
    if isinstance(chat, str):
        raise EnvironmentFault(f"sampling.chat is still the name {chat!r}: the run has not begun", code="open_chat")
    return [
        load_environment(environment, datasets, chat=None if isinstance(chat, UnsetType) else chat)
        for environment in spec.environments
    ]


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
        for what, is_set in (("length targets", spec.length is not None), ("chat format", chat is not None)):
            if is_set:
                raise EnvironmentFault(f"terminal takes no {what}, which its frames would show", code="bad_arguments")
    return with_lengths(environment, spec)


def _load(spec: EnvironmentSpec, datasets: Mapping[str, Path], chat: ChatFormat | None) -> Environment:
    """Return the environment without length targets."""
    if spec.name.startswith(DATASET):
        return with_chat(load_rows(spec, datasets), chat)
    if spec.name.startswith(VERIFIERS):
        loaded = load_verifiers(spec.name.removeprefix(VERIFIERS), spec.arguments, chat=chat)
        return loaded if loaded.renders_chat else with_chat(loaded, chat)
    if spec.name.startswith(REASONING_GYM):
        from node.environments.reasoning_gym import load_dataset  # noqa: PLC0415  (an optional package, 3 s)

        return with_chat(load_dataset(spec.name.removeprefix(REASONING_GYM), spec.arguments), chat)
    cls = installed_environment(spec.name, taken=_BUILT_IN) or _BUILT_IN.get(spec.name)
    if cls is None:
        known = ", ".join(
            (*_BUILT_IN, DATASET + "<name>", REASONING_GYM + "<dataset>", VERIFIERS + "<module>", *installed_names())
        )
        raise EnvironmentFault(f"no environment {spec.name!r}; there are: {known}", code="unknown_environment")
    environment: Environment = configure(cls, spec.arguments)
    return environment if isinstance(environment, TerminalTarget) else with_chat(environment, chat)


def check_rewards(environments: Iterable[Environment], *, need_answers: bool = True) -> None:
    """Raise EnvironmentFault, SandboxFailed or DatasetFault where this machine cannot compute the rewards of one.

    Only who computes rewards needs to ask: a worker does not. Without `need_answers`, answers that the operator keeps
    may be missing.
    """
    for environment in environments:
        plain = _plain(environment)
        if isinstance(plain, Code):
            plain.check_machine()
        elif isinstance(plain, DatasetProblems) and (need_answers or plain.dataset.has_answers):
            plain.check_answers()
            check_grader(plain.dataset.header.grader)


def lacks_answers(environment: Environment) -> bool:
    """Return whether the operator keeps the answers of `environment`, and they are not here."""
    plain = _plain(environment)
    return isinstance(plain, DatasetProblems) and not plain.dataset.has_answers


def held_out_rows(environment: Environment) -> range | None:
    """Return the indexes of a dataset's held-out problems; None for an environment that has problems without end."""
    plain = _plain(environment)
    return plain.held_out if isinstance(plain, DatasetProblems) else None


def _plain(environment: Environment) -> Environment:
    while isinstance(environment, LengthTargets | Chat):
        environment = environment.inner
    return environment


__all__ = [
    "NO_DATASETS",
    "Conversation",
    "DatasetChanged",
    "Environment",
    "EnvironmentFault",
    "Problem",
    "check_rewards",
    "held_out_rows",
    "lacks_answers",
    "load_environment",
    "load_environments",
]
