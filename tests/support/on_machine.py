"""`swarmproof` on a machine of another name: `python -m on_machine NAME COMMAND ...`."""

from __future__ import annotations

import socket
import sys

from node.cli import main

if __name__ == "__main__":
    name = sys.argv.pop(1)
    socket.gethostname = lambda: name
    main()
