"""Root file system of a sandboxed program: an interpreter and its library, read-only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from node.sandbox.errors import SandboxFailed

PYTHON_VERSION: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
_HARNESS = Path(__file__).with_name("harness.py")
_SESSION = Path(__file__).with_name("session.py")
_PACKAGES = ("site-packages", "dist-packages")
_LIBRARY = re.compile(r"\s*(?:(?P<name>\S+) => )?(?P<path>/\S+) \(0x[0-9a-f]+\)")
LOADER_SECONDS = 30.0

COMMAND: Final = (f"/python/bin/python{PYTHON_VERSION}", "-P", "-s", "-S", "-B", "-X", "utf8", "/harness.py")
"""-S: no packages. -P and -s: no module from the folder or the user's home. -I would ignore PYTHONHASHSEED too."""

ENVIRONMENT: Final = {
    "PYTHONHASHSEED": "0",
    "LD_LIBRARY_PATH": "/lib",
    # glibc's sin, exp, log and pow have a last digit of their own on processors with fused multiply-add.
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4,-FMA_Usable,-FMA4_Usable",
}


@cache
def mounts() -> tuple[str, ...]:
    """Return bubblewrap's arguments that build the root; paths inside are the same on every machine.

    Raises SandboxFailed (sandbox_unusable) if the interpreter's parts cannot be found.
    """
    interpreter, library = os.path.realpath(sys.executable), sysconfig.get_path("stdlib")
    inside = f"/python/{sys.platlibdir}/python{PYTHON_VERSION}"
    arguments = ["--ro-bind", interpreter, COMMAND[0], "--ro-bind", library, inside]
    for packages in _PACKAGES:
        if (Path(library) / packages).is_dir():
            arguments += ["--tmpfs", f"{inside}/{packages}", "--remount-ro", f"{inside}/{packages}"]
    for name, path in _shared_libraries(interpreter):
        arguments += ["--ro-bind", path, name if name.startswith("/") else f"/lib/{name}"]
    arguments += ["--ro-bind", str(_SESSION), f"/{_SESSION.name}"]
    arguments += ["--ro-bind", str(_HARNESS), COMMAND[-1], "--dev-bind", "/dev/null", "/dev/null"]
    return (*arguments, "--remount-ro", "/")


def _shared_libraries(interpreter: str) -> Iterator[tuple[str, str]]:
    """Yield (name, path) of the interpreter's shared libraries; the loader's name is its path."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    try:
        # The loader prints them and runs nothing (ld.so(8)), as ldd does.
        listed = subprocess.run(  # noqa: S603  (our own interpreter)
            [interpreter],
            env=kept | {"LD_TRACE_LOADED_OBJECTS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=LOADER_SECONDS,
        ).stdout.decode()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise SandboxFailed(f"{interpreter}'s libraries cannot be found: {error}", code="sandbox_unusable") from error
    found = [match for line in listed.splitlines() if (match := _LIBRARY.match(line))]
    if not found:
        raise SandboxFailed(f"the loader of {interpreter} names no libraries", code="sandbox_unusable")
    for match in found:
        yield match["name"] or match["path"], match["path"]
