"""Check of the sandbox: verifiers and auditors need it for rewards from running code, workers too for tools."""

from __future__ import annotations

from collections.abc import Sequence

from node.doctor.report import Check, fine, problem, warning
from node.environments import check_rewards, load_environment
from node.environments.code import Code
from node.environments.python_tool import check_tool
from node.errors import NodeError
from node.protocol.environment_spec import ToolSpec
from node.protocol.run import EnvironmentSpec
from node.sandbox import Sandbox


def runs_code(environments: Sequence[EnvironmentSpec]) -> bool:
    """Return whether what a policy writes is run as code in one of `environments`."""
    return any(spec.name == Code.name or isinstance(spec.tool, ToolSpec) for spec in environments)


def check_sandbox(environments: Sequence[EnvironmentSpec]) -> Check:
    """Check the sandbox and the reward requirements of the run's `environments` (empty if unknown)."""
    executing = [spec for spec in environments if spec.name == Code.name]
    tools = [spec.tool for spec in environments if isinstance(spec.tool, ToolSpec)]
    try:
        for tool in tools:
            check_tool(tool)
        if executing:
            check_rewards(load_environment(spec) for spec in executing)
        else:
            Sandbox().check()
    except NodeError as error:
        if tools:
            said = f"The policy of this run calls a tool that runs its code, which does not work here: {error}."
            return problem(
                "sandbox", said, advice="Mend it before you work, verify or audit: each of them runs the tool."
            )
        if not executing:
            return fine("sandbox", f"Code cannot be run here, which only verifiers of some runs need: {error}.")
        said = f"This run's rewards come from running code, which does not work here: {error}."
        return warning("sandbox", said, advice="Mend it where you verify or audit; a worker runs none.")
    return fine("sandbox", "Code can be run here: bubblewrap works.")
