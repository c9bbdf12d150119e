"""Broadcast time to every worker, against shardcast 0.3.2 and the links' bounds.

`python -m benchmarks.broadcast [--json] [--only PART ...] [--repeats N] [--quick] [--no-peer]`. Origin, relays and
workers are processes on loopback, each with a folder of its own; a time runs from the order to publish to the last
worker that has the whole file, whose digest is then compared. Both sides take turns within one run. `--help` says
what each figure means.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import broadcast_delta
from benchmarks.broadcasting import bad_relay, egress, full, hops, idle, peer, striped, trace, trees
from benchmarks.broadcasting.delivery import BroadcastFile, Setting, WorkerNotServed
from benchmarks.broadcasting.processes import NodeEnded
from benchmarks.peers import PeerUnavailable, add_peer_options
from benchmarks.report import make_parser, report, say

MIB = 2**20
QUICK = {
    "size_mib": 2,
    "link_mib": 2,
    "small_mib": 2,
    "delta_mib": 8,
    "workers": 2,
    "repeats": 1,
    "requests": 50,
    "heads": 3,
}

MEANINGS = {
    "full": {
        "full_speedup_vs_peer_defaults": "its seconds over ours; its relays look every 30 s, workers every 5",
        "full_speedup_vs_peer_1s": "the same; its relays and workers look every second",
        "full_seconds": "publish to last worker: origin, 2 relays, 8 workers, no caps; also _peer_defaults, _peer_1s",
        "workers_never_served": "workers without the right file after --patience, in the worst round",
        "workers_never_served_peer": "the same of the peer, over both intervals; its time then is the patience",
        "cpu_s_per_gib": "user and system seconds of all processes per GiB that reached workers; also of the peer",
        "cpu_s_per_gib_vs_peer": "ours over the peer's, at the interval where it needs less",
        "client_memory_mib": "peak resident memory of a worker process, Python included",
        "client_written_over_size": "bytes that a worker wrote over the size of the file; also of the peer",
    },
    "trees": {
        "share_of_bound_depth3": "2 S / u over seconds: 15 nodes, fan-out 2, uplinks of u = --link-mb-per-s; also 1, 2",
        "tree_seconds_depth3": "publish to last worker; also 1 and 2",
        "extra_hop_s": "seconds at depth 3 less those at depth 1, by hop",
    },
    "egress": {
        "origin_bytes_16_over_2_workers": "bytes that leave the origin for 2 relays and 16 workers, over 2 workers",
        "origin_bytes_over_size_16_workers": "the same bytes over the size of the file; also 2",
    },
    "striped": {
        "striped_seconds": "publish to a worker through 8 relays in striped trees, uplinks of --link-mb-per-s",
        "striped_share_of_bound": "S / u over those seconds",
        "striped_origin_bytes_over_size": "bytes that leave the origin meanwhile, over the size of the file",
    },
    "bad_relay": {
        "one_bad_relay_slowdown": "the worst of the next three",
        "one_corrupt_relay_slowdown": "seconds with one of three relays changing every chunk, over three good ones",
        "one_missing_relay_slowdown": "the same, one refusing connections",
        "one_slow_relay_slowdown": "the same, one with an uplink of 1 MB/s",
    },
    "idle": {
        "idle_connections_500_p99_ms": "a relay's manifest on a new connection while 500 say nothing",
        "idle_connections_still_open": "of the 500 at the end",
    },
    "hops": {
        "head_ms_per_hop": "from publishing a tiny version to its head at the third relay of a chain, by hop; median",
        "head_ms_per_hop_worst": "the same of the slowest version; head_ms_depth1, 2 and 3 are not by hop",
    },
    "delta": {
        "delta_ratio_066": "bytes of synthetic bfloat16 weights over those of a delta that changes 0.66 % of them",
        "delta_ratio_185": "the same where 1.85 % change",
        "delta_over_entropy": "bytes of a delta over the entropy bound, the worse of both",
        "delta_encode_gb_per_s": "full-size bytes compared and encoded per second on one core",
        "delta_decode_gb_per_s": "full-size bytes made from base and delta per second on one core",
    },
    "trace": {
        "trace_lr_1e6_ratio": "bytes of a policy of the trainer at this rate, over those of its delta",
        "trace_lr_1e6_changed": "share of its words that changed; also at 1e5, 5e5 and 2e4, for 1e-5, 5e-5 and 2e-4",
        "trace_lr_1e6_over_entropy": "bytes of the delta over the entropy that independent changes would have",
    },
    "lora": {
        "lora_8_lr_1e5_changed": "share of a policy's words that a step of rank 8 changes at this rate; also rank 32, "
        "1e6 and 1e4, and lora_full: of all weights",
        "lora_8_lr_1e5_delta_share": "bytes of that step's delta over those of the policy",
    },
}


Measure = Callable[[], Mapping[str, float | None]]


def parts(given: argparse.Namespace, folder: Path, environment: Path | None) -> dict[str, Measure]:
    """Return what measures each part."""

    def setting(size_mib: int, repeats: int) -> Setting:
        payload = BroadcastFile.made(folder / f"{size_mib}.bin", size_mib * MIB)
        return Setting(payload, repeats, given.patience, given.folder, given.link_mb_per_s * 1e6)

    few = min(3, given.repeats)
    waiting = {"patience_s": given.patience, "within": given.folder}
    return {
        "full": lambda: full.measure(setting(given.size_mib, given.repeats), given.workers, environment),
        "trees": lambda: trees.measure(setting(given.link_mib, few)),
        "striped": lambda: striped.measure(setting(given.link_mib, few)),
        "egress": lambda: egress.measure(setting(given.small_mib, few)),
        "bad_relay": lambda: bad_relay.measure(setting(given.link_mib, few)),
        "idle": lambda: idle.measure(setting(given.small_mib, 1), requests=given.requests),
        "hops": lambda: hops.measure(versions=given.heads, **waiting),
        "delta": lambda: delta_figures(given.delta_mib * MIB, given.repeats),
        "trace": lambda: trace.measure(folder),
        "lora": lambda: trace.measure_adapters(folder),
    }


def delta_figures(size_bytes: int, repeats: int) -> dict[str, float]:
    """Return the figures of `broadcast_delta`, its further cases under names of their own."""
    found = broadcast_delta.measure(size_bytes=size_bytes, repeats=repeats)
    others: dict[str, dict[str, float]] = found.pop("other")
    return found | {f"delta_{case}_{key}": value for case, each in others.items() for key, value in each.items()}


def measure(given: argparse.Namespace, environment: Path | None) -> tuple[dict[str, float | None], dict[str, str]]:
    """Measure the parts asked for; return the figures, and a reason for each that could not be measured."""
    figures, reasons = dict[str, float | None](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="broadcast-files-", dir=given.folder) as folder:
        for part, run in parts(given, Path(folder), environment).items():
            if part not in given.only:
                continue
            say(f"measuring {part}")
            try:
                figures |= run()
            except (WorkerNotServed, NodeEnded) as error:
                reasons |= dict.fromkeys(MEANINGS[part], str(error))
                figures |= dict.fromkeys(MEANINGS[part])
    return figures, reasons


def find_peer(given: argparse.Namespace) -> tuple[Path | None, dict[str, str]]:
    """Return the peer's environment; without one, why each of its figures is null."""
    if "full" not in given.only:
        return None, {}
    if given.no_peer:
        return None, dict.fromkeys(full.PEER_KEYS, "not asked for (--no-peer)")
    try:
        return peer.installed(given.peer_folder), {"peer": f"shardcast {peer.VERSION} from PyPI"}
    except PeerUnavailable as error:
        return None, dict.fromkeys(full.PEER_KEYS, str(error))


def main() -> None:
    meanings = [f"  {key:34} {meaning}" for keys in MEANINGS.values() for key, meaning in keys.items()]
    parser = make_parser(__doc__, epilog="\n".join(["figures:", *meanings]))
    parser.add_argument("--only", nargs="+", choices=MEANINGS, default=list(MEANINGS), help="these parts")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of full (default 5); of the rest at most 3")
    parser.add_argument("--quick", action="store_true", help="small files and one round: that it runs, not how fast")
    parser.add_argument("--size-mib", type=int, default=512, help="the file of full (default 512)")
    parser.add_argument("--link-mib", type=int, default=128, help="the file behind capped links (default 128)")
    parser.add_argument("--link-mb-per-s", type=float, default=25.0, help="an uplink's speed (default 25)")
    parser.add_argument("--workers", type=int, default=8, help="of full (default 8)")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that a broadcast may take (default 120)")
    parser.add_argument("--folder", type=Path, help="where processes keep their files (default: the temporary folder)")
    add_peer_options(parser, f"shardcast {peer.VERSION}", interpreter=False)
    parser.set_defaults(small_mib=16, delta_mib=256, requests=500, heads=20)
    given = parser.parse_args()
    if given.quick:
        vars(given).update(QUICK)
    environment, notes = find_peer(given)
    figures, reasons = measure(given, environment)
    notes |= reasons | {
        "full": f"{given.size_mib} MiB, 2 relays, {given.workers} workers, {given.repeats} rounds",
        "links": f"{given.link_mib} MiB, uplinks of {given.link_mb_per_s:g} MB/s",
        "bound": "fan-out * S / u, which is also the lower bound for these senders and receivers, without hops' costs",
    }
    report("broadcast", given, figures, notes)


if __name__ == "__main__":
    main()
