"""The environments of the run that are no part of swarmproof: which are here, and what to do about the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from node.environments.base import EnvironmentFault
from node.environments.isolated.install import install_lock
from node.environments.isolated.lock import read_lock
from node.environments.isolated.store import EnvironmentStore
from node.protocol.environment_spec import FileSpec, PackageSpec
from node.protocol.run import RunSpec

log = logging.getLogger(__name__)


def missing_locks(spec: RunSpec) -> tuple[FileSpec, ...]:
    """Return the locks of the run's environments that are not installed here, each once."""
    here = {one.folder.name for one in EnvironmentStore.default().installed()}
    packages = (one.package for one in spec.environments)
    locks = dict.fromkeys(one.lock for one in packages if isinstance(one, PackageSpec))
    return tuple(lock for lock in locks if lock.digest not in here)


def prepare_environments(spec: RunSpec, files: Mapping[str, Path], *, may_install: bool) -> None:
    """Install the run's environments that are missing, or say how; blocks for minutes where it installs.

    `files` are the run's, by digest, with the `missing_locks` among them. Raises EnvironmentFault where all are missing
    and nothing may be installed, one has changed, or an installation fails.
    """
    store, missing = EnvironmentStore.default(), 0
    for environment in spec.environments:
        package = environment.package
        if not isinstance(package, PackageSpec):
            continue
        try:
            store.find(package)
        except EnvironmentFault as fault:
            if fault.code != "not_installed":
                raise
            lock = files[package.lock.digest]
            if may_install:
                log.info(
                    "installing %s %s for %s, which takes minutes", package.name, package.version, environment.name
                )
                install_lock(store, read_lock(lock.read_bytes()))
                continue
            missing += 1
            log.warning(
                "%s is not installed here, so this node gets no work of it. Read the package %s %s first; then "
                "`swarmproof env install --lock %s` installs it, and a start with --allow-environments whatever the "
                "run names",
                environment.name,
                package.name,
                package.version,
                lock,
            )
    if missing == len(spec.environments):
        raise EnvironmentFault("none of the run's environments is installed here", code="not_installed")
