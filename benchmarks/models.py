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
from collections.abc import Callable

import torch

from benchmarks.modelling import exact, frames, goldfinch, rewards, verified
from benchmarks.report import make_parser, report
from benchmarks.warm_start import add_warm_start

PARTS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "exact": exact.measure,
    "goldfinch": goldfinch.measure,
    "verified": verified.measure_families,
    "rewards": rewards.measure,
    "frames": frames.measure_frames,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=sorted(PARTS), help="one part")
    parser.add_argument("--chunks", type=int, default=1000, help="honest chunks of each family, at least")
    parser.add_argument("--cheat-groups", type=int, default=100, help="groups of each cheat (default 100)")
    parser.add_argument("--steps", type=int, help="of training (default: 30 for rewards, 300 for frames)")
    parser.add_argument("--seed", type=int, default=2, help="of warm starts")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    add_warm_start(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, float] = {}
    for part, measure in PARTS.items():
        if options.only in (None, part):
            figures |= measure(options)
    report("models", options, figures)


if __name__ == "__main__":
    main()
