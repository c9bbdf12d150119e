"""One of several processes that call a function together: `python -m launched MODULE FUNCTION FOLDER ARGUMENTS`.

What torchrun tells its processes is in the environment.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from node.commands.engine_options import import_models

if __name__ == "__main__":
    module, function, folder, arguments = sys.argv[1:]
    import_models()
    getattr(importlib.import_module(module), function)(Path(folder), **json.loads(arguments))
