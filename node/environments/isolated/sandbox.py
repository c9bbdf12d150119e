"""The command that runs an installed environment in bubblewrap.

It sees its interpreter, its distributions and the system's libraries, all read-only, and an empty /tmp in memory; no
network, no process but its own, no variable of this process. The guest (`node.environments.guest`) limits its memory
before it imports anything; time is limited by `node.environments.isolated.process`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from node.environments.base import EnvironmentFault
from node.environments.isolated.process import GUEST_PROGRAM, GUEST_VARIABLES
from node.environments.isolated.store import VENV, InstalledEnvironment
from node.sandbox.bubblewrap import INSTALL

_GUEST_INSIDE: Final = "/guest"
TEMPORARY_BYTES: Final = 64 * 1024 * 1024
VARIABLES: Final[Mapping[str, str]] = MappingProxyType({**GUEST_VARIABLES, "HOME": "/tmp"})  # noqa: S108
_ISOLATION: Final = (
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"),
    *("--uid", "65534", "--gid", "65534", "--hostname", "environment", "--cap-drop", "ALL"),
    *("--die-with-parent", "--new-session", "--clearenv"),
)
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")


def guest_command(installed: InstalledEnvironment, variables: Mapping[str, str] = VARIABLES) -> list[str]:
    """Return the command that starts the guest of `installed`; raises EnvironmentFault (sandbox_missing).

    `variables` are all that it gets.
    """
    bubblewrap = shutil.which("bwrap", path=os.pathsep.join(filter(os.path.isabs, os.get_exec_path())))
    if bubblewrap is None:
        raise EnvironmentFault(f"bubblewrap is missing; {INSTALL}", code="sandbox_missing")
    settings = [part for name, value in variables.items() for part in ("--setenv", name, value)]
    inside = [str(installed.python), "-P", "-s", "-B", "-u", f"{_GUEST_INSIDE}/{GUEST_PROGRAM.name}"]
    return [bubblewrap, *_ISOLATION, *settings, *_mounts(installed), "--chdir", "/", "--", *inside]


def _mounts(installed: InstalledEnvironment) -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for folder in map(Path, _SYSTEM):
        if folder.is_symlink():
            yield from ("--symlink", str(folder.readlink()), str(folder))
        elif folder.is_dir():
            yield from ("--ro-bind", str(folder), str(folder))
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    yield from ("--proc", "/proc", "--dev", "/dev", "--size", str(TEMPORARY_BYTES), "--tmpfs", "/tmp")  # noqa: S108
    base = _base_prefix(installed)
    if not base.is_relative_to("/usr"):
        yield from ("--ro-bind", str(base), str(base))
    yield from ("--ro-bind", str(installed.folder), str(installed.folder))
    yield from ("--ro-bind", str(GUEST_PROGRAM.parent), _GUEST_INSIDE, "--remount-ro", "/")


def _base_prefix(installed: InstalledEnvironment) -> Path:
    """Return the installation of Python that a virtual environment was made of, by its own note of it."""
    note = (installed.folder / VENV / "pyvenv.cfg").read_text(encoding="utf-8")
    for line in note.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            return Path(value.strip()).parent
    raise EnvironmentFault(f"{installed.folder} names no Python", code="environment_changed")
