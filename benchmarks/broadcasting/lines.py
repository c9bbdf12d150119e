"""Protocol between a process of a broadcast and the benchmark that started it: one JSON object per line.

It ends when its standard input does, so that nothing outlives a benchmark that was killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


async def requests() -> AsyncIterator[dict[str, Any]]:
    """Yield each line of standard input, decoded, until it is closed."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while line := await reader.readline():
            yield json.loads(line)
    finally:
        transport.close()
