"""`verifiers:<module>`: unmodified environments of PrimeIntellect's verifiers package (MIT).

The environment runs in its own process (`node.environments.verifiers_child`), which is killed when a response takes too
long and restarted for the next. Participants install it with its data set; nothing is downloaded. Not guaranteed: that
its problems and rewards are the same everywhere, which is its author's responsibility; the pins `package_version`,
`environment_version` and `dataset_digest` record what a run was made with.
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
from node.environments.frames import BrokenFrame, receive_frame, send_frame
from node.environments.verifiers_messages import MAX_FRAME_BYTES, EnvironmentLoaded, Fault, Load, RowQuery, RowResult
from node.protocol.chat import ChatFormat
from node.protocol.chat_formats import CHAT_FORMATS

log = logging.getLogger(__name__)

LOAD_SECONDS = 300.0
RESPONSE_SECONDS = 30.0
"""Deadline for a prompt, a reply or a reward; exceeding it is nobody's fault, so the verdict is indeterminate."""

_TARGET = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*(:[A-Za-z_][A-Za-z0-9_]*)?")
_INHERITED = ("HOME", "PATH", "TMPDIR", "LD_LIBRARY_PATH", "HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")


class VerifiersSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments handled here; all others go to the environment. Names as in docs/environments.md."""

    chat: Literal["plain", "chatml"] | None = None
    package_version: str | None = None
    environment_version: str | None = None
    dataset_digest: str | None = None
    python: str | None = None


class Verifiers:
    """An environment of one turn: problem `index` is the data set row drawn from it.

    `renders_chat`: its messages are rendered where it runs, as its replies are; else it has texts alone.
    """

    def __init__(self, name: str, child: EnvironmentProcess, loaded: EnvironmentLoaded) -> None:
        self.name = name
        self.renders_chat = loaded.messages
        self._process_of = child
        self._rows = loaded.rows

    def problem(self, index: int) -> Problem:
        row = next(draws(self.name, index)) % self._rows
        result = self._ask("problem", row)
        return Problem(result.text or "", {"row": row}, opening=result.opening)

    def reward(self, problem: Problem, completion: str) -> float:
        return self._ask("reward", problem.data["row"], completion).reward

    def _ask(self, what: Literal["problem", "reply", "reward"], row: int, *turns: str) -> RowResult:
        # A lone surrogate, which no token decoder produces, has no encoding.
        sendable = tuple(turn.encode("utf-8", "replace").decode() for turn in turns)
        result = self._process_of.ask(RowQuery(what, row, sendable))
        assert isinstance(result, RowResult)
        return result


class VerifiersConversation(Verifiers):
    """An environment of several turns, with or without tools; a `Conversation`."""

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        return self._ask("reply", problem.data["row"], *turns).text

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return self._ask("reward", problem.data["row"], *turns).reward


class EnvironmentProcess:
    """The environment's process; handles one query at a time, thread-safe."""

    def __init__(self, name: str, load: Load) -> None:
        self._name, self._load = name, load
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def start(self) -> EnvironmentLoaded:
        """Load the environment. Raises EnvironmentFault."""
        with self._lock:
            return self._start()

    def ask(self, query: RowQuery) -> RowResult | EnvironmentLoaded:
        """Send a query and return its result; raises EnvironmentFault without one in time."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._discard()
                self._start()
            return self._exchange(query, seconds=RESPONSE_SECONDS)

    def _start(self) -> EnvironmentLoaded:
        # -P: never import from the current folder.
        command = [sys.executable, "-P", "-m", "node.environments.verifiers_child"]
        try:
            self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_child_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFault(f"{self._name} process cannot be started: {error}") from error
        self._finalizer = weakref.finalize(self, _end, self._process)
        loaded = self._exchange(self._load, seconds=LOAD_SECONDS)
        assert isinstance(loaded, EnvironmentLoaded)
        return loaded

    def _exchange(self, query: Load | RowQuery, *, seconds: float) -> RowResult | EnvironmentLoaded:
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
            send_frame(process.stdin, msgspec.json.encode(query))
            frame = receive_frame(process.stdout, max_bytes=MAX_FRAME_BYTES)
            result = msgspec.json.decode(frame, type=RowResult | EnvironmentLoaded | Fault)
        except (OSError, EOFError, BrokenFrame, msgspec.DecodeError) as error:
            self._discard()
            if expired.is_set():
                raise EnvironmentFault(
                    f"{self._name} did not respond within {seconds:g} s", code="environment_slow"
                ) from error
            raise EnvironmentFault(
                f"{self._name} process ended unexpectedly: {error!r}", code="environment_died"
            ) from error
        except BaseException:
            self._discard()  # half an exchange would be read as the next result
            raise
        finally:
            timer.cancel()
        if isinstance(result, Fault):
            if isinstance(query, Load):
                self._discard()
            raise EnvironmentFault(f"{self._name}: {result.detail}", code=result.code)
        return result

    def _discard(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


def load_verifiers(target: str, arguments: Mapping[str, Any], *, chat: ChatFormat | None = None) -> Verifiers:
    """Load the environment `target`: a module with `load_environment`, or `module:Class`.

    `chat` is the run's chat format; without one, the argument `chat` names one for this environment.
    Raises EnvironmentFault: package_missing, bad_arguments, environment_missing, refused_environment,
    environment_failed, needs_network, environment_slow, environment_died, or the name of a pin that does not match.
    """
    name = f"verifiers:{target}"
    if _TARGET.fullmatch(target) is None:
        raise EnvironmentFault(f"{name} does not name a module", code="bad_arguments")
    if find_spec("verifiers") is None:
        raise EnvironmentFault(
            "this run needs the verifiers package: pip install 'swarmproof[verifiers]'", code="package_missing"
        )
    own_arguments = {key: value for key, value in arguments.items() if key in VerifiersSettings.__struct_fields__}
    try:
        settings = msgspec.convert(own_arguments, VerifiersSettings)
    except msgspec.ValidationError as error:
        raise EnvironmentFault(f"{name}: {error}", code="bad_arguments") from error
    if chat is not None and settings.chat is not None:
        raise EnvironmentFault(
            f"{name}: the run's sampling.chat says how messages become text; leave the argument chat out",
            code="bad_arguments",
        )
    environment_arguments = {key: value for key, value in arguments.items() if key not in own_arguments}
    shown = chat or CHAT_FORMATS[settings.chat or "plain"]
    child = EnvironmentProcess(name, Load(target, environment_arguments, shown))
    loaded = child.start()
    _check_pins(name, settings, loaded)
    return (VerifiersConversation if loaded.conversation else Verifiers)(name, child, loaded)


def _check_pins(name: str, settings: VerifiersSettings, loaded: EnvironmentLoaded) -> None:
    pins = ("package_version", "environment_version", "dataset_digest", "python")
    log.info("%s has %d problems; %s", name, loaded.rows, ", ".join(f"{pin} = {getattr(loaded, pin)}" for pin in pins))
    for pin in pins:
        wanted, found = getattr(settings, pin), getattr(loaded, pin)
        if wanted is not None and wanted != found:
            raise EnvironmentFault(f"this run needs {name} with {pin} {wanted}, but {found} is installed", code=pin)


def _child_environment() -> dict[str, str]:
    """Build the child's environment variables: what makes imports and behaviour reproducible, without the user's
    secrets.
    """
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
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
    """Kill the child's session, with all its descendants, which would hold its pipe open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # unsent bytes are lost
                stream.close()
    process.wait()
