"""Far side of `benchmarks.toploc_peer`, in an environment whose `toploc` is the peer's.

Started as `python -I toploc_peer_worker.py THREADS`, so that neither this folder's `toploc.py` nor this project's
package is found. One JSON object per line: a greeting with versions, then a reply to each request read from standard
input.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import toploc


class PeerRunner:
    """Run the peer on one sequence at a time, given as a file of raw bfloat16."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def load(self, path: str, hidden: int, tokens: int, topk: int) -> dict[str, Any]:
        """Take the sequence [-1, hidden] in the file `path`, as a tensor and as a list of its rows."""
        tensor = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.bfloat16).view(-1, hidden)
        self._forms = {"tensor": tensor, "list": list(tensor)}
        self._proofs: dict[str, list[bytes]] = {}
        self._settings = {"decode_batching_size": tokens, "topk": topk, "skip_prefill": True}
        return {}

    def _call(self, name: str) -> Callable[[], Any]:
        """Return `build_FORM` or `verify_FORM`, the latter of the peer's own proofs."""
        action, _, form = name.partition("_")
        if form not in self._proofs:
            self._proofs[form] = toploc.build_proofs_bytes(self._forms[form], **self._settings)
            # The peer turns any error into null proofs, and nothing is faster to build.
            if not self._proofs[form] or any(proof[:2] == b"\0\0" for proof in self._proofs[form]):
                raise RuntimeError(f"the peer built null proofs of a {form}")
        if action == "build":
            return partial(toploc.build_proofs_bytes, self._forms[form], **self._settings)
        return partial(toploc.verify_proofs_bytes, self._forms[form], self._proofs[form], **self._settings)

    def time(self, call: str) -> dict[str, Any]:
        """Time one call by this process's own clock, so that the pipe does not count."""
        work = self._call(call)
        # The peer's list path leaves OpenMP with as many threads as there are cores.
        torch.set_num_threads(self._threads)
        start = time.perf_counter()
        work()
        return {"ms": (time.perf_counter() - start) * 1e3}

    def verify(self, call: str = "", proofs: Sequence[str] = ()) -> dict[str, Any]:
        """Verify by a call, or the tensor against `proofs`, in hexadecimal, one for each chunk."""
        if not proofs:
            return {"results": _numbers(self._call(call)())}
        given = list(map(bytes.fromhex, proofs))
        results = _numbers(toploc.verify_proofs_bytes(self._forms["tensor"], given, **self._settings))
        if len(results) != len(given):
            raise RuntimeError(f"the peer has {len(results)} results for {len(given)} proofs")
        return {"results": results}


def _numbers(results: Sequence[Any]) -> list[list[float]]:
    return [[each.exp_mismatches, each.mant_err_mean, each.mant_err_median] for each in results]


def main() -> None:
    worker = PeerRunner(int(sys.argv[1]))
    actions = {"load": worker.load, "time": worker.time, "verify": worker.verify}
    print(json.dumps({"toploc": importlib.metadata.version("toploc"), "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(actions[request.pop("do")](**request)), flush=True)


if __name__ == "__main__":
    main()
