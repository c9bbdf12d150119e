"""What a new key pays under `[membership] policy = "work"`, and what checking it costs: `docs/threat-model.md`.

`python -m benchmarks.membership [--json] [--attempts N] [--keys 1 24 100 1000]`, a few seconds of one core.

Attempts and checks are those of the worker and the coordinator, by the processor's time of one thread. The table is for
a run of default size with a policy out, where newcomers have 24 slots: what the last of so many keys within a minute
owes, and what all of them pay together.
"""

from __future__ import annotations

import time

from benchmarks.report import make_parser, report
from node.protocol.membership import MembershipSpec, find_work, price_bits, work_bits, work_seed
from node.protocol.run import BatchSpec

RUN_ID, NODE, SALT = "ab" * 32, "cd" * 32, "ef" * 32
OUT_OF_REACH = 128
"""Zero bits that no attempt has."""


def attempts_per_second(attempts: int) -> float:
    """Search in vain, as a worker does."""
    seed, began = work_seed(run_id=RUN_ID, node=NODE, salt=SALT), time.process_time()
    find_work(seed, bits=OUT_OF_REACH, start=0, attempts=attempts)
    return attempts / (time.process_time() - began)


def check_microseconds(checks: int) -> float:
    """Check proofs, as a coordinator does."""
    began = time.process_time()
    for counter in range(checks):
        work_bits(work_seed(run_id=RUN_ID, node=NODE, salt=SALT), counter)
    return (time.process_time() - began) / checks * 1e6


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--attempts", type=int, default=4_000_000)
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 24, 100, 1000])
    options = parser.parse_args()
    rules, batch = MembershipSpec(policy="work"), BatchSpec()
    capacity = (batch.max_async + 1) * batch.groups_per_step // 2
    rate = attempts_per_second(options.attempts)
    prices = [price_bits(rules, waiting=waiting, capacity=capacity) for waiting in range(max(options.keys))]
    dearest = next(
        n for n in range(capacity * 2**20) if price_bits(rules, waiting=n, capacity=capacity) == rules.most_bits
    )
    figures = {
        "attempts_per_second": rate,
        "check_microseconds": check_microseconds(options.attempts // 20),
        "seconds_at_bits": 2**rules.bits / rate,
        "seconds_at_most_bits": 2**rules.most_bits / rate,
        "keys_until_most_bits": dearest,
    }
    rows = [
        {
            "keys": keys,
            "bits_of_the_last": prices[keys - 1],
            "attempts": sum(2**bits for bits in prices[:keys]),
            "core_seconds": round(sum(2**bits for bits in prices[:keys]) / rate, 1),
        }
        for keys in options.keys
    ]
    report("membership", options, figures, {"newcomers_slots": capacity}, rows=rows)


if __name__ == "__main__":
    main()
