"""Tutorials are run: what a page shows is typed into real shells, in its order, and what it shows as output compared.

A page is read so:

- A fence of `console` holds lines with a prompt, `$ `, and below each the output it leads to. A line below one that
  ends in a backslash belongs to the command. `^C` on a line of its own is Ctrl-C.
- `title="Terminal 2"`, or anything that begins so, is a shell of its own, in the folder in which the page began.
  Without a title it is the first one. In the first terminal each command has to end, without an error unless `echo $?`
  follows; in the others the page goes on once the last one's output is there, while the command runs on.
- A fence of another language with a title is a file of that name. One without is refused: it would be shown and not
  run.
- In output, `...` is anything; a time of day is any; spaces, lines and the length of rules do not count.

What differs from what a reader types is in `Substitution`, and nowhere else: addresses and ids that the page cannot
know, and the installation, which the environment of the tests stands in for.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

FENCE = re.compile(r"^```(?P<language>\S*)(?P<info>[^\n]*)\n(?P<body>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]*)"')
TERMINAL = re.compile(r"Terminal \d+")
FIRST = "Terminal 1"
COMMAND_SECONDS = 180.0
END_SECONDS = 10.0
CTRL_C = "^C"


@dataclass(frozen=True)
class Command:
    """What is typed in a terminal, or pressed, and what the page says that follows."""

    terminal: str
    typed: str
    shown: str
    is_last: bool = False
    """Of its fence."""


@dataclass(frozen=True)
class Shown:
    """A file whose content the page shows."""

    path: str
    content: str


class Unreadable(AssertionError):
    """The page shows something of which nobody could say whether it works."""


def read_page(markdown: str) -> list[Command | Shown]:
    """Everything on the page that a reader does, in its order."""
    if left := re.search(r"^(?: {4,}|\t)\S.*$", FENCE.sub("", markdown), re.MULTILINE):
        raise Unreadable(f"an indented block is not run: {left[0]!r}")
    done: list[Command | Shown] = []
    for fence in FENCE.finditer(markdown):
        found = TITLE.search(fence["info"])
        title = found[1] if found else ""
        if fence["language"] == "console":
            terminal = TERMINAL.match(title or FIRST)
            if terminal is None:
                raise Unreadable(f"{title!r} does not begin with a terminal's name")
            done += _commands(terminal[0], fence["body"])
        elif title:
            done.append(Shown(title, fence["body"]))
        else:
            raise Unreadable(f"a fence of {fence['language'] or 'nothing'!r} without a title: {fence['body'][:60]!r}")
    return done


def _commands(terminal: str, body: str) -> Iterator[Command]:
    parts = re.split(r"^(?:\$ |(?=\^C$))", body, flags=re.MULTILINE)
    if parts[0]:
        raise Unreadable(f"output without a command: {parts[0]!r}")
    for number, part in enumerate(parts[1:], start=2):
        lines = part.splitlines()
        count = 1
        while lines[count - 1].endswith("\\") and count < len(lines):
            count += 1
        yield Command(terminal, "\n".join(lines[:count]), "\n".join(lines[count:]), number == len(parts))


@dataclass(frozen=True)
class Substitution:
    """What the test types instead of what the page says."""

    ports: Mapping[int, int] = field(default_factory=dict)
    """Ports in commands, files and outputs: others may be taken on the machine that runs the tests."""

    texts: Mapping[str, str] = field(default_factory=dict)
    """Placeholders, such as RUN_ID, that a reader replaces as well."""

    commands: Mapping[str, str] = field(default_factory=dict)
    """Whole commands: those that install."""

    def __call__(self, text: str) -> str:
        for placeholder in sorted(self.texts, key=len, reverse=True):
            text = text.replace(placeholder, self.texts[placeholder])
        return re.sub(r"(?<![\w.])\d{4,5}(?![\w.])", lambda found: self._port(found[0]), text)

    def _port(self, number: str) -> str:
        return str(self.ports.get(int(number), number))

    def typed(self, command: str) -> str:
        """What is typed for `command`."""
        return self.commands.get(command) or self(command)


def matches(output: str, shown: str) -> bool:
    """Whether `output` is what the page shows."""
    text = _plain(output)
    first, *others = (piece.strip() for piece in _plain(shown).split("..."))
    if not others:
        return text == first
    *between, last = others
    if not (text.startswith(first) and text.endswith(last) and len(text) >= len(first) + len(last)):
        return False
    at, end = len(first), len(text) - len(last)
    for piece in between:
        at = text.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True


def _plain(text: str) -> str:
    text = re.sub(r"\b\d\d:\d\d:\d\d\b", "00:00:00", text)
    # A worker whose slots end late goes from one policy to the newest.
    text = re.sub(r"\bpolicy [3-9] is loaded", "policy 3 is loaded", text)
    text = re.sub(r"([─━═┄-])\1{2,}", r"\1\1\1", text)
    return " ".join(text.split())


class Terminal:
    """A shell that is told what a person would type; what it prints is in a file."""

    def __init__(self, name: str, folder: Path, env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        self._at = 0
        self._mark: str | None = None
        with log.open("wb") as output:
            # Who starts these tests in the background has them ignore Ctrl-C, and what is ignored is inherited.
            self._shell = subprocess.Popen(
                ["env", "--default-signal=INT", "bash", "--norc", "--noprofile"],
                cwd=folder,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Each command gets a process group of its own, as in a shell that somebody sits at, so that it gets Ctrl-C.
        self._write("set -m; trap : INT\n")

    @property
    def pid(self) -> int:
        """The shell's."""
        return self._shell.pid

    @property
    def folder(self) -> Path:
        """Where the shell is now."""
        return Path(psutil.Process(self.pid).cwd())

    def type(self, command: str) -> None:
        """Begin `command`; the one before has to have ended."""
        if self.output()[1] is not None:
            self.settle()
        assert self._mark is None, f"{self.name} is still busy"
        self._at = self._log.stat().st_size
        self._mark = f"ended-{secrets.token_hex(8)}"
        ended = f"__status=$?; printf '\\n%s %d\\n' {self._mark} $__status; (exit $__status)"
        self._write(f"{{ {command}\n}} < /dev/null\n{ended}\n")

    def press_ctrl_c(self) -> None:
        """Interrupt what runs in the foreground; what it says from here on is what follows."""
        assert self._mark is not None, f"nothing runs in {self.name}"
        running = [child for child in psutil.Process(self.pid).children() if os.getpgid(child.pid) == child.pid]
        self._at = self._log.stat().st_size
        os.killpg(running[-1].pid, signal.SIGINT)

    def output(self) -> tuple[str, int | None]:
        """What was printed since the last command or Ctrl-C, and the exit status if it has ended."""
        with self._log.open("rb") as log:
            log.seek(self._at)
            printed = log.read().decode(errors="replace")
        if self._mark is None:
            return printed, None
        text, mark, rest = printed.partition(f"\n{self._mark} ")
        return (text, int(rest)) if mark and rest.endswith("\n") else (text, None)

    def settle(self) -> None:
        """The command has ended: another one may be typed."""
        self._mark = None

    def close(self) -> None:
        """End the shell, and whatever it started; what is being started just now is found the next time."""
        deadline, asked = time.monotonic() + END_SECONDS, set[int]()
        while family := [process for process in psutil.process_iter() if _session(process) == self.pid]:
            for process in family:
                if time.monotonic() > deadline:
                    _signal(process, signal.SIGKILL)
                elif process.pid not in asked:
                    asked.add(process.pid)
                    _signal(process, signal.SIGTERM)
            psutil.wait_procs(family, timeout=0.2)
        self._shell.stdin.close()
        self._shell.wait()

    def _write(self, text: str) -> None:
        self._shell.stdin.write(text.encode())
        self._shell.stdin.flush()


def _session(process: psutil.Process) -> int | None:
    """That of a process which has not ended."""
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


class Reader:
    """Somebody who follows a page to the letter."""

    def __init__(self, folder: Path, env: Mapping[str, str], logs: Path, substitution: Substitution) -> None:
        self._folder, self._env, self._logs, self._substitution = folder, env, logs, substitution
        self.terminals: dict[str, Terminal] = {}

    def follow(self, page: Sequence[Command | Shown]) -> None:
        """Do all of it; the first thing that is not as the page says is an AssertionError."""
        for number, step in enumerate(page):
            if isinstance(step, Shown):
                path = self._terminal(FIRST).folder / step.path
                path.write_text(self._substitution(step.content))
                continue
            following = page[number + 1] if number + 1 < len(page) else None
            asks = isinstance(following, Command) and following.typed == "echo $?"
            self._do(step, fails=asks)

    def _terminal(self, name: str) -> Terminal:
        if name not in self.terminals:
            log = self._logs / f"{name}.log"
            self.terminals[name] = Terminal(name, self._folder, self._env, log)
        return self.terminals[name]

    def _do(self, step: Command, *, fails: bool) -> None:
        terminal = self._terminal(step.terminal)
        if step.typed == CTRL_C:
            terminal.press_ctrl_c()
        else:
            terminal.type(self._substitution.typed(step.typed))
        shown = self._substitution(step.shown)
        may_go_on = step.is_last and step.terminal != FIRST and step.typed != CTRL_C
        deadline = time.monotonic() + COMMAND_SECONDS
        while True:
            output, status = terminal.output()
            as_shown = matches(output, shown)
            if status is not None:
                terminal.settle()
                assert as_shown, self._differs(step, output, shown)
                allowed = fails or step.typed == CTRL_C
                assert status == 0 or allowed, f"{step.terminal}: {step.typed!r} ended with {status}:\n{output}"
                return
            if may_go_on and shown and as_shown:
                return
            assert time.monotonic() < deadline, f"it does not end.\n{self._differs(step, output, shown)}"
            time.sleep(0.05)

    def _differs(self, step: Command, output: str, shown: str) -> str:
        others = "".join(
            f"\n-- {name}\n{terminal.output()[0][-2000:]}"
            for name, terminal in self.terminals.items()
            if name != step.terminal
        )
        return f"{step.terminal}: {step.typed!r} printed\n{output}\n-- and the page shows\n{shown}\n{others}"


@contextmanager
def reader(folder: Path, env: Mapping[str, str], *, logs: Path, substitution: Substitution) -> Iterator[Reader]:
    """A reader at terminals that open in `folder`; nothing of theirs is left behind."""
    somebody = Reader(folder, env, logs, substitution)
    try:
        yield somebody
    finally:
        for terminal in somebody.terminals.values():
            terminal.close()
