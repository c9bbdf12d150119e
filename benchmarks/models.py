"""Recurrent policies: exactness, verification and learning, a module of benchmarks/modelling for each.

`python -m benchmarks.models [--json] [--only PART]`. What each figure means stands at the top of its module:

- `exact`: beside the authors' package, and decoding beside a prefill (a minute);
- `goldfinch`: GoldFinch's cache and prefill (half a minute);
- `verified`: honest work and cheats under the demonstration's limits (some minutes);
- `rewards`: before and after GRPO (some minutes for each family);
- `frames`: what is the frame-based action model's alone (some minutes).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

import torch

from benchmarks import machine
from benchmarks.modelling import exact, frames, goldfinch, rewards, verified

PARTS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "exact": exact.measure,
    "goldfinch": goldfinch.measure,
    "verified": verified.measure_families,
    "rewards": rewards.measure,
    "frames": frames.measure_frames,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--only", choices=sorted(PARTS), help="one part")
    parser.add_argument("--chunks", type=int, default=1000, help="honest chunks of each family, at least")
    parser.add_argument("--seed", type=int, default=2, help="of warm starts")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    figures: dict[str, float] = {}
    for part, measure in PARTS.items():
        if options.only in (None, part):
            figures |= measure(options)
    if options.json:
        print(json.dumps({"benchmark": "models", "machine": machine.describe(), "figures": figures}))
        return
    for name, value in figures.items():
        print(f"{name:40} {value:.6g}")


if __name__ == "__main__":
    main()
