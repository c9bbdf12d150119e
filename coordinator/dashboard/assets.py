"""Static files, served compressed under URLs with their digest, so that browsers cache them for ever.

uPlot (MIT) is a copy of its npm package's, so that pages load nothing from third parties.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from coordinator.errors import StorageFault
from shardcast.wire import digest

PREFIX: Final = "/assets"
IMMUTABLE: Final = "public, max-age=31536000, immutable"
_DIGEST_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class Asset:
    """A file, `plain` and `compressed` with gzip."""

    media_type: str
    plain: bytes
    compressed: bytes


def _own(name: str) -> Callable[[], bytes]:
    return lambda: files("coordinator.dashboard").joinpath("static", name).read_bytes()


_SOURCES: Final = {
    "dashboard.css": ("text/css; charset=utf-8", _own("dashboard.css")),
    "page.js": ("text/javascript; charset=utf-8", _own("page.js")),
    "run.js": ("text/javascript; charset=utf-8", _own("run.js")),
    "submission.js": ("text/javascript; charset=utf-8", _own("submission.js")),
    "icon.svg": ("image/svg+xml", _own("icon.svg")),
    "uPlot.iife.min.js": ("text/javascript; charset=utf-8", _own("vendor/uPlot.iife.min.js")),
    "uPlot.min.css": ("text/css; charset=utf-8", _own("vendor/uPlot.min.css")),
}


class Assets:
    """The files of one process, read and compressed on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urls = {
            name: f"{PREFIX}/{digest(read())[:_DIGEST_DIGITS]}/{name}" for name, (_, read) in _SOURCES.items()
        }
        self._held: dict[str, Asset] = {}

    def url(self, name: str) -> str:
        """Return the file's path, which changes with its bytes; raises StorageFault for an unknown name."""
        if name not in self._urls:
            raise StorageFault(f"{name} is no asset")
        return self._urls[name]

    def text(self, name: str) -> str:
        """Return the file's text, to inline it in a standalone page."""
        return _SOURCES[name][1]().decode()

    def get(self, version: str, name: str) -> Asset | None:
        """Return the file, or None if `version` is not its digest."""
        if self._urls.get(name) != f"{PREFIX}/{version}/{name}":
            return None
        with self._lock:
            if name not in self._held:
                media_type, read = _SOURCES[name]
                plain = read()
                self._held[name] = Asset(media_type, plain, gzip.compress(plain, 6, mtime=0))
            return self._held[name]
