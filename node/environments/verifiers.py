"""`verifiers:<module>`: environments written for PrimeIntellect's verifiers package (MIT), as they are.

The environment runs in a process of its own (`node.environments.verifiers_child`), which is ended when an answer takes
too long and started again for the next. It is installed by whoever takes part, never downloaded, and its data set has
to be there too. What this does not guarantee: that its problems and rewards are the same everywhere. That is its
author's; the pins `package_version`, `environment_version` and `dataset_digest` make a run say what it was made with.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from node.environments.base import EnvironmentFault, Problem, draws
from node.environments.chat import Form
from node.environments.verifiers_messages import MAX_FRAME_BYTES, Ask, Fault, Load, Loaded, Said
from node.parquet_frames import BrokenFrame, receive_frame, send_frame

log = logging.getLogger(__name__)

LOAD_SECONDS = 300.0
ANSWER_SECONDS = 30.0
"""For a prompt, a reply or a reward; what takes longer is nobody's fault, and the verdict is indeterminate."""

_TARGET = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*(:[A-Za-z_][A-Za-z0-9_]*)?")
_KEPT = ("HOME", "PATH", "TMPDIR", "LD_LIBRARY_PATH", "HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments that are ours; the others are the environment's. Names as in docs/environments.md."""

    chat: Form = "plain"
    package_version: str | None = None
    environment_version: str | None = None
    dataset_digest: str | None = None
    python: str | None = None


class Verifiers:
    """An environment of one turn: problem `index` is the row of its data set that is drawn from it."""

    def __init__(self, name: str, child: Child, rows: int) -> None:
        self.name = name
        self._child = child
        self._rows = rows

    def problem(self, index: int) -> Problem:
        row = next(draws(self.name, index)) % self._rows
        said = self._ask("problem", row)
        return Problem(said.text or "", {"row": row}, opening=said.opening)

    def reward(self, problem: Problem, completion: str) -> float:
        return self._ask("reward", problem.data["row"], completion).reward

    def _ask(self, what: Literal["problem", "reply", "reward"], row: int, *turns: str) -> Said:
        # Half a surrogate pair, which no decoder of tokens makes, has no encoding.
        sendable = tuple(turn.encode("utf-8", "replace").decode() for turn in turns)
        answer = self._child.ask(Ask(what, row, sendable))
        assert isinstance(answer, Said)
        return answer


class VerifiersConversation(Verifiers):
    """One of several turns, with tools or without; a `Conversation`."""

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        return self._ask("reply", problem.data["row"], *turns).text

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return self._ask("reward", problem.data["row"], *turns).reward


class Child:
    """The process with the environment; answers one question at a time, from any thread."""

    def __init__(self, name: str, load: Load) -> None:
        self._name, self._load = name, load
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[Any, Any] | None = None

    def start(self) -> Loaded:
        """Load the environment. Raises EnvironmentFault."""
        with self._lock:
            return self._start()

    def ask(self, question: Ask) -> Said | Loaded:
        """The answer; raises EnvironmentFault where there is none in time."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._drop()
                self._start()
            return self._exchange(question, seconds=ANSWER_SECONDS)

    def _start(self) -> Loaded:
        # -P: the folder that this process happens to run in is no place to import from.
        command = [sys.executable, "-P", "-m", "node.environments.verifiers_child"]
        try:
            self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_variables(),
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFault(f"{self._name} cannot be started: {error}") from error
        self._ending = weakref.finalize(self, _end, self._process)
        loaded = self._exchange(self._load, seconds=LOAD_SECONDS)
        assert isinstance(loaded, Loaded)
        return loaded

    def _exchange(self, question: Load | Ask, *, seconds: float) -> Said | Loaded:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _kill(process)

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            send_frame(process.stdin, msgspec.json.encode(question))
            frame = receive_frame(process.stdout, max_bytes=MAX_FRAME_BYTES)
            answer = msgspec.json.decode(frame, type=Said | Loaded | Fault)
        except (OSError, EOFError, BrokenFrame, msgspec.DecodeError) as error:
            self._drop()
            if expired.is_set():
                raise EnvironmentFault(f"{self._name} took more than {seconds:g} s", code="environment_slow") from error
            raise EnvironmentFault(f"{self._name} ended by itself: {error!r}", code="environment_died") from error
        except BaseException:
            self._drop()  # half an exchange would be taken for the next answer
            raise
        finally:
            timer.cancel()
        if isinstance(answer, Fault):
            if isinstance(question, Load):
                self._drop()
            raise EnvironmentFault(f"{self._name}: {answer.detail}", code=answer.code)
        return answer

    def _drop(self) -> None:
        self._process = None
        if self._ending is not None:
            self._ending()


def load_verifiers(target: str, arguments: Mapping[str, Any]) -> Verifiers:
    """The environment that `target` names: a module with `load_environment`, or `module:Class`.

    Raises EnvironmentFault: package_missing, bad_arguments, environment_missing, refused_environment,
    environment_failed, needs_network, environment_slow, environment_died, and a pin's name where it does not hold.
    """
    name = f"verifiers:{target}"
    if _TARGET.fullmatch(target) is None:
        raise EnvironmentFault(f"{name} names no module", code="bad_arguments")
    if find_spec("verifiers") is None:
        raise EnvironmentFault(
            "this run needs the verifiers package: pip install 'veriswarm[verifiers]'", code="package_missing"
        )
    ours = {key: value for key, value in arguments.items() if key in Settings.__struct_fields__}
    try:
        settings = msgspec.convert(ours, Settings)
    except msgspec.ValidationError as error:
        raise EnvironmentFault(f"{name}: {error}", code="bad_arguments") from error
    theirs = {key: value for key, value in arguments.items() if key not in ours}
    child = Child(name, Load(target, theirs, settings.chat))
    loaded = child.start()
    _check_pins(name, settings, loaded)
    return (VerifiersConversation if loaded.conversation else Verifiers)(name, child, loaded.rows)


def _check_pins(name: str, settings: Settings, loaded: Loaded) -> None:
    pins = ("package_version", "environment_version", "dataset_digest", "python")
    log.info("%s has %d problems; %s", name, loaded.rows, ", ".join(f"{pin} = {getattr(loaded, pin)}" for pin in pins))
    for pin in pins:
        wanted, found = getattr(settings, pin), getattr(loaded, pin)
        if wanted is not None and wanted != found:
            raise EnvironmentFault(f"this run needs {name} with {pin} {wanted}, here it is {found}", code=pin)


def _variables() -> dict[str, str]:
    """What the child needs to import the same, and to do the same everywhere; no key of this user's is among it."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONHASHSEED": "0",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the child with all that it started, which would hold its pipe open; it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # unsent bytes have nobody to go to
                stream.close()
    process.wait()
