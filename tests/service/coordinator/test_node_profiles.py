"""Nickname and hardware of a node: told with its registration, shown as what it says, and good for nothing else."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from sqlalchemy import insert, select, update
from stocked_runs import Run, run_with
from swarm import REGISTRATION, Peer

from coordinator.storage.schema import nodes, profiles
from node.protocol.profiles import Hardware
from shardcast.wire import encode

H200 = Hardware(device="NVIDIA H200", engine="vllm 0.32.0", dtype="bfloat16")
CPU = Hardware(device="CPU", engine="torch 2.13.0", dtype="float32")


@pytest.fixture
def run(tmp_path: Path, database_url: str | None) -> Iterator[Run]:
    with run_with(tmp_path, None, database_url=database_url) as found:
        yield found


def told(run: Run, peer: Peer) -> tuple[Any, Any]:
    said = json.loads(run.get(f"/v1/nodes/{peer.node}").body)
    return said.get("nickname"), said.get("hardware")


def test_what_a_node_says_is_what_its_last_registration_said(run: Run) -> None:
    peer = Peer(run.url, run.home.run_id)
    assert peer.register(nickname="Zo\u00eb 7", hardware=H200).status == 200
    assert told(run, peer) == ("Zo\u00eb 7", {"device": "NVIDIA H200", "engine": "vllm 0.32.0", "dtype": "bfloat16"})
    assert peer.register(hardware=CPU).status == 200, "another GPU, or none, and no nickname any more"
    assert told(run, peer) == (None, {"device": "CPU", "engine": "torch 2.13.0", "dtype": "float32"})
    assert peer.register(nickname="b").status == 200
    assert told(run, peer) == ("b", None)
    assert peer.register().status == 200
    assert told(run, peer) == (None, None)
    with run.home.database.read() as connection:
        assert connection.execute(select(profiles)).all() == []


def test_pages_show_it_beside_the_id_and_two_of_one_nickname_are_both_found(run: Run) -> None:
    peers = [Peer(run.url, run.home.run_id) for _ in range(3)]
    for peer, nickname, hardware in zip(peers, ("Zo\u00eb_7", "zo\u00eb 7", "Ada"), (H200, CPU, UNSET), strict=True):
        assert peer.register(nickname=nickname, hardware=hardware).status == 200
    table = run.get("/").text.partition('id="workers"')[2]
    for peer, words in zip(peers, ("Zo\u00eb_7</bdi>", "CPU, torch<", "Ada</bdi>"), strict=True):
        row = next(row for row in table.split("<tr>") if peer.node in row)
        assert words in row
        assert f"{peer.node[:8]}\u2026{peer.node[-4:]}" in row
    page = run.get(f"/nodes/{peers[0].node}").text
    for words in ("Zo\u00eb_7</bdi>", "NVIDIA H200", "vllm 0.32.0, bfloat16", peers[0].node):
        assert words in page
    both = run.get("/find?q=" + urllib.parse.quote("ZO\u00cb 7")).text
    assert all(f'/nodes/{peer.node}"' in both for peer in peers[:2])
    assert f"<h1>Node {peers[2].node[:8]}" in run.get("/find?q=ada").text, "one page alone can be meant"
    assert peers[2].node in run.get(f"/find?q={peers[2].node[:12]}").text


def test_markup_does_not_pass_the_door_and_would_be_text_on_every_page(run: Run) -> None:
    peer = Peer(run.url, run.home.run_id)
    for name in ("<b>x</b>", "a\u202eb", "a\u200bb", " a", "a" * 33):
        refused = peer.register(nickname=name)
        assert (refused.status, refused.code) == (400, "bad_nickname")
    strange = encode(REGISTRATION)[:-1] + b',"hardware":{"device":"<b>","engine":"e","dtype":"d"}}'
    refused = peer.signed("POST", "/v1/nodes", strange)
    assert (refused.status, refused.code) == (400, "bad_request")
    with run.home.database.read() as connection:
        assert connection.execute(select(nodes.c.node)).all() == []
    assert peer.register(nickname="plain").status == 200
    markup = "<img src=x>\u202e"
    with run.home.database.write() as connection:
        connection.execute(update(profiles).values(nickname=markup))
        connection.execute(insert(nodes).values(node="ab" * 32, software="", engine="", registered_at=0, seen_at=0))
        connection.execute(
            insert(profiles).values(node="ab" * 32, nickname=markup, folded="plain", device="", engine="", dtype="")
        )
    for path in ("/", f"/nodes/{peer.node}", "/find?q=plain"):
        page = run.get(path).text
        assert "&lt;img src=x&gt;\u27e8U+202E\u27e9" in page, path
        assert "<img" not in page
