"""toploc 0.1.6 on forged proofs; runs in an environment of its own, whose `toploc` is the peer's.

Started as `python -I peer_worker.py FOLDER HIDDEN TOKENS TOPK`. The folder holds `states.bf16`, the verifier's states
of one chunk after the other, and for each rung `RUNG.proofs`, a proof for each chunk. Prints for each rung how many are
within the published limits, as one JSON object. Chunks are handed over in tensors of a hundred or so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import toploc

PUBLISHED_LIMITS = (38, 10.0, 8.0)
CHUNKS_AT_ONCE = 128


def accepted(states: torch.Tensor, proofs: list[bytes], tokens: int, topk: int) -> int:
    """How many chunks of `states` [chunks * tokens, hidden] are within the limits of their proofs."""
    taken = 0
    for start in range(0, len(proofs), CHUNKS_AT_ONCE):
        part = proofs[start : start + CHUNKS_AT_ONCE]
        rows = states[start * tokens : (start + len(part)) * tokens]
        results = toploc.verify_proofs_bytes(rows, part, decode_batching_size=tokens, topk=topk, skip_prefill=True)
        if len(results) != len(part):
            raise RuntimeError(f"the peer has {len(results)} results for {len(part)} proofs")
        found = [(one.exp_mismatches, one.mant_err_mean, one.mant_err_median) for one in results]
        taken += sum(all(value <= limit for value, limit in zip(one, PUBLISHED_LIMITS, strict=True)) for one in found)
    return taken


def main() -> None:
    torch.set_num_threads(1)
    folder, (hidden, tokens, topk) = Path(sys.argv[1]), map(int, sys.argv[2:])
    raw = torch.frombuffer(bytearray((folder / "states.bf16").read_bytes()), dtype=torch.bfloat16)
    states, size = raw.view(-1, hidden), 2 + 2 * topk
    counts = {}
    for file in sorted(folder.glob("*.proofs")):
        data = file.read_bytes()
        proofs = [data[start : start + size] for start in range(0, len(data), size)]
        counts[file.stem] = accepted(states, proofs, tokens, topk)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
