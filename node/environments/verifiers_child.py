"""Process that runs an environment of the verifiers package: `python -m node.environments.verifiers_child`.

The code is the environment author's, installed by every participant. It gets no secrets from environment variables, no
network as far as Python's audit hooks reach (PEP 578), a fixed order of sets, and a deadline kept by the parent. This
is no sandbox: the code may do what the user may.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from typing import IO

import msgspec

from node.environments.frames import receive_frame, send_frame
from node.environments.verifiers_messages import MAX_FRAME_BYTES, EnvironmentLoaded, Fault, Load, RowQuery, RowResult
from node.environments.verifiers_replay import EnvironmentUnusable, VerifiersReplay

ADDRESS_SPACE_BYTES = 16 * 1024**3
_MAX_DETAIL = 500
_NETWORK = frozenset(
    {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}
)


class NetworkGuard:
    """Refuses every connection, and records that one was attempted."""

    def __init__(self) -> None:
        self.tried = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _: object) -> None:
        if event in _NETWORK:
            self.tried = True
            raise PermissionError("an environment may not use the network")


def main() -> None:
    """Serve queries until the parent closes the pipe."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The environment's own reads and prints must not touch the protocol's pipes.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    with asyncio.Runner() as runner:
        _serve(questions, answers, runner, NetworkGuard())
    # Skips the environment's exit handlers, which may wait for a network.
    os._exit(0)


def _serve(questions: IO[bytes], answers: IO[bytes], runner: asyncio.Runner, network: NetworkGuard) -> None:
    replay: VerifiersReplay | None = None
    decode = msgspec.json.Decoder(Load | RowQuery).decode
    while True:
        try:
            question = decode(receive_frame(questions, max_bytes=MAX_FRAME_BYTES))
        except EOFError:
            return
        network.tried = False
        answer: EnvironmentLoaded | RowResult | Fault
        try:
            if isinstance(question, Load):
                replay = VerifiersReplay(question)
                answer = runner.run(replay.loaded())
                _reset_signals()
            else:
                assert replay is not None
                answer = runner.run(replay.answer(question))
        except EnvironmentUnusable as refused:
            answer = Fault(refused.code, str(refused)[:_MAX_DETAIL])
        except Exception as error:  # noqa: BLE001  (an environment may raise anything)
            answer = Fault("environment_failed", repr(error)[:_MAX_DETAIL])
        if network.tried:
            answer = Fault("needs_network", "it tried to use the network")
        send_frame(answers, _encode(answer))


def _encode(answer: EnvironmentLoaded | RowResult | Fault) -> bytes:
    """Encode a result as JSON, replacing lone surrogates that a turn may have caused."""
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:
        texts = {name: text for name, text in msgspec.structs.asdict(answer).items() if isinstance(text, str)}
        encodable = {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}
        return msgspec.json.encode(msgspec.structs.replace(answer, **encodable))


def _reset_signals() -> None:
    """Restore signal handlers, which the package replaces when an environment is made."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
