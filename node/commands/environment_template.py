"""The package that `swarmproof env new` writes: one environment, complete, to be changed into another."""

from __future__ import annotations

import re
from hashlib import blake2b
from string import Template
from typing import Final

from node.environments.base import EnvironmentFault
from node.environments.isolated.lock import normalised

_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}[a-z0-9]")

_PYPROJECT: Final = """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "1.0"
description = "An environment for swarmproof."
requires-python = ">=3.11"

[project.entry-points."swarmproof.environments"]
$name = "$module:$cls"

[tool.setuptools]
py-modules = ["$module"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_MODULE: Final = '''"""The largest of some numbers."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any


class $cls:
    """`Q:max 17 42 8` with `count` numbers below 100; the answer is the largest of them, in decimal.

    Whoever works for a run, verifies it or audits it asks for the same problems and rewards. So both are pure
    functions: no clock, no network, no file, no `random`, no order of a set.
    """

    def __init__(self, count: int = 3) -> None:
        """`count` is an argument that run.toml may set; an exception refuses a wrong one when the run is made."""
        if not 2 <= count <= 9:
            raise ValueError("count is 2 .. 9")
        self.count = count

    def problem(self, index: int) -> dict[str, Any]:
        """Return problem `index`, below 2**63: its prompt, and whatever `reward` needs, which nobody else sees."""
        drawn = blake2b(index.to_bytes(8, "big"), person=b"$person").digest()
        numbers = [byte % 100 for byte in drawn[: self.count]]
        return {"prompt": f"Q:max {' '.join(map(str, numbers))}\\nA:", "answer": str(max(numbers))}

    def reward(self, problem: dict[str, Any], completion: str) -> float:
        """Return the reward in [0, 1] of what a stranger's machine wrote: parse it, and never run it."""
        _, thought_ended, answer = completion.rpartition("</think>")
        return float(bool(thought_ended) and answer.strip() == problem["answer"])
'''

_TEST: Final = '''"""The same prompts for ever, and a reward for the right answer alone: `python -m pytest`."""

from __future__ import annotations

import pytest
from $module import $cls


def test_prompts_do_not_change_between_releases():
    """Another prompt for the same index makes honest work fail: it is another version of this package."""
    assert [$cls().problem(index)["prompt"] for index in (0, 1)] == [$prompts]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("</think>$answer", 1.0), ("1?</think> $answer\\n", 1.0), ("$answer", 0.0), ("</think>$answer.0", 0.0), ("", 0.0)],
)
def test_the_largest_after_the_thought_earns_one(completion, reward):
    assert $cls().reward($cls().problem(0), completion) == reward


@pytest.mark.parametrize("count", [1, 10])
def test_wrong_arguments_are_refused_when_the_run_is_made(count):
    with pytest.raises(ValueError, match="count"):
        $cls(count=count)
'''


def new_package(name: str) -> dict[str, str]:
    """Return the files of a package called `name`, by path; raises EnvironmentFault (bad_name)."""
    if _NAME.fullmatch(name) is None or normalised(name) != name:
        raise EnvironmentFault(
            f"{name!r} cannot be a package: small letters, digits and single hyphens, a letter first", code="bad_name"
        )
    module = name.replace("-", "_")
    values = {
        "name": name,
        "module": module,
        "cls": "".join(part.capitalize() for part in name.split("-")),
        "person": name[:16],
    }
    prompts, answer = _first_problems(name)
    return {
        "pyproject.toml": Template(_PYPROJECT).substitute(values),
        f"{module}.py": Template(_MODULE).substitute(values),
        f"test_{module}.py": Template(_TEST).substitute(values, prompts=", ".join(prompts), answer=answer),
    }


def _first_problems(name: str) -> tuple[list[str], str]:
    """Return the first two prompts of the template's environment, as literals, and the first answer."""
    drawn = [
        [byte % 100 for byte in blake2b(index.to_bytes(8, "big"), person=name[:16].encode()).digest()[:3]]
        for index in (0, 1)
    ]
    prompts = [f'"Q:max {" ".join(map(str, numbers))}\\nA:"' for numbers in drawn]
    return prompts, str(max(drawn[0]))
