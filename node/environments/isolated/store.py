"""The environments that are installed on this machine, each in a folder named by the digest of its lock."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.environments.base import EnvironmentFault
from node.environments.isolated.lock import Lock, lock_of, read_lock
from node.protocol.environment_spec import PackageSpec

VARIABLE: Final = "SWARMPROOF_ENVIRONMENTS"
LOCK: Final = "lock.txt"
VENV: Final = "venv"
STAGING: Final = ".new-"


@dataclass(frozen=True, slots=True)
class InstalledEnvironment:
    """A package's virtual environment in `folder`, and what it holds."""

    folder: Path
    lock: Lock

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / VENV / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """The folder of its distributions."""
        return site_packages(self.folder / VENV, python=self.lock.python)


def site_packages(venv: Path, *, python: str) -> Path:
    """Return the folder of a virtual environment's distributions; `python` is major and minor version."""
    return venv / "lib" / f"python{python}" / "site-packages"


class EnvironmentStore:
    """The folder of all installed environments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def default(cls, variables: Mapping[str, str] = os.environ) -> EnvironmentStore:
        """Return the one that every command uses: SWARMPROOF_ENVIRONMENTS, or ~/.swarmproof/environments."""
        return cls(Path(variables.get(VARIABLE) or Path.home() / ".swarmproof" / "environments"))

    def installed(self) -> list[InstalledEnvironment]:
        """Return all that are here, by name; one whose lock cannot be read is left out."""
        return sorted(self._readable(), key=lambda one: (one.lock.name, one.lock.version, one.folder.name))

    def find(self, package: PackageSpec) -> InstalledEnvironment:
        """Return the environment that a run names; raises EnvironmentFault: not_installed, or environment_changed
        where what is installed is no longer what its lock says.
        """
        folder = self.folder / package.lock.digest
        try:
            lock = read_lock((folder / LOCK).read_bytes())
        except OSError as error:
            raise EnvironmentFault(
                f"the environment {package.name} {package.version} (lock {package.lock.digest[:16]}…) is not installed "
                "here",
                code="not_installed",
            ) from error
        found = InstalledEnvironment(folder, lock)
        if lock.package != package:
            raise EnvironmentFault(f"{folder / LOCK} is no longer the lock it was", code="environment_changed")
        self.check_unchanged(found)
        return found

    def check_unchanged(self, installed: InstalledEnvironment) -> None:
        """Raise EnvironmentFault (environment_changed) where other distributions are installed than the lock says."""
        lock = installed.lock
        try:
            now = lock_of(installed.site_packages, python=lock.python, name=lock.name)
        except (OSError, EnvironmentFault) as error:
            raise EnvironmentFault(f"{installed.folder} is damaged: {error}", code="environment_changed") from error
        if now != lock:
            others = ", ".join(differences(lock, now)[:3])
            raise EnvironmentFault(f"{installed.folder} has changed since: {others}", code="environment_changed")

    def select(self, name: str) -> InstalledEnvironment:
        """Return the one that a person means by a package's name, NAME==VERSION or the beginning of a lock's digest.

        Raises EnvironmentFault: not_installed, or several_environments.
        """
        found = [
            one
            for one in self.installed()
            if name in (one.lock.name, f"{one.lock.name}=={one.lock.version}")
            or (len(name) >= 6 and one.folder.name.startswith(name))
        ]
        if not found:
            raise EnvironmentFault(f"no environment package {name} is installed here", code="not_installed")
        if len(found) > 1:
            which = ", ".join(f"{one.lock.version} ({one.folder.name[:12]})" for one in found)
            raise EnvironmentFault(f"there are several environments {name}: {which}", code="several_environments")
        return found[0]

    def remove(self, installed: InstalledEnvironment) -> None:
        """Delete an environment; raises OSError."""
        shutil.rmtree(installed.folder)

    def _readable(self) -> Iterator[InstalledEnvironment]:
        if not self.folder.is_dir():
            return
        for folder in self.folder.iterdir():
            try:
                lock = read_lock((folder / LOCK).read_bytes())
            except (OSError, EnvironmentFault):
                continue
            if folder.name == lock.file.digest:
                yield InstalledEnvironment(folder, lock)


def differences(wanted: Lock, found: Lock) -> list[str]:
    """Return what distinguishes two locks, a phrase each."""
    said = [f"Python {found.python} instead of {wanted.python}"] if found.python != wanted.python else []
    there, here = ({one.name: one for one in lock.held} for lock in (wanted, found))
    for name in sorted(there.keys() | here.keys()):
        want, have = there.get(name), here.get(name)
        if want is None:
            said.append(f"{name} is not in the lock")
        elif have is None:
            said.append(f"{want.requirement} is missing")
        elif want.version != have.version:
            said.append(f"{name} is {have.version} instead of {want.version}")
        elif want != have:
            said.append(f"the files of {want.requirement} differ")
    return said
