"""Warnings that recur: log each once until it changes or is cleared."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class WarnOnce:
    """Log an error once per topic, until another error or a success replaces it."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def note(self, topic: str, error: Exception) -> None:
        """Log `error` as a warning, unless it repeats the last one of `topic`."""
        if self._said.get(topic) != str(error):
            log.warning("%s: %s", topic, error)
        self._said[topic] = str(error)

    def clear(self, topic: str) -> None:
        """Forget the last error of `topic` after a success, so that the next one is logged."""
        self._said.pop(topic, None)
