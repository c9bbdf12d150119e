"""toploc 0.1.6 in an environment of its own, measured beside this project's package of the same name.

It has no wheel for the torch used here, so it is built from source against the same torch version: once, in minutes,
with a C++ compiler and the package index that pip is configured for. The environment is kept and used again.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import FOLDER, PeerUnavailable, environment

VERSION = "0.1.6"
WORKER = Path(__file__).with_name("toploc_peer_worker.py")


def torch_version() -> str:
    """Return this process's version without the build's name, in which PyPI and the CPU index differ."""
    return torch.__version__.partition("+")[0]


def installed(folder: Path = FOLDER) -> Path:
    """Return the interpreter of the peer's environment in `folder`, made on first use. Raise PeerUnavailable."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        raise PeerUnavailable(f"building toploc {VERSION} needs the C++ compiler {compiler}")
    before = [f"torch=={torch_version()}", "numpy", "setuptools", "wheel", "ninja"]
    # pip's cache may have it, built against another torch.
    source = ["--no-cache-dir", "--no-build-isolation", "--no-binary", "toploc", f"toploc=={VERSION}"]
    return environment(f"toploc-{VERSION}-torch-{torch_version()}", [before, source], folder=folder) / "bin" / "python"


class ToplocPeer:
    """Process that runs the peer, asked line by line. Raise PeerUnavailable where it is another version.

    It inherits this process's cores: the peer's C++ path takes a thread for each, whatever torch's own number is.
    """

    def __init__(self, python: Path, threads: int) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="toploc-peer-")
        self._activations = Path(self._files.name) / "activations.bf16"
        try:
            self._process = subprocess.Popen(
                [str(python), "-I", str(WORKER), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self._files.name,
            )
        except OSError as error:
            self._files.cleanup()
            raise PeerUnavailable(f"{python} does not start: {error}") from error
        try:
            self.versions = self._reply()
            self._require_versions(python)
        except PeerUnavailable:
            self.close()
            raise

    def _require_versions(self, python: Path) -> None:
        found = (self.versions["toploc"], self.versions["torch"].partition("+")[0])
        if found != (VERSION, torch_version()):
            raise PeerUnavailable(f"{python} has toploc {found[0]} and torch {found[1]}")

    def load(self, activations: Tensor, tokens: int, topk: int) -> None:
        """Hand over the sequence [n, hidden], bfloat16, in chunks of `tokens`, by a file of its bytes."""
        self._activations.write_bytes(activations.contiguous().view(torch.int16).numpy().tobytes())
        self._ask("load", path=str(self._activations), hidden=activations.shape[1], tokens=tokens, topk=topk)

    def ms(self, call: str) -> float:
        """Time `build_tensor`, `build_list`, `verify_tensor` or `verify_list`, by the peer's own clock."""
        return float(self._ask("time", call=call)["ms"])

    def results(self, call: str) -> list[tuple[int, float, float]]:
        """Return each chunk's exponent mismatches, mean and median mantissa error against the peer's own proof."""
        return self._ask("verify", call=call)["results"]

    def verify(self, proofs: Sequence[bytes]) -> list[tuple[int, float, float]]:
        """Verify `proofs`, one for each chunk of the sequence, and return the same numbers."""
        return self._ask("verify", proofs=[proof.hex() for proof in proofs])["results"]

    def _ask(self, action: str, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps({"do": action, **request}), file=self._process.stdin, flush=True)
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerUnavailable(f"toploc {VERSION} ended with exit status {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        with self._process:  # closes its pipes, at which it ends, and waits
            pass
        self._files.cleanup()
