"""One of several processes that call functions together: `python -m launched`.

Each line on standard input is a call: a module, a function in it, a folder, more arguments, and the environment that
torchrun would give. An empty line is the answer. A call that fails ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from node.commands.engine_options import import_models

if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr
    import_models()
    for line in sys.stdin:
        module, function, folder, arguments, environment = json.loads(line)
        os.environ.update(environment)
        getattr(importlib.import_module(module), function)(Path(folder), **arguments)
        print(file=answers, flush=True)
