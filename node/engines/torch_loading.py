"""Policies of the torch engine: loaded beside the one before, or read into its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from node.engines.base import DoesNotFit
from node.policy.errors import UnreadablePolicy
from node.policy.file import Blueprint, Policy, load_policy, refill_policy
from node.policy.memory import unless_out_of_memory


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPolicy:
    """A policy, and its version in the run."""

    policy: Policy
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """A policy to be read into the memory of the loaded one, whose architecture it has."""

    path: Path
    blueprint: Blueprint
    version: int
    done: Future[None] = field(default_factory=Future)


@contextlib.contextmanager
def kept_open(path: Path) -> Iterator[Path]:
    """Yield a name that a file has as long as the block takes, whoever deletes `path`; raises UnreadablePolicy."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise UnreadablePolicy(f"cannot read {path}: {error}") from error
    with file:
        pinned = Path(f"/proc/self/fd/{file.fileno()}")
        yield pinned if pinned.exists() else path


def load_beside(path: Path, *, version: int, dtype: torch.dtype, device: torch.device) -> LoadedPolicy:
    """Load a policy into memory of its own; blocks. Raises PolicyError and DoesNotFit."""
    policy = unless_out_of_memory(partial(load_policy, path, dtype=dtype, device=device))
    if policy is None:
        raise _does_not_fit(version, device)
    return LoadedPolicy(policy, version)


def refill(loaded: LoadedPolicy, wanted: Replacement) -> LoadedPolicy | Exception:
    """Read `wanted` into the memory of `loaded`, and return it; blocks.

    Or return why that failed, after which the weights are a mixture: the exception has no frames, which would hold the
    model, for which there has to be room again.
    """
    try:
        policy = unless_out_of_memory(partial(refill_policy, loaded.policy, wanted.path, wanted.blueprint))
    except Exception as error:  # noqa: BLE001  (forwarded to the caller)
        failure = error.with_traceback(None)
        failure.__cause__ = failure.__context__ = None
        return failure
    if policy is None:
        return _does_not_fit(wanted.version, loaded.policy.model.device)
    return LoadedPolicy(policy, wanted.version)


def _does_not_fit(version: int, device: torch.device) -> DoesNotFit:
    return DoesNotFit(f"Policy {version} does not fit on {device}.")
