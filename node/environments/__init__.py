"""The registry: a run's `[[environments]]` entry in, an environment out.

A new environment is one file with a class like `Arithmetic`, and one line here.
"""

from __future__ import annotations

from node.environments.arithmetic import Arithmetic
from node.environments.base import Environment, EnvironmentFault, Problem, configure
from node.environments.reverse import Reverse
from node.protocol.run import EnvironmentSpec

REASONING_GYM = "reasoning_gym:"
_BUILT_IN: dict[str, type[Arithmetic | Reverse]] = {
    environment.name: environment for environment in (Arithmetic, Reverse)
}


def load_environment(spec: EnvironmentSpec) -> Environment:
    """The environment that `spec` names, with its arguments; raise EnvironmentFault where there is none."""
    if spec.name.startswith(REASONING_GYM):
        from node.environments.reasoning_gym import load_dataset  # noqa: PLC0415  (an optional package, 3 s)

        return load_dataset(spec.name.removeprefix(REASONING_GYM), spec.arguments)
    cls = _BUILT_IN.get(spec.name)
    if cls is None:
        known = ", ".join((*_BUILT_IN, REASONING_GYM + "<dataset>"))
        raise EnvironmentFault(f"no environment {spec.name!r}; there are: {known}", code="unknown_environment")
    return configure(cls, spec.arguments)


__all__ = ["Environment", "EnvironmentFault", "Problem", "load_environment"]
