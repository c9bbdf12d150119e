"""The process of an environment: `python -P -s -B -u main.py`, a query a line in, an answer a line out."""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import sys
from pathlib import Path

PACKAGE = "swarmproof_guest"
ADDRESS_SPACE_BYTES = 16 * 1024**3


def main() -> None:
    """Serve queries until the other end of the pipe is closed."""
    queries, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The environment's own reads and prints must not touch the protocol's pipes.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    _import_folder()
    importlib.import_module(f"{PACKAGE}.serving").serve(queries, answers)
    # Skips the environment's exit handlers, which may wait for a network.
    os._exit(0)


def _import_folder() -> None:
    """Make this file's folder a package; beside the environment's own, its modules' names would stand for theirs."""
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACKAGE])


if __name__ == "__main__":
    main()
