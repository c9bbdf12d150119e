"""Answer queries about one environment, a line each, whatever its code does short of ending the process.

The code is the environment author's. It gets no network as far as Python's audit hooks reach (PEP 578), so that its
author is told what it tried; what keeps it from one is the sandbox around this process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import resource
import sys
from typing import IO, Any

from .adapter import USED, Adapter, Json, Unusable

PROTOCOL = 1
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_REPLY_BYTES = 4 * 1024 * 1024
"""A longer reply ends the rollout, as one does that has no place in a run's context."""

LOAD_SECONDS, ANSWER_SECONDS = 600, 60
"""Processor time of a query, after which the process ends: whoever asked may have ended, and waits no longer."""

_MAX_DETAIL = 1000
_KINDS = {
    "plain": ("plain", "PlainClass"),
    "verifiers": ("verifiers", "load"),
    "reasoning_gym": ("reasoning_gym", "Gym"),
}
_NETWORK = frozenset(
    {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}
)


class NetworkGuard:
    """Refuses every connection, and records what was attempted."""

    def __init__(self) -> None:
        self.tried: str | None = None
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _NETWORK:
            self.tried = f"{event} {arguments[0 if event.startswith('socket.get') else 1]!r}"
            raise PermissionError("an environment may not use the network")


def serve(queries: IO[bytes], answers: IO[bytes]) -> None:
    """Answer each line of `queries`, the first of which loads the environment, until there is none."""
    network = NetworkGuard()
    adapter: Adapter | None = None
    while line := queries.readline(MAX_LINE_BYTES):
        query = json.loads(line)
        network.tried = None
        USED.clear()
        _limit_processor(LOAD_SECONDS if query["type"] == "load" else ANSWER_SECONDS)
        try:
            if query["type"] == "load":
                adapter, answer = _load(query, network)
            else:
                assert adapter is not None
                answer = _answer(adapter, query)
            encoded = _encode(answer)
        except Unusable as refused:
            encoded = _fault(refused.code, str(refused))
        except BaseException as error:  # noqa: BLE001  (an environment may raise anything, SystemExit too)
            encoded = _fault("environment_failed", repr(error))
        if USED:
            encoded = _fault("refused_environment", USED[0])
        if network.tried is not None:
            encoded = _fault("needs_network", f"it tried to use the network: {network.tried}")
        answers.write(encoded)
        answers.flush()


def _load(query: Json, network: NetworkGuard) -> tuple[Adapter, Json]:
    module, name = _KINDS[query["kind"]]
    make = getattr(importlib.import_module(f".{module}", __package__), name)
    adapter: Adapter = make(query)
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy")  # so that its generator is seeded from the first query on
    loaded = {"type": "loaded", "protocol": PROTOCOL, **adapter.loaded()}
    network.tried = None  # it did without: a library that looks for news of its data is no reason to refuse
    # What cannot be answered at all is refused now, rather than in a run's first slot.
    _answer(adapter, {"type": "problem", "index": 0})
    empty = "" if loaded["speaks"] == "text" else {"content": "", "tool_calls": []}
    _answer(adapter, {"type": "reward", "index": 0, "turns": [empty]})
    return adapter, loaded


def _answer(adapter: Adapter, query: Json) -> Json:
    """Return an answer; if the environment raises over the turns, there is no reply and no reward."""
    kind, index = query["type"], query["index"]
    seed_randomness(index)
    if kind == "problem":
        return {"type": kind, **adapter.problem(index)}
    try:
        if kind == "reward":
            return {"type": kind, "reward": adapter.reward(index, query["turns"])}
        reply = {"type": kind, **adapter.reply(index, query["turns"])}
        return reply if len(_encode(reply)) <= MAX_REPLY_BYTES else {"type": kind}
    except (Unusable, MemoryError, OSError):
        raise  # not caused by the turns
    except Exception as error:  # noqa: BLE001  (caused by what the model wrote)
        print(f"{kind} of problem {index}: {error!r}", file=sys.stderr)  # noqa: T201  (read where stderr is kept)
        return {"type": kind} if kind == "reply" else {"type": kind, "reward": 0.0}


def _limit_processor(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, hard))


def seed_randomness(index: int) -> None:
    """Set the state of Python's and NumPy's global generators from a problem's index."""
    random.seed(index)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(index % 2**32)


def _encode(answer: Json) -> bytes:
    """Return the line of an answer; half a surrogate pair, which a turn may have caused, becomes `?`."""
    return json.dumps(answer, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"


def _fault(code: str, detail: str) -> bytes:
    return _encode({"type": "fault", "code": code, "detail": detail[:_MAX_DETAIL]})
