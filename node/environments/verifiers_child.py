"""The process that runs an environment of the verifiers package: `python -m node.environments.verifiers_child`.

Its code is the environment author's, which everybody who takes part installed. Here it has no secrets of this machine's
environment variables, no network as far as Python's audit hooks reach (PEP 578), an order of sets that is the same
everywhere, and a deadline, which the parent keeps. That is no sandbox: the code may do what the user may.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from typing import IO

import msgspec

from node.environments.verifiers_messages import MAX_FRAME_BYTES, Ask, Fault, Load, Loaded, Said
from node.environments.verifiers_replay import Refused, Replay
from node.parquet_frames import receive_frame, send_frame

ADDRESS_SPACE_BYTES = 16 * 1024**3
_MAX_DETAIL = 500
_NETWORK = frozenset(
    {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}
)


class Network:
    """Refuses every connection, and remembers that one was tried."""

    def __init__(self) -> None:
        self.tried = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: object) -> None:
        if event in _NETWORK:
            self.tried = True
            raise PermissionError("an environment may not use the network")


def main() -> None:
    """Answer until the parent goes away."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What the environment reads is no question, and what it prints no answer.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    with asyncio.Runner() as runner:
        _serve(questions, answers, runner, Network())
    # Without what the environment wants done at the end: it may wait for a network that is not there.
    os._exit(0)


def _serve(questions: IO[bytes], answers: IO[bytes], runner: asyncio.Runner, network: Network) -> None:
    replay: Replay | None = None
    decode = msgspec.json.Decoder(Load | Ask).decode
    while True:
        try:
            question = decode(receive_frame(questions, max_bytes=MAX_FRAME_BYTES))
        except EOFError:
            return
        network.tried = False
        answer: Loaded | Said | Fault
        try:
            if isinstance(question, Load):
                replay = Replay(question)
                answer = runner.run(replay.loaded())
                _take_back_signals()
            else:
                assert replay is not None
                answer = runner.run(replay.answer(question))
        except Refused as refused:
            answer = Fault(refused.code, str(refused)[:_MAX_DETAIL])
        except Exception as error:  # noqa: BLE001  (whatever an environment raises)
            answer = Fault("environment_failed", repr(error)[:_MAX_DETAIL])
        if network.tried:
            answer = Fault("needs_network", "it tried to use the network")
        send_frame(answers, _encoded(answer))


def _encoded(answer: Loaded | Said | Fault) -> bytes:
    """The answer as JSON; half a surrogate pair in it, which a turn may have asked for, is replaced."""
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:
        texts = {name: text for name, text in msgspec.structs.asdict(answer).items() if isinstance(text, str)}
        sound = {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}
        return msgspec.json.encode(msgspec.structs.replace(answer, **sound))


def _take_back_signals() -> None:
    """The package sets handlers of its own when an environment is made."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
