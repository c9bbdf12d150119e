"""Reading a stranger's Parquet file without believing it: the parser runs in a process that can only fail.

One child process (`node.parquet_child`) serves file after file, because its start takes far longer than a
file. It is started with an empty environment and strict limits, and replaced whenever it dies. Whose fault a
failure is:

- the child refuses, crashes twice, or twice exceeds its memory or processor time: the file's;
- it does not start, is killed from outside, or makes no use of its time until the deadline: nobody's, or this
  machine's, and then no verdict follows.

Not guaranteed: that a file cannot exploit a bug of the parser. It then owns a process without secrets, files
or privileges of its own, and can spoil the answers for the files that come after it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from node.errors import NodeError
from node.parquet_frames import READY, Answer, BrokenFrame, Shape, receive_frame, send_frame
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout, chunk_count, proof_bytes

logger = logging.getLogger(__name__)

ATTEMPTS = 2
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_MAX_ANSWER_SLACK_BYTES = 64 * 1024
_PARSE_BYTES_PER_BODY_BYTE = 16


class VerifierFailed(NodeError):
    """The verifier could not decide, for reasons of its own: the submission is indeterminate, never rejected."""

    code = "verifier_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """What the parsing process may use.

    `address_space_bytes` is on top of 16 bytes per byte of the largest submission; the libraries take a third
    of the default. `cpu_seconds` counts per file, `wall_seconds` too: it is far larger, because it must not
    run out on a machine that is merely busy. `start_seconds` is for the child's start.
    """

    address_space_bytes: int = 1024 * 1024 * 1024
    cpu_seconds: int = 4
    wall_seconds: float = 20.0
    start_seconds: float = 60.0


class _ChildDied(Exception):
    """The child ended or was ended before it answered; `blames_file` if only the file can be the cause."""

    def __init__(self, message: str, *, blames_file: bool) -> None:
        super().__init__(message)
        self.blames_file = blames_file


class ParquetReader:
    """Reads submissions, one at a time; safe to share between threads. Close it, or use it in a `with`."""

    def __init__(self, limits: ChildLimits = ChildLimits()) -> None:
        self._limits = limits
        self._module = "node.parquet_child"
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._decode = msgspec.msgpack.Decoder(Answer[Rollout]).decode

    def read(self, body: bytes | Path, *, spec: RunSpec) -> list[Rollout]:
        """The rollouts in `body`, in sample order.

        Raises Refusal (NOT_PARQUET, WRONG_SCHEMA or WRONG_GROUP_SIZE, in that order of precedence) if the
        file is at fault, VerifierFailed if this machine is. The values are not checked further than their
        types and sizes: see `node.protocol.submission.check_rollouts`.
        """
        data = _load(body, max_bytes=spec.limits.max_submission_bytes)
        shape = _shape_of(spec)
        with self._lock:
            answer = self._answer(data, shape=shape, spec=spec)
        if answer.reason is not None:
            raise Refusal(answer.reason, answer.detail)
        if len(answer.rows) != shape.rows:
            raise VerifierFailed("the Parquet child answered with another number of rows than it must")
        return answer.rows

    def close(self) -> None:
        """End the child. A later `read` starts another."""
        with self._lock:
            self._end_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, data: bytes, *, shape: Shape, spec: RunSpec) -> Answer[Rollout]:
        deaths: list[_ChildDied] = []
        while len(deaths) < ATTEMPTS:
            child = self._running_child(spec)
            try:
                return self._ask(child, data, shape=shape)
            except _ChildDied as death:
                logger.warning("Parquet child: %s", death)
                deaths.append(death)
            except BaseException:
                self._end_child()  # half an exchange would be taken for the answer to the next file
                raise
        if all(death.blames_file for death in deaths):
            raise Refusal(Reason.NOT_PARQUET, f"Reading it twice ended the parser: {deaths[-1]}.")
        raise VerifierFailed(f"the Parquet child did not answer: {deaths[-1]}")

    def _ask(self, child: subprocess.Popen[bytes], data: bytes, *, shape: Shape) -> Answer[Rollout]:
        assert child.stdin is not None
        assert child.stdout is not None
        with _deadline(child, self._limits.wall_seconds) as expired:
            try:
                send_frame(child.stdin, msgspec.msgpack.encode(shape))
                send_frame(child.stdin, data)
                reply = receive_frame(child.stdout, max_bytes=_max_answer_bytes(shape))
                return self._decode(reply)
            # msgspec lets the codec's own error through where a MessagePack string is not UTF-8.
            except (OSError, EOFError, BrokenFrame, msgspec.DecodeError, UnicodeDecodeError) as error:
                self._end_child()
                raise _death_of(child, expired=expired.is_set(), cause=error) from error

    def _running_child(self, spec: RunSpec) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._end_child()
        if self._child is None:
            self._child = self._start(spec)
        return self._child

    def _start(self, spec: RunSpec) -> subprocess.Popen[bytes]:
        address_space = self._limits.address_space_bytes + _PARSE_BYTES_PER_BODY_BYTE * spec.limits.max_submission_bytes
        # -P: the folder that this process happens to run in is no place to import from.
        command = [sys.executable, "-P", "-m", self._module, str(address_space), str(self._limits.cpu_seconds)]
        try:
            child = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
            )
        except OSError as error:
            raise VerifierFailed(f"the Parquet child cannot be started: {error}") from error
        assert child.stdout is not None
        with _deadline(child, self._limits.start_seconds):
            try:
                if receive_frame(child.stdout, max_bytes=len(READY)) == READY:
                    return child
            except (OSError, EOFError, BrokenFrame):
                logger.debug("the Parquet child said nothing useful at its start", exc_info=True)
        _end(child)
        raise VerifierFailed(f"the Parquet child does not start (exit status {child.returncode}); run {command[1:]}")

    def _end_child(self) -> None:
        if self._child is not None:
            _end(self._child)
            self._child = None


@contextlib.contextmanager
def _deadline(child: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Kill `child` if the block takes longer than `seconds`; the event tells that it did."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        child.kill()

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()
        timer.join()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Close the pipes and make sure that the child is gone; its exit status is known afterwards."""
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # unsent bytes have nobody to go to
                stream.close()
    try:
        child.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _death_of(child: subprocess.Popen[bytes], *, expired: bool, cause: Exception) -> _ChildDied:
    if expired:
        return _ChildDied("it did not answer before the deadline", blames_file=False)
    status = child.returncode
    if status == -signal.SIGXCPU:
        return _ChildDied("it used up its processor time", blames_file=True)
    # SIGKILL and SIGTERM come from outside: an operator, or the kernel when the machine is short of memory.
    outside = status in {-signal.SIGKILL, -signal.SIGTERM}
    return _ChildDied(f"{type(cause).__name__}, exit status {status}", blames_file=not outside)


def _environment() -> dict[str, str]:
    """What the child needs, and none of what else this process was given."""
    wanted = {"PYTHONPATH": str(_PACKAGE_ROOT), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    # One pool that gives memory back, and starts no thread of its own.
    wanted["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in os.environ}
    return kept | wanted


def _load(body: bytes | Path, *, max_bytes: int) -> bytes:
    if isinstance(body, Path):
        try:
            with body.open("rb") as file:
                body = file.read(max_bytes + 1)
        except OSError as error:
            raise VerifierFailed(f"the submission cannot be read: {error}") from error
    if len(body) > max_bytes:
        raise Refusal(Reason.NOT_PARQUET, f"It has more than {max_bytes} bytes.")
    return body


def _shape_of(spec: RunSpec) -> Shape:
    """Twice what the run's rules allow, and a little: what is only just too much gets its own reason later."""
    sampling = spec.sampling
    # Every segment and every turn after the first may leave one more chunk unfilled.
    proofs = chunk_count([sampling.max_new_tokens], chunk_tokens=spec.proofs.chunk_tokens)
    proofs += sampling.max_version_lead + sampling.max_turns - 1
    return Shape(
        rows=sampling.group_size,
        prompt_tokens=2 * sampling.max_prompt_tokens + 16,
        completion_tokens=2 * sampling.max_new_tokens + 16,
        segments=2 * (sampling.max_version_lead + 1) + 16,
        proofs=2 * proofs + 16,
        proof_bytes=2 * proof_bytes(spec.proofs, tokens=spec.proofs.chunk_tokens) + 16,
    )


def _max_answer_bytes(shape: Shape) -> int:
    """An upper bound of a MessagePack answer: 32-bit integers take 5 bytes at most, 64-bit ones and floats 9,
    strings 5 and their own.
    """
    row = 5 * shape.prompt_tokens + 14 * shape.completion_tokens + 14 * shape.segments
    row += (5 + shape.proof_bytes) * shape.proofs
    return shape.rows * row + _MAX_ANSWER_SLACK_BYTES + 256 * shape.rows
