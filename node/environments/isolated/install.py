"""Make the virtual environment of an environment's package.

Only a person's own command, or the worker that was started with --allow-environments, comes here. Packages of an index
are taken as wheels alone, which run no code while they are installed; a folder of the person's own is built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from node.environments.base import EnvironmentFault
from node.environments.isolated.lock import Lock, lock_of, normalised
from node.environments.isolated.store import (
    LOCK,
    STAGING,
    VENV,
    EnvironmentStore,
    InstalledEnvironment,
    differences,
    site_packages,
)
from node.protocol.environment_spec import PACKAGE_NAME, PACKAGE_VERSION

INSTALL_SECONDS: Final = 1800.0
_MAX_COMPLAINT_LINES: Final = 12
_REQUIREMENT = re.compile(
    rf"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{{0,99}})(?:\[[A-Za-z0-9._,-]{{1,200}}\])?(?:==(?P<version>{PACKAGE_VERSION}))?"
)


def install_package(
    store: EnvironmentStore,
    package: str,
    *,
    extra: Sequence[str] = (),
    find_links: Path | None = None,
    python: Path | None = None,
    build: bool = False,
) -> InstalledEnvironment:
    """Install the newest that fits of `package`: NAME, NAME==VERSION, a wheel, or a folder with a pyproject.toml.

    Args: `extra` are more requirements to install beside it. `find_links` is a folder of wheels to look in as well.
    `python` is the interpreter to use, this one by default. `build` also takes source distributions, whose build runs
    their code. Blocks for minutes. Raises EnvironmentFault.
    """
    path = Path(package)
    if "/" in package or path.suffix == ".whl":
        if not path.exists():
            raise EnvironmentFault(f"there is no {package}", code="install_failed")
        wanted = str(path.resolve())
    else:
        wanted = _checked(package)
    requirements = [wanted, *map(_checked, extra)]

    def name_in(venv: Path, version: str) -> str:
        match = _REQUIREMENT.fullmatch(package)
        return normalised(match["name"]) if match and wanted == package else _requested(venv, version, wanted)

    return _install(store, [*_wheels(build), *requirements], name_in, find_links=find_links, python=python)


def install_lock(
    store: EnvironmentStore,
    lock: Lock,
    *,
    find_links: Path | None = None,
    python: Path | None = None,
    build: bool = False,
) -> InstalledEnvironment:
    """Install exactly what `lock` says, as `install_package`; raises EnvironmentFault (other_lock) if it came out
    otherwise.
    """
    arguments = [*_wheels(build), "--no-deps", *(one.requirement for one in lock.held)]
    return _install(
        store,
        arguments,
        lambda *_: lock.name,
        find_links=find_links,
        python=python or _python(lock.python),
        wanted=lock,
    )


def _install(
    store: EnvironmentStore,
    arguments: Sequence[str],
    name_in: Callable[[Path, str], str],
    *,
    find_links: Path | None,
    python: Path | None,
    wanted: Lock | None = None,
) -> InstalledEnvironment:
    store.folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=store.folder))
    try:
        interpreter = python or Path(sys.executable)
        version = _run([str(interpreter), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
        venv = staging / VENV
        _run([str(interpreter), "-m", "venv", "--without-pip", str(venv)])
        links = [] if find_links is None else ["--find-links", str(find_links.resolve())]
        _run(
            [
                *_pip(staging, interpreter),
                "--python",
                str(venv / "bin" / "python"),
                "install",
                *_QUIET,
                *links,
                *arguments,
            ]
        )
        lock = lock_of(site_packages(venv, python=version), python=version, name=name_in(venv, version))
        if wanted is not None and lock != wanted:
            raise EnvironmentFault(
                f"what was installed is not what the lock says: {'; '.join(differences(wanted, lock)[:5])}",
                code="other_lock",
            )
        shutil.rmtree(staging / _TOOLS, ignore_errors=True)
        (staging / LOCK).write_bytes(lock.encode())
        final = store.folder / lock.file.digest
        if final.exists():  # the same, and perhaps in use
            return InstalledEnvironment(final, lock)
        staging.rename(final)
        return InstalledEnvironment(final, lock)
    except OSError as error:
        raise EnvironmentFault(f"it cannot be installed: {error}", code="install_failed") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


_QUIET = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location")
_TOOLS = "tools"


def _wheels(build: bool) -> Sequence[str]:
    return () if build else ("--only-binary", ":all:")


def _pip(staging: Path, interpreter: Path) -> list[str]:
    """Return the command of a pip: this interpreter's, or one made for the purpose."""
    # Not by importlib.util: setuptools has a hook there for this name.
    if PathFinder.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    _run([str(interpreter), "-m", "venv", str(staging / _TOOLS)])
    return [str(staging / _TOOLS / "bin" / "python"), "-m", "pip"]


def _checked(requirement: str) -> str:
    """Return a requirement that pip takes for nothing else; raises EnvironmentFault."""
    if _REQUIREMENT.fullmatch(requirement) is None:
        raise EnvironmentFault(
            f"{requirement!r} is neither NAME, NAME==VERSION, a wheel nor a folder (./{requirement})",
            code="install_failed",
        )
    return requirement


def _requested(venv: Path, version: str, wanted: str) -> str:
    """Return the distribution that was installed from a path: pip marks it with where it came from."""
    folder = site_packages(venv, python=version)
    for marker in folder.glob("*.dist-info/direct_url.json"):
        if (marker.parent / "REQUESTED").exists():
            name = (marker.parent / "METADATA").read_text(encoding="utf-8").partition("\nName:")[2].partition("\n")[0]
            if re.fullmatch(PACKAGE_NAME, normalised(name.strip())):
                return normalised(name.strip())
    raise EnvironmentFault(f"{wanted} installed no package", code="install_failed")


def _python(version: str) -> Path | None:
    """Return the interpreter of this version on this machine; None for this one. Raises EnvironmentFault."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return None
    found = shutil.which(f"python{version}")
    if found is None:
        raise EnvironmentFault(f"this environment needs Python {version}, which is not here", code="python_version")
    return Path(found)


def _run(command: Sequence[str]) -> str:
    """Return what a command prints; raises EnvironmentFault (install_failed) with its last lines where it fails."""
    # PYTHONPATH would lead pip to this project's packages.
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(  # noqa: S603  (an interpreter and arguments that were checked)
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"{Path(command[0]).name} failed: {error}", code="install_failed") from error
    said = done.stdout.decode(errors="replace")
    if done.returncode:
        last = "\n".join(said.strip().splitlines()[-_MAX_COMPLAINT_LINES:])
        raise EnvironmentFault(f"it cannot be installed:\n{last}", code="install_failed")
    return said
