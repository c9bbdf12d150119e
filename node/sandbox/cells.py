"""Run the cells of a conversation in one sandbox, and say what the last ones say, the same on every machine."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from node.sandbox.bubblewrap import Sandbox, SandboxLimits
from node.sandbox.errors import SandboxFailed
from node.sandbox.session import MOST_PRINTED, SEPARATOR

SURE_CPU_SECONDS: Final = 0.5
"""Cells that took longer say nothing: they might be ended elsewhere, and a verifier has many to run."""

LIMITS: Final = SandboxLimits(cpu_seconds=1)
MAX_CELLS_BYTES: Final = 64 * 1024
"""Of the source of all cells together."""

CUT: Final = "…"
KEPT_OUTPUTS: Final = 512
_ADDRESS = re.compile(r"\bat 0x[0-9A-Fa-f]+")


@lru_cache(maxsize=KEPT_OUTPUTS)
def run_cells(cells: tuple[str, ...], *, wanted: int, steps: int, characters: int) -> tuple[str, ...]:
    """Run `cells` one after the other in one namespace; return the outputs of the last `wanted`, at least one.

    An output is what the cell printed, then the value of a last expression, or one line with the error that ended it;
    at most `characters`. All cells together have `steps` instructions of the interpreter, and one that runs out of them
    says so, as those after it do.

    Raises SandboxFailed where this machine cannot run them, and (sandbox_doubt) where another might get something else
    of them: they took long, ran out of memory, crashed, or lost the count of instructions.
    """
    source = "".join(cells).encode("utf-8", "replace")
    if len(source) > MAX_CELLS_BYTES:
        return (f"ValueError: more than {MAX_CELLS_BYTES} bytes of code"[:characters],) * wanted
    head, lengths = f"cells {wanted} {steps} {len(source)}\n", "".join(f"{len(cell)}\n" for cell in cells)
    # Twice: what a cell printed, and its last value.
    most = wanted * (8 * MOST_PRINTED + 2)
    result = Sandbox(LIMITS).run(head.encode() + source + lengths.encode(), max_bytes=most)
    if not result.complete:
        raise SandboxFailed("the code of a tool's call ended as it might not elsewhere", code="sandbox_doubt")
    if result.cpu_seconds > SURE_CPU_SECONDS:
        raise SandboxFailed(f"the code of a tool's call took {result.cpu_seconds:.1f} s", code="sandbox_doubt")
    outputs = result.answers.decode("utf-8", "replace").split(SEPARATOR)
    if len(outputs) != wanted:
        raise SandboxFailed("the code of a tool's call wrote its own outputs", code="sandbox_doubt")
    return tuple(_shown(output, characters) for output in outputs)


def _shown(output: str, characters: int) -> str:
    """Return an output without addresses and within its length."""
    clean = _ADDRESS.sub("at 0x0", output).rstrip("\n")
    return clean if len(clean) <= characters else clean[: characters - len(CUT)] + CUT
