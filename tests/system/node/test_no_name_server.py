"""A machine whose /etc/resolv.conf names no server: a worker waits for its peers as on any other without a network.

libp2p makes a resolver where it is imported, which raises there: a contributor at home behind a broken router would see
an internal error, and one whose peers are given as addresses could not join at all.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from locations import ROOT

from node.keys.identity import create_key
from node.protocol.peers import peer_id_of

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
EMPTY = 'mount --bind /dev/null /etc/resolv.conf && exec "$@"'


@pytest.mark.timeout(300)
def test_a_worker_without_a_name_server_says_which_peer_it_cannot_reach_and_tries_again(tmp_path: Path) -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run([*NAMESPACE, "sh", "-c", EMPTY, "", "true"], check=False).returncode
    ):
        pytest.skip("no namespace to be had in which /etc/resolv.conf is another")
    peer = peer_id_of(create_key(tmp_path / "peer").public_key().public_bytes_raw())
    join = f"swarmproof://{'ab' * 32}/dns4/nowhere.invalid/tcp/8701/p2p/{peer}"
    worker = [sys.executable, "-m", "node.cli", "worker", "--join", join, "--state", str(tmp_path / "state")]
    with subprocess.Popen(
        [*NAMESPACE, "sh", "-c", EMPTY, "", *worker],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        said = ""
        for line in process.stdout:
            said += line
            if "no peer reachable" in line:
                process.terminate()
    assert re.search(r"no peer reachable \(nowhere\.invalid:8701: .* name .*\); retrying", said), said
    assert process.returncode == 0, said
