"""An origin that dates its manifests alike in every run: prompts and seeds follow from their digests."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast import Origin
from shardcast.manifest import SignedManifest

ISSUED_AT = 1_790_000_000
CENTURY = 100 * 365 * 86400


class DatedOrigin(Origin):
    """Signs manifests at a fixed time, and heads at the present one, which expire within a minute."""

    def __init__(self, folder: Path, key: Ed25519PrivateKey, run_id: str, **options: Any) -> None:
        self._thread = threading.local()
        super().__init__(folder, key, run_id, clock=self._now, manifest_lifetime_s=CENTURY, **options)

    def _now(self) -> float:
        return getattr(self._thread, "dated", None) or time.time()

    def _add(self, *args: Any) -> SignedManifest:
        self._thread.dated = ISSUED_AT
        try:
            return super()._add(*args)
        finally:
            self._thread.dated = None
