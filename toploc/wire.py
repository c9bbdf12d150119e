"""Wire format of a proof, that of toploc 0.1.6.

    modulus        uint16, big-endian, 1 .. 65497
    coefficient    uint16, big-endian, 0 .. 65496; k of them, ascending

Base64 is the standard alphabet with padding. Each proof has exactly one encoding: other bytes that would decode to the
same polynomial are refused, so that a digest of the bytes identifies the proof.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toploc.errors import BadModulus, MalformedProof
from toploc.field import MAX_TOPK, PRIME


def proof_size(topk: int) -> int:
    """Return the bytes of a proof of `topk` points: 258 for the usual 128."""
    return 2 + 2 * topk


def encode(moduli: Tensor, coefficients: Tensor) -> list[bytes]:
    """Encode `moduli` [n] and `coefficients` [n, k], both integral and below 2**16, as n proofs."""
    words = torch.cat([moduli.unsqueeze(1), coefficients.long()], dim=1)
    octets = torch.stack([words >> 8, words & 0xFF], dim=-1)
    buffer = bytearray(octets.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(octets.flatten())
    size = proof_size(coefficients.shape[1])
    return [bytes(buffer[start : start + size]) for start in range(0, len(buffer), size)]


def decode(proofs: Sequence[bytes], topk: int) -> tuple[Tensor, Tensor]:
    """Decode untrusted proofs, at least one, into moduli [n], int64, and coefficients [n, topk], float64.

    Raises `MalformedProof` or `BadModulus` with the index of the first proof that is not canonical.
    """
    size = proof_size(topk)
    for index, proof in enumerate(proofs):
        if not isinstance(proof, bytes):
            raise MalformedProof("a proof must be a bytes object", index=index)
        if len(proof) != size:
            raise MalformedProof(f"a proof of {topk} points must have {size} bytes, not {len(proof)}", index=index)
    # NumPy's calls take a tenth of torch's here, where the numbers are few.
    words = np.frombuffer(b"".join(proofs), ">u2").reshape(len(proofs), -1)
    moduli, coefficients = words[:, 0], words[:, 1:]
    if (bad := (coefficients >= PRIME).any(1)).any():
        raise MalformedProof(f"a coefficient must be below {PRIME}", index=int(bad.argmax()))
    if (bad := (moduli < 1) | (moduli > PRIME)).any():
        raise BadModulus(f"the modulus must be in 1 .. {PRIME}", index=int(bad.argmax()))
    return torch.from_numpy(moduli.astype(np.int64)), torch.from_numpy(coefficients.astype(np.float64))


def decode_one(proof: bytes) -> tuple[int, list[int]]:
    """Decode one proof whose k follows from its length; errors as `decode`."""
    if not isinstance(proof, bytes):
        raise MalformedProof("a proof must be a bytes object")
    if len(proof) % 2 or not proof_size(1) <= len(proof) <= proof_size(MAX_TOPK):
        raise MalformedProof(f"proof length of {len(proof)} bytes fits no k in 1 .. {MAX_TOPK}")
    moduli, coefficients = decode([proof], len(proof) // 2 - 1)
    return int(moduli[0]), coefficients[0].long().tolist()


def from_base64(text: str, *, max_bytes: int, index: int | None = None) -> bytes:
    """Decode canonical base64 of at most `max_bytes` bytes; raises `MalformedProof`."""
    if not isinstance(text, str) or len(text) > 4 * -(-max_bytes // 3):
        raise MalformedProof("a proof in base64 must be a string of bounded length", index=index)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedProof("a proof is not base64", index=index) from error
    if base64.b64encode(data).decode("ascii") != text:
        raise MalformedProof("a proof is not canonical base64", index=index)
    return data
