"""The far side of `benchmarks.toploc_peer`: runs in an environment of its own, whose `toploc` is the peer's.

Started as `python -I toploc_peer_worker.py THREADS`, so that neither this folder's `toploc.py` nor this project's
package is found. One JSON object per line: a greeting with versions, then a reply to each request read from standard
input.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import toploc


class Worker:
    """Times the peer on one sequence at a time, given as a file of raw bfloat16."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._calls: dict[str, Callable[[], Any]] = {}

    def load(self, path: str, hidden: int, tokens: int, topk: int) -> dict[str, Any]:
        """Take the sequence [-1, hidden] in the file `path`, as a tensor and as a list of its rows."""
        raw = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.bfloat16)
        tensor = raw.view(-1, hidden)
        self._calls = {}
        for form, activations in (("tensor", tensor), ("list", list(tensor))):
            settings = {"decode_batching_size": tokens, "topk": topk, "skip_prefill": True}
            self._add(form, activations, settings)
        return {}

    def _add(self, form: str, activations: Any, settings: dict[str, Any]) -> None:
        proofs = toploc.build_proofs_bytes(activations, **settings)
        # The peer turns any error into null proofs, and nothing is faster to build.
        if not proofs or any(proof[:2] == b"\0\0" for proof in proofs):
            raise RuntimeError(f"the peer built null proofs of a {form}")
        self._calls[f"build_{form}"] = lambda: toploc.build_proofs_bytes(activations, **settings)
        self._calls[f"verify_{form}"] = lambda: toploc.verify_proofs_bytes(activations, proofs, **settings)

    def time(self, call: str) -> dict[str, Any]:
        """Milliseconds of one call, by this process's own clock: the pipe does not count."""
        # The peer's list path leaves OpenMP with as many threads as there are cores.
        torch.set_num_threads(self._threads)
        start = time.perf_counter()
        self._calls[call]()
        return {"ms": (time.perf_counter() - start) * 1e3}

    def verify(self, call: str) -> dict[str, Any]:
        results = self._calls[call]()
        return {"results": [[r.exp_mismatches, r.mant_err_mean, r.mant_err_median] for r in results]}


def main() -> None:
    worker = Worker(int(sys.argv[1]))
    actions = {"load": worker.load, "time": worker.time, "verify": worker.verify}
    print(json.dumps({"toploc": importlib.metadata.version("toploc"), "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(actions[request.pop("do")](**request)), flush=True)


if __name__ == "__main__":
    main()
