"""What strangers who serve nothing cost a run: `python -m benchmarks.liveness [--json] [--only PART ...]`.

fetch: `swarmproof fetch` of a file, a whole process each time, from one good source and two hostile ones, for each
behaviour of `coordinator.lab.redteam.relay_behaviours`; and from one good source among many that hang. The same with
good sources alone is measured in the same run, before and after. A behaviour is over the bound where it costs more than
3 times the all-good time + 2 s, or 2 s of processor time more.

swarm: admitted groups a minute of a real swarm, in turn without and with dozens of hostile relays of six kinds that
announce themselves under free keys and change their addresses; and the time that a worker takes to join.

selection: what is trained on, and how fast, while a third of the nodes hold the slots that they dislike: of one
environment, with signal, or better than the mean. The bias is the mean reward of what was trained on less that of what
was leased; beside it, what it would be if all that was withheld had stayed missing.

hoarding: the same while free keys of three networks take leases, and hold them or return them at once; and how long a
newcomer of another network waits for its first lease.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.attacking.fetches import measure_fetch
from benchmarks.attacking.selection import measure_selection
from benchmarks.attacking.swarm import measure_hoarding, measure_swarm
from benchmarks.report import make_parser, report
from coordinator.lab.redteam.relay_behaviours import BEHAVIOURS

PARTS: Final = ("fetch", "swarm", "hoarding", "selection")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    parser.add_argument("--size-mib", type=int, default=8, help="the file of fetch (default 8)")
    parser.add_argument("--repeats", type=int, default=2, help="of each; the worst fetch and the median rate count")
    parser.add_argument("--behaviour", action="append", choices=list(BEHAVIOURS), help="of relays (default: all)")
    parser.add_argument("--hanging", type=int, nargs="*", default=[3, 49], help="sources that hang (default 3 49)")
    parser.add_argument("--relays", type=int, default=36, help="hostile ones around the swarm (default 36)")
    parser.add_argument("--hoarders", type=int, default=60, help="free keys that take leases (default 60)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the swarm, each time (default 60)")
    given = parser.parse_args()
    figures, rows = dict[str, Any](), list[dict[str, Any]]()
    if "fetch" in given.only:
        found = measure_fetch(given.size_mib, given.repeats, given.behaviour or list(BEHAVIOURS), given.hanging)
        figures, rows = found["figures"], found["rows"]
    if "swarm" in given.only:
        figures |= measure_swarm(given.seconds, given.repeats, given.relays)
    if "hoarding" in given.only:
        figures |= measure_hoarding(given.seconds, given.repeats, given.hoarders)
    if "selection" in given.only:
        figures |= measure_selection(given.seconds, given.repeats)
    report("liveness", given, figures, {}, rows=rows)


if __name__ == "__main__":
    main()
