"""What is there of a `verifiers.v1` runtime: scripts that only calculate, such as those that verify an answer.

The package runs such a script by `uv`, in a machine of the rollout's, with what its head says that it requires. Here it
runs in this process, where that has to be installed: it is the environment author's own, as rewards are.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
import traceback
from importlib import metadata
from types import ModuleType
from typing import Any
from unittest import mock

from .adapter import refuse_use

_REQUIREMENTS = re.compile(r"^#\s*dependencies\s*=\s*\[(.*?)\]", re.MULTILINE | re.DOTALL)
_REQUIREMENT = re.compile(r"""["']\s*([A-Za-z0-9._-]+)""")


class ScriptRuntime:
    """Stands in for the package's Runtime."""

    def __getattr__(self, name: str) -> Any:
        refuse_use(f"it uses runtime.{name}, a machine of its own: what it does there nobody else can repeat")

    async def prepare_uv_script(self, script: str | bytes, *_: Any, **__: Any) -> list[str]:
        """Refuse a `script` that requires what is not installed."""
        found = _REQUIREMENTS.search(_text(script))
        for name in _REQUIREMENT.findall(found[1] if found else ""):
            if not any(metadata.distributions(name=name)):
                refuse_use(
                    f"a script of its runtime requires {name}: install that beside it (env install --with {name})"
                )
        return []

    async def run_uv_script(self, script: str | bytes, args: list[str] | None = None, *_: Any, **__: Any) -> Any:
        """Run `script` and return its ProgramResult."""
        await self.prepare_uv_script(script)
        said, complained, code = io.StringIO(), io.StringIO(), 0
        module = ModuleType("__main__")
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(complained),
            mock.patch.object(sys, "argv", ["script", *(args or [])]),
        ):
            try:
                exec(compile(_text(script), "script", "exec"), vars(module))  # noqa: S102  (the author's own)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except Exception:  # noqa: BLE001  (a program ends by it)
                code = 1
                complained.write(traceback.format_exc())
        result = importlib.import_module("verifiers.v1.runtimes").ProgramResult
        return result(exit_code=code, stdout=said.getvalue(), stderr=complained.getvalue())


def _text(script: str | bytes) -> str:
    return script.decode() if isinstance(script, bytes) else script
