"""GET from the swarm's own processes on this machine: short deadlines, bounded bodies, no proxy."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

MAX_BODY_BYTES = 16 * 1024 * 1024


def get(url: str, *, seconds: float) -> bytes | None:
    """Return the body, or None for any status but 200; raises OSError and HTTPException.

    `http.client` rather than `urllib.request`, which would take a proxy from the environment.
    """
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=seconds)
    try:
        connection.request("GET", parts.path + (f"?{parts.query}" if parts.query else ""))
        response = connection.getresponse()
        body = response.read(MAX_BODY_BYTES + 1)
        return body if response.status == 200 and len(body) <= MAX_BODY_BYTES else None
    finally:
        connection.close()


def get_json(url: str, *, seconds: float) -> dict[str, Any] | None:
    """Return the JSON object at `url`, or None if it cannot be fetched."""
    try:
        body = get(url, seconds=seconds)
        value = None if body is None else json.loads(body)
    except (OSError, HTTPException, ValueError):
        return None
    return value if isinstance(value, dict) else None
