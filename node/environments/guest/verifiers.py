"""Environments of PrimeIntellect's verifiers package: which of its two interfaces a module is written for.

Up to 0.3 a module has a function `load_environment` (`verifiers.legacy` since 0.3.1); since then it exports a
`Taskset` of `verifiers.v1`, which is all that is left in 0.4.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

from .adapter import Adapter, Json, Unusable

OWN_TASKSETS = "verifiers.v1.tasksets."
"""Where the package has tasksets of its own, which are named without that."""

_TARGET = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*(:[A-Za-z_][A-Za-z0-9_]*)?")


def load(query: Json) -> Adapter:
    """Load `module` or, in the old interface, `module:Class`; raises Unusable."""
    target = query["target"].rpartition("/")[2].partition("@")[0]  # prime-rl's ids: owner/name@version
    if _TARGET.fullmatch(target) is None:
        raise Unusable("bad_arguments", f"{query['target']!r} does not name a module")
    if importlib.util.find_spec("verifiers") is None:
        raise Unusable("package_missing", "its interpreter has no package verifiers")
    name, _, attribute = target.replace("-", "_").partition(":")
    if name.partition(".")[0] == "verifiers" and not attribute and not name.startswith(OWN_TASKSETS):
        # Its own load_environment imports whatever it is told.
        raise Unusable("refused_environment", f"name an environment class of {name}, as {name}:Class")
    _check_module(name)
    if importlib.util.find_spec("textarena") is not None:
        # Its games download their words each time that one is made; what is not installed is missing all the same.
        importlib.import_module("nltk").download = lambda *_, **__: False  # type: ignore[attr-defined]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise Unusable("environment_missing", f"{name} cannot be imported: {error}") from error
    if not attribute and _exports_taskset(module):
        return importlib.import_module(".verifiers_v1", __package__).TasksetPlay(module, query)  # type: ignore[no-any-return]
    if importlib.util.find_spec("verifiers.legacy") is None and importlib.util.find_spec("verifiers.envs") is None:
        raise Unusable(
            "refused_environment",
            f"{name} exports no Taskset in __all__, and verifiers {metadata.version('verifiers')} has no other "
            "interface: install it with verifiers<0.4, or write it for verifiers.v1",
        )
    return importlib.import_module(".verifiers_legacy", __package__).LegacyReplay(module, attribute, query)  # type: ignore[no-any-return]


def distribution_of(module: str) -> str | None:
    """Return the name of the distribution that a module belongs to; None for a file of its own."""
    owners = metadata.packages_distributions().get(module.partition(".")[0], [])
    return owners[0] if owners else None


def _check_module(name: str) -> None:
    """Raise Unusable unless the module was made for verifiers; imports nothing of it."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or not _requires_verifiers(top):
        raise Unusable("refused_environment", f"{top} does not declare that it is made for verifiers")
    if importlib.util.find_spec(top) is None:
        raise Unusable("environment_missing", f"{top} is not installed here")


def _requires_verifiers(top: str) -> bool:
    """Return whether a top-level module belongs to verifiers, to a package that requires it, or to none (a file)."""
    owners = metadata.packages_distributions().get(top, [])
    needed = (re.split(r"[^A-Za-z0-9._-]", line)[0] for owner in owners for line in metadata.requires(owner) or ())
    return not owners or "verifiers" in owners or "verifiers" in needed


def _exports_taskset(module: ModuleType) -> bool:
    if importlib.util.find_spec("verifiers.v1") is None:
        return False
    if importlib.util.find_spec("verifiers.v1.taskset") is None:
        return False
    base: Any = importlib.import_module("verifiers.v1.taskset").Taskset
    exported = (getattr(module, name, None) for name in getattr(module, "__all__", ()))
    return any(isinstance(each, type) and issubclass(each, base) for each in exported)
