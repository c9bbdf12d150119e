"""Environments of other packages, which name theirs as entry points of the group `swarmproof.environments`.

A package is imported when a run names its environment, and not before: which packages are there is decided by whoever
installed them on this machine, never by a run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import metadata
from typing import Any, Final

import msgspec

from node.environments.base import EnvironmentFault

GROUP: Final = "swarmproof.environments"
_OURS: Final = "swarmproof"


def installed_names() -> list[str]:
    """Return the names of all environments that installed packages offer."""
    return sorted(_entries().names)


def installed_environment(name: str, *, taken: Iterable[str]) -> type[Any] | None:
    """Return the class behind `name`; None if no installed package offers it. `taken` are this package's own names.

    Raises EnvironmentFault: `claimed_twice`, `broken_environment` where the import fails, or `not_an_environment`.
    """
    entries = list(_entries().select(name=name))
    packages = [_OURS] * (name in taken) + sorted(_package(entry) for entry in entries)
    if len(packages) > 1:
        raise EnvironmentFault(
            f"environment {name!r} is claimed by {' and '.join(packages)}; uninstall all but one of them",
            code="claimed_twice",
        )
    if not entries or name in taken:
        return None
    try:
        loaded = entries[0].load()
    except Exception as error:  # an import runs whatever its author wrote
        raise EnvironmentFault(
            f"environment {name!r} of {packages[0]} cannot be imported: {type(error).__name__}: {error}",
            code="broken_environment",
        ) from error
    missing = _what_is_missing(loaded, name)
    if missing is not None:
        raise EnvironmentFault(f"environment {name!r} of {packages[0]} {missing}", code="not_an_environment")
    return loaded  # type: ignore[no-any-return]


@functools.cache
def _entries() -> metadata.EntryPoints:
    """Return every offered environment. Once: it reads the metadata of each installed package, a tenth of a second."""
    return metadata.entry_points(group=GROUP)


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _what_is_missing(loaded: object, name: str) -> str | None:
    if not (isinstance(loaded, type) and issubclass(loaded, msgspec.Struct)):
        return "is no msgspec.Struct, whose fields are its arguments"
    if getattr(loaded, "name", None) != name:
        return f"calls itself {getattr(loaded, 'name', None)!r}"
    for method in ("problem", "reward"):
        if not callable(getattr(loaded, method, None)):
            return f"has no method {method}"
    return None
