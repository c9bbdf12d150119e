"""Random programs through the `python` tool in three processes: `python -m benchmarks.programs [--json]`.

Each of 10,000 conversations (`benchmarks.programming.grammar`) is run by a worker, a verifier and an auditor:
processes of their own, with other hash seeds, variables, folders and orders, while others keep the processors busy.
`replies_differ` counts those of which two of them got other bytes; `in_doubt` those that one of them would not answer
for, which nobody is blamed for. `ms_p50` and `ms_p99` are a verifier's, for all replies of a conversation, on the
busy machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.programming.grammar import conversation
from benchmarks.report import make_parser, report, say

ROLES = {
    "worker": {"PYTHONHASHSEED": "1", "LANG": "C", "TZ": "UTC"},
    "verifier": {"PYTHONHASHSEED": "2", "LANG": "de_DE.UTF-8", "TZ": "Asia/Tokyo"},
    "auditor": {"PYTHONHASHSEED": "random", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent", "PYTHONINTMAXSTRDIGITS": "0"},
}
BUSY = "import os; os.nice(15)\nwhile True: sum(range(10_000_000))"
ROOT = Path(__file__).parent.parent
Replies = dict[int, tuple[list[str] | None, float]]


def run_role(role: str, seeds: range, folder: Path) -> Replies:
    """Run the programs of all `seeds` in a process of `role`."""
    command = [sys.executable, "-m", "benchmarks.programming.runner", role, str(seeds.start), str(len(seeds))]
    own = folder / role
    own.mkdir()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **ROLES[role]}
    found: Replies = {}
    with subprocess.Popen(command, cwd=own, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            seed, outputs, milliseconds = json.loads(line)
            found[seed] = outputs, milliseconds
            if len(found) % 1000 == 0:
                say(f"{role}: {len(found)} programs")
    if len(found) < len(seeds):
        raise SystemExit(f"the {role} ended after {len(found)} of {len(seeds)} programs")
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--programs", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one (0)")
    parser.add_argument("--busy", type=int, default=1, help="processes that keep the processors busy (1)")
    parser.add_argument("--show", type=int, default=3, help="differing programs to print (3)")
    chosen = parser.parse_args()
    began, seeds = time.monotonic(), range(chosen.first, chosen.first + chosen.programs)
    burners = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(chosen.busy)]
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(ROLES)) as pool:
            running = [pool.submit(run_role, role, seeds, Path(folder)) for role in ROLES]
            by_role = [one.result() for one in running]
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    rows = [_compare(seed, [replies[seed][0] for replies in by_role]) for seed in seeds]
    differing = [row for row in rows if row["differs"]]
    for row in differing[: chosen.show]:
        say(json.dumps(row))
    milliseconds = sorted(time_of for _, time_of in by_role[1].values())
    answered = [row for row in rows if not row["in_doubt"]]
    figures = {
        "random_programs": chosen.programs,
        "replies": sum(len(conversation(seed)) for seed in seeds),
        "replies_differ": len(differing),
        "in_doubt": chosen.programs - len(answered),
        "with_error_share": round(statistics.fmean(row["error"] for row in rows), 3),
        "distinct_share": round(len({row["said"] for row in answered}) / chosen.programs, 3),
        "ms_p50": round(milliseconds[len(milliseconds) // 2], 1),
        "ms_p99": round(milliseconds[len(milliseconds) * 99 // 100], 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    report("programs", chosen, figures)


def _compare(seed: int, outputs: list[list[str] | None]) -> dict[str, Any]:
    """Compare one program's outputs by role, None for doubt."""
    answered = [output for output in outputs if output is not None]
    said = json.dumps(answered[0]) if answered else ""
    return {
        "seed": seed,
        "differs": any(output != answered[0] for output in answered),
        "in_doubt": len(answered) < len(outputs),
        "error": "Error: " in said,
        "said": said,
        "outputs": outputs if any(output != answered[0] for output in answered) else [],
    }


if __name__ == "__main__":
    main()
