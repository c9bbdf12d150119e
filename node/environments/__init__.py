"""The environments that a run can train on, by the names that run.toml gives them.

One of this package is a file with a class like `Arithmetic`, and a line here. Other packages name theirs as entry
points (`node.environments.installed`) and need no change here.
"""

from __future__ import annotations

from collections.abc import Iterable

from node.environments.arithmetic import Arithmetic
from node.environments.base import Conversation, Environment, EnvironmentFault, Problem, configure
from node.environments.calculator import Calculator
from node.environments.code import Code
from node.environments.installed import installed_environment, installed_names
from node.environments.lengths import LengthTargets, with_lengths
from node.environments.reverse import Reverse
from node.environments.terminal import TerminalTarget
from node.environments.verifiers import load_verifiers
from node.protocol.run import EnvironmentSpec

REASONING_GYM = "reasoning_gym:"
VERIFIERS = "verifiers:"
_BUILT_IN: dict[str, type[Arithmetic | Reverse | Calculator | Code | TerminalTarget]] = {
    environment.name: environment for environment in (Arithmetic, Reverse, Calculator, Code, TerminalTarget)
}


def load_environment(spec: EnvironmentSpec) -> Environment:
    """Return the environment that `spec` asks for, with its arguments and length targets.

    Raises EnvironmentFault where there is none, or where its package does not work.
    """
    environment = _load(spec)
    if spec.length is not None and isinstance(environment, TerminalTarget):
        # The request would stand on a frame-based policy's screen, where the cursor can go, and not on the reward's.
        raise EnvironmentFault("terminal takes no length targets, which its frames would show", code="bad_arguments")
    return with_lengths(environment, spec)


def _load(spec: EnvironmentSpec) -> Environment:
    if spec.name.startswith(REASONING_GYM):
        from node.environments.reasoning_gym import load_dataset  # noqa: PLC0415  (an optional package, 3 s)

        return load_dataset(spec.name.removeprefix(REASONING_GYM), spec.arguments)
    if spec.name.startswith(VERIFIERS):
        return load_verifiers(spec.name.removeprefix(VERIFIERS), spec.arguments)
    cls = installed_environment(spec.name, taken=_BUILT_IN) or _BUILT_IN.get(spec.name)
    if cls is None:
        known = ", ".join((*_BUILT_IN, REASONING_GYM + "<dataset>", VERIFIERS + "<module>", *installed_names()))
        raise EnvironmentFault(f"no environment {spec.name!r}; there are: {known}", code="unknown_environment")
    environment: Environment = configure(cls, spec.arguments)
    return environment


def check_rewards(environments: Iterable[Environment]) -> None:
    """Raise EnvironmentFault or SandboxFailed where this machine cannot compute the rewards of one of them.

    Only who computes rewards needs to ask: a worker does not.
    """
    for environment in environments:
        plain = environment.inner if isinstance(environment, LengthTargets) else environment
        if isinstance(plain, Code):
            plain.check_machine()


__all__ = ["Conversation", "Environment", "EnvironmentFault", "Problem", "check_rewards", "load_environment"]
