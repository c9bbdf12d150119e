"""The sandbox's one error: this machine could not run a program, or cannot say what became of it."""

from __future__ import annotations

from node.errors import NodeError


class SandboxFailed(NodeError):
    """Nothing follows about the program. `code`:

    sandbox_missing     bubblewrap is not installed
    sandbox_unusable    it is, and does not work here: namespaces are forbidden, or the interpreter does not start
    sandbox_broken      it worked before, and did not this time
    sandbox_doubt       the machine was too slow or too full to tell what the program does elsewhere
    """

    code = "sandbox_broken"
