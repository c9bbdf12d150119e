"""One of the processes that run the programs: a line of JSON for each, `[seed, outputs or null, milliseconds]`.

    python -m benchmarks.programming.runner ROLE FIRST PROGRAMS

A worker asks for a reply after each turn, so that cells are run once more for each that follows; a verifier asks for
all of a conversation, backwards through the programs, and an auditor in an order of its own, with another allocator of
memory in the sandbox.
"""

from __future__ import annotations

import json
import random
import sys
import time

from benchmarks.programming.grammar import conversation
from node.sandbox import SandboxFailed
from node.sandbox.cells import run_cells
from node.sandbox.root import ENVIRONMENT

STEPS, CHARACTERS = 200_000, 1000


def outputs_of(cells: tuple[str, ...], role: str) -> list[str] | None:
    """Return what each cell says; None where that is in doubt."""
    try:
        if role == "worker":
            return [_run(cells[: turn + 1], 1)[0] for turn in range(len(cells))]
        return [*_run(cells, len(cells))]
    except SandboxFailed as error:
        if error.code != "sandbox_doubt":
            raise
        return None


def _run(cells: tuple[str, ...], wanted: int) -> tuple[str, ...]:
    return run_cells(cells, wanted=wanted, steps=STEPS, characters=CHARACTERS)


def main() -> None:
    role, first, programs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    order = list(range(first, first + programs))
    if role == "verifier":
        order.reverse()
    elif role == "auditor":
        random.Random(1).shuffle(order)
        ENVIRONMENT["PYTHONMALLOC"] = "malloc"
    for seed in order:
        cells, began = conversation(seed), time.perf_counter()
        outputs = outputs_of(cells, role)
        print(json.dumps([seed, outputs, round(1000 * (time.perf_counter() - began), 1)]), flush=True)


if __name__ == "__main__":
    main()
