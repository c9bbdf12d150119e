"""Groups of honest work as they are measured, made up from a seed."""

from __future__ import annotations

import random

from node.verification.deviations import Deviations

TOKENS, ROLLOUTS, CHUNK = 12, 8, 6


def rollout(rng, *, worker=0.0, shared=0.0, scale=1.0):
    """A completion of up to TOKENS tokens; what its machine and its group's prompt add is in every value."""
    tokens = rng.randint(3, TOKENS)
    chunks = -(-tokens // CHUNK)
    add_on = worker + shared

    def noise(size, mean):
        return [scale * max(0.0, mean + add_on + rng.gauss(0, 0.3)) for _ in range(size)]

    return Deviations(
        exponent_mismatches=[float(rng.random() < 0.2 + 0.3 * max(0.0, add_on)) for _ in range(chunks)],
        mantissa_means=noise(chunks, 2.0),
        mantissa_medians=noise(chunks, 1.0),
        sketch_distances=noise(tokens, 1.2),
        margins=[scale * rng.expovariate(100) if rng.random() < 0.01 else 0.0 for _ in range(tokens)],
        errors=[scale * rng.expovariate(50 / (1 + max(0.0, add_on))) for _ in range(tokens)],
    )


def worker_groups(count, *, seed, worker=0.0, spread=0.15, scale=1.0):
    """Groups of one worker; `spread` is the standard deviation of what a group's values share."""
    rng = random.Random(seed)
    groups = []
    for _ in range(count):
        shared = rng.gauss(0, spread)
        groups.append([rollout(rng, worker=worker, shared=shared, scale=scale) for _ in range(ROLLOUTS)])
    return groups
