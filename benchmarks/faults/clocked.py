"""Run Python under a wall clock that others set: `python clocked.py LIBRARY FILE [ARGUMENT ...]`.

LIBRARY is `clock.c`, compiled, which adds the offset in FILE to the time of day, and to nothing else. libfaketime would
do so, too, but takes part in sleeps as well, which then fail with EINVAL now and then. The process keeps its id.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


def has_compiler() -> bool:
    """Whether `compile_library` can work: it wants a C compiler under its common name."""
    return shutil.which("cc") is not None


def compile_library(folder: Path) -> Path:
    """Make LIBRARY in `folder`."""
    library = folder / "clock.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return library


def set_clock(file: Path, offset_s: int) -> None:
    """Move the clock of who runs under `file` to this many seconds from the truth, in one write."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, struct.pack("=q", offset_s), 0)
    finally:
        os.close(descriptor)


def main() -> None:
    """Become Python under that clock."""
    library, file, *arguments = sys.argv[1:]
    os.environ |= {"LD_PRELOAD": library, "OFFSET_FILE": file}
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606  (no shell: that is the point)


if __name__ == "__main__":
    main()
