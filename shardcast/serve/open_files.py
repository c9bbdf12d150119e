"""How many connections a process has open files for."""

from __future__ import annotations

import resource
from typing import Final

OTHER_FILES: Final = 1024
"""Left beside connections: three for each of a database's, files that are served or written, one's own connections."""

SCARCE_SHARE: Final = 3
"""Connections take one in so many files where there are few: the rest of the process needs the others."""


def allow_connections(wanted: int) -> int:
    """Raise this process's limit of open files for `wanted` connections; return how many it has room for.

    Where the hard limit is low they are fewer: without a file to spare nothing could be served to anybody.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    files = max(soft, wanted + OTHER_FILES)
    if hard != resource.RLIM_INFINITY:
        files = min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return min(wanted, max(files - OTHER_FILES, files // SCARCE_SHARE))
