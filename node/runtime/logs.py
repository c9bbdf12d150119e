"""Logging to stderr: text lines, or one JSON object a line (docs/operating.md).

Log messages quote untrusted input. A record is one line in JSON, and in text only its first line begins at the margin;
control characters are escaped, and lines stay below 48 KiB, where systemd-journald would split them. What looks like a
credential is redacted as the last line of defence: no code logs one knowingly.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import Final, Literal

log = logging.getLogger(__name__)

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]
FORMATS: Final[tuple[Format, ...]] = ("text", "json")
LEVELS: Final[tuple[Level, ...]] = ("debug", "info", "warning", "error")
PACKAGES: Final = ("node", "coordinator", "shardcast")
REPEAT_SECONDS: Final = 60.0
MAX_REMEMBERED: Final = 10_000
MAX_TEXT_BYTES: Final = 16 * 1024
"""Limit of an escaped message, and of an escaped traceback."""
MAX_ID_BYTES: Final = 256
_NEVER_IN_DETAIL: Final = ("boto3", "botocore", "s3transfer", "urllib3", "numba")
"""The first four log signed requests to an object store; numba some 10,000 lines of compiler output."""
_LONGEST_ESCAPE = 12
"""A character beyond the BMP, in JSON: two surrogates of 6 characters."""

_CREDENTIALS: Final = (
    # scheme://user:password@host
    re.compile(r"(?P<before>\w://[^\s:/@]*:)[^\s/@]+(?=@)"),
    # What signs the URL of an object, in its query (AWS's versions 4 and 2).
    re.compile(
        r"(?i)(?P<before>(?:X-Amz-(?:Signature|Credential|Security-Token)|Signature|AWSAccessKeyId)=)[^\s&\"']+"
    ),
    # A header, to the end of its value: other schemes have several parts.
    re.compile(r"(?i)(?P<before>authorization[\"']?\s*[:=]\s*b?[\"']?)[^\"'\r\n]+"),
    # This project's scheme, wherever its header was quoted from.
    re.compile(r"(?i)(?P<before>\bswarmproof )[a-z0-9_\-]{64,}={0,2}"),
)

_NOTHING: Mapping[str, str | int] = MappingProxyType({})
_BOUND: ContextVar[Mapping[str, str | int]] = ContextVar("bound", default=_NOTHING)
_OF_PROCESS: dict[str, str | int] = {}


@contextlib.contextmanager
def bound(
    *,
    run: str | None = None,
    node: str | None = None,
    policy: int | None = None,
    slot: int | None = None,
    lease: str | None = None,
    submission: str | None = None,
    step: int | None = None,
) -> Iterator[None]:
    """Add these ids to every record logged in the block, also by tasks and threads started there."""
    given = _given(run=run, node=node, policy=policy, slot=slot, lease=lease, submission=submission, step=step)
    token = _BOUND.set({**_BOUND.get(), **given})
    try:
        yield
    finally:
        _BOUND.reset(token)


def name_process(*, run: str | None = None, node: str | None = None, name: str | None = None) -> None:
    """Add these ids to every record of this process."""
    _OF_PROCESS.update(_given(run=run, node=node, name=name))


def _given(**fields: str | int | None) -> dict[str, str | int]:
    return {key: value for key, value in fields.items() if value is not None}


def redacted(text: str) -> str:
    """Return `text` with credentials replaced by ***."""
    for pattern in _CREDENTIALS:
        text = pattern.sub(r"\g<before>***", text)
    return text


def one_line(text: str) -> str:
    """Return `text` with unprintable characters escaped: line breaks, terminal codes, bidi overrides."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class TextLines(logging.Formatter):
    """`12:00:00 INFO    message`; a traceback follows in lines that begin with spaces."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        said = one_line(_cut(redacted(record.getMessage())))
        traceback = "".join(f"\n    {one_line(line)}" for line in self._traceback(record).split("\n") if line)
        return f"{moment} {record.levelname:<7} {said}{traceback}"

    def _traceback(self, record: logging.LogRecord) -> str:
        """Format the traceback; of a long one, its end."""
        if not record.exc_info or record.exc_info[1] is None:
            return ""
        return _cut_front(redacted(self.formatException(record.exc_info)))


class JsonLines(TextLines):
    """One object in ASCII a line, whose keys are in docs/operating.md."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        values: dict[str, str | int] = {
            "time": moment.removesuffix("+00:00") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(redacted(record.getMessage())),
        }
        for key, value in {**_OF_PROCESS, **_BOUND.get()}.items():
            values[key] = _cut(redacted(value), most_bytes=MAX_ID_BYTES) if isinstance(value, str) else value
        if traceback := self._traceback(record):
            values["exception"] = traceback
        return json.dumps(values)


def _cut(text: str, *, most_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return `text`, or a beginning of it that fits into `most_bytes` once escaped."""
    return text if _fits(text, most_bytes) else text[: most_bytes // _LONGEST_ESCAPE] + "..."


def _cut_front(text: str) -> str:
    return text if _fits(text, MAX_TEXT_BYTES) else "..." + text[-(MAX_TEXT_BYTES // _LONGEST_ESCAPE) :]


def _fits(text: str, most_bytes: int) -> bool:
    return len(text) <= most_bytes and len(json.dumps(text)) <= most_bytes


class RepeatFilter(logging.Filter):
    """Filter that passes equal messages once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._said: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is no repetition."""
        now, said = time.monotonic(), record.getMessage()
        with self._lock:
            while self._said and (len(self._said) > MAX_REMEMBERED or now - self._oldest() >= REPEAT_SECONDS):
                self._said.popitem(last=False)
            return self._said.setdefault(said, now) == now

    def _oldest(self) -> float:
        return next(iter(self._said.values()))


def set_up_logging(*, level: Level = "info", log_format: Format = "text") -> None:
    """Set up logging: this project's packages from `level` on, others from WARNING on (at debug, everything)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    if level != "debug":
        handler.addFilter(RepeatFilter())
    others = {"debug": logging.DEBUG, "error": logging.ERROR}.get(level, logging.WARNING)
    logging.basicConfig(level=others, handlers=[handler], force=True)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
    for package in _NEVER_IN_DETAIL:
        logging.getLogger(package).setLevel(logging.WARNING)
    # Otherwise Python writes these to stderr as plain text.
    logging.captureWarnings(log_format == "json")
    sys.excepthook = _log_uncaught if log_format == "json" else sys.__excepthook__
    threading.excepthook = _log_lost_thread if log_format == "json" else threading.__excepthook__


def is_json() -> bool:
    """Return whether stderr carries JSON lines, so that nothing else may go there."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def log_format_args() -> tuple[str, str]:
    """Return the command-line option that makes a child process log in this one's format."""
    return "--log-format", "json" if is_json() else "text"


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("this process ends: %s", error, exc_info=(kind, error, trace))


def _log_lost_thread(lost: threading.ExceptHookArgs) -> None:
    name = "?" if lost.thread is None else lost.thread.name
    error = lost.exc_value or lost.exc_type()
    log.critical("thread %s ends: %s", name, error, exc_info=(lost.exc_type, error, lost.exc_traceback))
