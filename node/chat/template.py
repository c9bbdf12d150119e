"""Render conversations by the chat template of a model's folder, in a process of its own with limits.

A template is a stranger's program: transformers' sandbox keeps it from files, and neither from memory nor from time.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from node.policy.child import CHILD_ENVIRONMENT
from node.policy.errors import MalformedPolicy

START_SECONDS: Final = 180.0
RENDER_SECONDS: Final = 20.0
MAX_RENDERED_CHARS: Final = 8 * 2**20
"""Of one conversation."""
_MAX_ANSWER_BYTES: Final = 8 * MAX_RENDERED_CHARS
_PIECE_BYTES: Final = 2**20


class TemplateQuery(msgspec.Struct, frozen=True):
    """A conversation to render; `opening`: with what begins the assistant's turn."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    opening: bool


class TemplateAnswer(msgspec.Struct, frozen=True):
    """What the template wrote, or the `fault` that it raised for this conversation."""

    text: str = ""
    fault: str = ""


class FolderTemplate:
    """The chat template of a folder, in a process that runs until `close`; call it from one thread.

    Each call returns a TemplateAnswer. It raises MalformedPolicy where the template takes `seconds` or ends the
    process, after which no call has an answer; so does the beginning where the tokenizer cannot be loaded. Where the
    caller is killed in the middle of a call, the process ends a second of processor time after `seconds`.
    """

    def __init__(self, folder: Path, *, seconds: float = RENDER_SECONDS) -> None:
        self._folder, self._seconds = folder, seconds
        self._child = subprocess.Popen(  # noqa: S603  (this interpreter, a module of ours, and a path as one argument)
            [sys.executable, "-P", "-m", "node.chat.template_process", str(folder.absolute()), str(seconds + 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, **CHILD_ENVIRONMENT},
        )
        self._ask(b"", seconds=START_SECONDS)

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, opening: bool
    ) -> TemplateAnswer:
        query = TemplateQuery(tuple(map(dict, messages)), tuple(map(dict, tools)), opening)
        return self._ask(msgspec.json.encode(query) + b"\n", seconds=self._seconds)

    def _ask(self, line: bytes, *, seconds: float) -> TemplateAnswer:
        try:
            self._write(line)
            return msgspec.json.decode(self._line(seconds), type=TemplateAnswer)
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            self.close()
            why = f"took longer than {seconds:.0f} s" if isinstance(error, TimeoutError) else "ended its process"
            raise MalformedPolicy(f"{self._folder}: its chat template {why}", code="bad_chat_template") from error

    def close(self) -> None:
        """End the process; it may be called again."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        """Write all of `data`; the process reads whenever it renders nothing. Raises OSError, ValueError if closed."""
        assert self._child.stdin is not None
        left = memoryview(data)
        while left:
            left = left[self._child.stdin.write(left) or 0 :]

    def _line(self, seconds: float) -> bytes:
        """Read the answer's line; raises TimeoutError, and EOFError where there is no whole one within its limit."""
        assert self._child.stdout is not None
        pieces, size, until = list[bytes](), 0, time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            ready.register(self._child.stdout, selectors.EVENT_READ)
            while not pieces or not pieces[-1].endswith(b"\n"):
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                pieces.append(os.read(self._child.stdout.fileno(), _PIECE_BYTES))
                size += len(pieces[-1])
                if not pieces[-1] or size > _MAX_ANSWER_BYTES:
                    raise EOFError
        return b"".join(pieces)
