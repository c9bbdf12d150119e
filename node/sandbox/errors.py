"""The sandbox's only error: this machine could not run a program, or cannot tell its outcome."""

from __future__ import annotations

from node.errors import NodeError


class SandboxFailed(NodeError):
    """The program's outcome is unknown. `code`:

    sandbox_missing     bubblewrap is not installed
    sandbox_unusable    bubblewrap does not work here: namespaces are forbidden, or the interpreter does not start
    sandbox_broken      it worked before, and failed this time
    sandbox_doubt       the machine was too slow or too full to tell what the program does elsewhere
    """

    code = "sandbox_broken"
