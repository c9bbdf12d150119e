"""A machine of somebody who has nothing but Python and a wheel: a root of its own, a user who is not root, no checkout.

bubblewrap makes the root. It holds the system's programs, the Python that runs the tests, and a home; the packages that
the wheel asks for are links to those of the tests, in a virtual environment, so that nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from installed import brought_by, link_packages

HOME = "/home/somebody"
PYTHON = f"{HOME}/venv/bin/python"
INSTALL_SECONDS = 250.0


@dataclass(frozen=True)
class CleanMachine:
    """One whose home is `folder`; a command line that begins with `command` runs on it."""

    folder: Path
    origins: frozenset[Path]

    @property
    def command(self) -> tuple[str, ...]:
        """What stands before a program's name to run it there, in the home, as user 1000."""
        seen = {Path(sys.base_prefix), *self.origins}
        return (
            *("bwrap", "--die-with-parent", "--new-session", "--unshare-user", "--uid", "1000", "--gid", "1000"),
            *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", self.folder.name, "--clearenv"),
            *("--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
            *(part for name in ("bin", "lib", "lib64") for part in ("--symlink", f"usr/{name}", f"/{name}")),
            *("--ro-bind", str(self.folder / "resolv.conf"), "/etc/resolv.conf"),  # libp2p wants one
            *(part for path in sorted(map(str, seen)) for part in ("--ro-bind", path, path)),
            *("--bind", str(self.folder), HOME, "--chdir", HOME, "--setenv", "HOME", HOME),
            *("--setenv", "USER", "somebody", "--setenv", "PATH", f"{HOME}/venv/bin:{os.defpath}"),
            *("--setenv", "OMP_NUM_THREADS", "1"),
        )  # fmt: skip

    def run(self, *arguments: str) -> str:
        """Return what a command says there that ends well; AssertionError with all of it if it does not."""
        command = [*self.command, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def clean_machine(folder: Path, wheel: Path, *extras: str) -> CleanMachine:
    """Make a virtual environment as that user, and have its pip install the wheel with `extras`, by no index at all.

    pip takes a package for installed that is there in a version that the wheel allows, and fails without an index for
    one that is not: what the wheel says that it needs is what it has.
    """
    folder.mkdir()
    shutil.copy(wheel, folder)
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    bare = CleanMachine(folder, frozenset())
    bare.run(str(base), "-m", "venv", "--without-pip", "venv")
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    machine = CleanMachine(folder, frozenset(link_packages({"pip", *brought_by(*extras)}, packages)))
    quiet = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-compile")
    machine.run(PYTHON, "-m", "pip", "install", *quiet, f"./{wheel.name}[{','.join(extras)}]")
    return machine
