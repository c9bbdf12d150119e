"""A process that has imported what others will import, and forks into each of them.

`python zygote_process.py FD MODULES`: `zygote.py` asks over the socket FD, a message for each program. What is forked
is made a child of the process that asked, by way of one in between that ends at once; from there on it is the program,
and nothing is left of this one but its modules.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES, MOST_DESCRIPTORS = 2**18, 64
FORKED_BY_MULTIPROCESSING = "--multiprocessing-fork"
PR_SET_PDEATHSIG = 1


def serve(asking: socket.socket) -> dict[str, Any]:
    """Fork for each request until nobody can ask any more; return in each forked process, with what was asked for."""
    while True:
        message, received, _, _ = socket.recv_fds(asking, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        request = json.loads(message)
        read, write = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(write, str(pid).encode())
                os._exit(0)
            become(request, received)
            return request
        os.waitpid(between, 0)
        pid = os.read(read, 32)
        for descriptor in (read, write, *received):
            os.close(descriptor)
        asking.send(pid)


def become(request: dict[str, Any], received: list[int]) -> None:
    """Make this process look like one that was started for the request."""
    while os.getppid() != request["parent"]:
        time.sleep(0.001)
    if request["tied"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if request["session"]:
        os.setsid()
    place_descriptors(dict(zip(request["descriptors"], received, strict=True)))
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    handle_signals_anew()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if unbuffered else -1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    show_command([sys.executable, *request["arguments"]])
    if request["forks"]:
        multiprocessing.util.spawnv_passfds = fork_again


def handle_signals_anew() -> None:
    """Have the signals that end a program do what they do in a new one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def place_descriptors(wanted: dict[int, int]) -> None:
    """Give each descriptor its number, and close all others."""
    above = max(wanted) + 1
    aside = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for number, descriptor in wanted.items()}
    for number, descriptor in aside.items():
        os.dup2(descriptor, number)
    keep_only(wanted)


def keep_only(numbers: Any) -> None:
    """Close every descriptor but these."""
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number not in numbers:
            with contextlib.suppress(OSError):
                os.close(number)


def show_command(arguments: list[str]) -> None:
    """Have ps(1) and /proc show these arguments, as far as there is room where this process has its own."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def fork_again(path: Any, args: Any, passfds: Any) -> int:
    """Stand in for multiprocessing's start of a new interpreter: fork this one, which has imported everything."""
    arguments = [os.fsdecode(each) for each in args]
    if FORKED_BY_MULTIPROCESSING not in arguments:
        return spawnv_passfds(path, args, passfds)
    pid = os.fork()
    if pid:
        return pid
    signal.set_wakeup_fd(-1)  # an event loop's, whose number is another descriptor's from here on
    handle_signals_anew()
    keep_only({0, 1, 2, *passfds})
    return run_and_exit(arguments[1:])


def run_and_exit(arguments: list[str]) -> NoReturn:
    """Run what `python ARGUMENTS` would, and exit as that does, but leave what was imported as it is.

    Freeing every module takes a second, and extensions complain of what is left.
    """
    code = 1
    try:
        run(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:  # noqa: BLE001  (nothing of this process goes on after it)
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run(arguments: list[str]) -> None:
    """Run what `python ARGUMENTS` would."""
    first = next(at for at, each in enumerate(arguments) if each in ("-m", "-c"))
    what, name, *rest = arguments[first:]
    if "-P" not in arguments[:first]:
        sys.path.insert(0, str(Path.cwd()))
    if what == "-m":
        sys.argv = [name, *rest]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        exec(name, {"__name__": "__main__"})  # multiprocessing's own line


spawnv_passfds = multiprocessing.util.spawnv_passfds

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the programs
    gc.disable()
    for module in sys.argv[2].split(","):
        importlib.import_module(module)
    with contextlib.suppress(ImportError):  # of vLLM, which titles its processes
        importlib.import_module("setproctitle").getproctitle()  # finds its place while that is as it was
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    gc.enable()
    run_and_exit(request["arguments"])
