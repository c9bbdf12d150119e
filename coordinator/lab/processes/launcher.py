"""Run a program that cannot outlive its parent: `python launcher.py PARENT_PID PROGRAM [ARGUMENT ...]`.

Linux sends the chosen signal when the thread that started this process ends, whatever ended it, and keeps
that wish across exec (prctl(2), PR_SET_PDEATHSIG). So no child is left behind even by a supervisor that is
killed with -9. A program of its own, because Python forbids such calls between fork and exec in a process
with threads. It imports nothing of this package, to start in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Arrange for SIGKILL at the parent's end, then become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the parent ended before its child began")
    os.execv(program[0], program)  # noqa: S606  (no shell: that is the point)


if __name__ == "__main__":
    main()
