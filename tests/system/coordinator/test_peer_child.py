"""The peer beside a coordinator: it deals with strangers, so it may die; and it must not outlive its coordinator."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ports import free_port
from processes import is_running
from waiting import until

from coordinator.run import peer_child
from coordinator.run import peer_setup as opening
from coordinator.run.joining import joining_of
from coordinator.run.peer_child import PEER_FOLDER, PeerChild, PeerPlan
from coordinator.run.peer_setup import open_to_peers
from node.keys.identity import load_key
from node.protocol.peers import parse_address, parse_join, peer_id_of

SOON = 60.0
RUN = "5f" * 32
OTHER = peer_id_of(Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw())


def script(folder: Path, body: str) -> list[str]:
    """A process that notes its id and the time at which it began, and then does `body`."""
    note = f"import os, sys, time; open({str(folder / 'began')!r}, 'a').write(f'{{os.getpid()}} {{time.time()}}\\n')"
    return [sys.executable, "-c", f"{note}\n{body}"]


def began(folder: Path) -> list[tuple[int, float]]:
    path = folder / "began"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), float(at)) for pid, at in map(str.split, lines)]


WAIT = "sys.stdin.read()"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_child, "FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(peer_child, "MAX_PAUSE_SECONDS", 0.4)
    monkeypatch.setattr(peer_child, "STOP_SECONDS", 3.0)


def test_it_runs_as_long_as_its_coordinator_and_no_longer(tmp_path: Path) -> None:
    with PeerChild(script(tmp_path, WAIT)):
        until(lambda: began(tmp_path))
        (pid, _) = began(tmp_path)[0]
        assert is_running(pid)
    assert not is_running(pid)
    assert len(began(tmp_path)) == 1


def test_one_that_dies_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with PeerChild(script(tmp_path, WAIT)):
        until(lambda: began(tmp_path))
        os.kill(began(tmp_path)[0][0], signal.SIGKILL)
        until(lambda: len(began(tmp_path)) == 2)
        assert is_running(began(tmp_path)[1][0])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "the peer ended with exit code -9; restarting it in 0.1 s"


def test_one_that_cannot_run_is_started_less_and_less_often(tmp_path: Path) -> None:
    """Its port is taken: the machine must not be busy with starting it."""
    with PeerChild(script(tmp_path, "sys.exit(1)")):
        until(lambda: len(began(tmp_path)) == 6)
    times = [at for _, at in began(tmp_path)]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert all(pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4, 0.4, 0.4), strict=False))


def test_one_that_had_run_for_long_is_started_again_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_child, "STEADY_SECONDS", 0.0)
    monkeypatch.setattr(peer_child, "MAX_PAUSE_SECONDS", 60.0)
    with PeerChild(script(tmp_path, "sys.exit(1)")):
        until(lambda: len(began(tmp_path)) == 9)


def test_a_machine_that_starts_no_process_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = tmp_path / "python"
    with PeerChild([str(program), *script(tmp_path, WAIT)[1:]]):
        until(lambda: "could not be started (No such file or directory)" in caplog.text)
        program.symlink_to(sys.executable)
        until(lambda: began(tmp_path))


def test_one_that_does_not_listen_to_signals_is_killed(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('deaf', 'w'); time.sleep(60)"
    deaf = deaf.replace("'deaf'", repr(str(tmp_path / "deaf")))
    with PeerChild(script(tmp_path, deaf)):
        until((tmp_path / "deaf").exists)
        (pid, _) = began(tmp_path)[0]
        before = time.monotonic()
    until(lambda: not is_running(pid))
    assert time.monotonic() - before < 30, "it ended by itself, after its 60 s"


def test_a_stop_right_after_the_start_leaves_nobody(tmp_path: Path) -> None:
    for _ in range(5):
        with PeerChild(script(tmp_path, WAIT)):
            pass
    until(lambda: not any(is_running(pid) for pid, _ in began(tmp_path)))


def test_a_ctrl_c_is_the_coordinators(tmp_path: Path) -> None:
    """The terminal sends it to all of its processes: the peer would end first, and be reported and started again."""
    with PeerChild(script(tmp_path, WAIT)):
        until(lambda: began(tmp_path))
        (pid, _) = began(tmp_path)[0]
        assert os.getsid(pid) != os.getsid(0)


PARENT = """
import sys, time
from coordinator.run.peer_child import PeerChild
with PeerChild({command!r}):
    time.sleep(600)
"""


def test_the_peer_itself_ends_with_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    """A coordinator that is started again would find its peer's port taken."""
    pytest.importorskip("libp2p")
    plan = PeerPlan(state=tmp_path / "peer", host="127.0.0.1", port=free_port())
    plan.addresses()
    command = plan.command(coordinator="http://127.0.0.1:9", run_id=RUN)
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(command=command)])
    try:
        until((tmp_path / "peer" / "status.json").exists)
        (pid,) = children(parent.pid)
        parent.kill()
        parent.wait(SOON)
        until(lambda: not is_running(pid))
    finally:
        parent.kill()
        parent.wait()


def children(pid: int) -> list[int]:
    """Of all threads: it is one of them that starts the peer."""
    lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(each) for each in " ".join(lists).split()]


# -- what is planned, and told to those who join


def test_the_plan_names_the_peers_own_key_and_where_it_is_reached(tmp_path: Path) -> None:
    plan = PeerPlan(state=tmp_path, host="127.0.0.1", port=8701, reached=(("a.example", 1), ("2001:db8::7", 2)))
    peer_id = peer_id_of(load_key_of(plan))
    assert [str(address) for address in plan.addresses()] == [
        f"/dns/a.example/tcp/1/p2p/{peer_id}",
        f"/ip6/2001:db8::7/tcp/2/p2p/{peer_id}",
    ]
    command = plan.command(coordinator="http://127.0.0.1:8700", run_id=RUN)
    assert command[command.index("--peer-listen") + 1] == "127.0.0.1:8701"
    assert [command[i + 1] for i, part in enumerate(command) if part == "--peer-address"] == [
        "a.example:1",
        "[2001:db8::7]:2",
    ]
    assert "--until-parent-ends" in command


def load_key_of(plan: PeerPlan) -> bytes:
    plan.addresses()
    return load_key(plan.state / "key").public_key().public_bytes_raw()


def opened(tmp_path: Path, host: str = "127.0.0.1", **changes: object) -> opening.PeerSetup:
    settings: dict[str, object] = {
        "run_id": RUN,
        "data": tmp_path,
        "endpoints": (),
        "with_peer": None,
        "peer_port": 8701,
        "peer_state": None,
        "peer_addresses": (),
        "introduced": (),
        "revoked": (),
    }
    return open_to_peers(host, 8700, **(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
def libp2p(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda there: monkeypatch.setattr(opening, "has_libp2p", lambda: there)


def join_options(setup: opening.PeerSetup) -> str:
    joining = joining_of(RUN, endpoints=setup.contacts.endpoints, peers=setup.contacts.peers)
    assert joining is not None
    return joining.options


def test_with_libp2p_one_string_is_enough_to_join(tmp_path: Path, libp2p: Callable[[bool], None]) -> None:
    libp2p(True)
    said = opened(tmp_path)
    option, join = join_options(said).split()
    assert option == "--join"
    node = load_key(tmp_path / PEER_FOLDER / "key").public_key().public_bytes_raw()
    assert parse_join(join).peers == (parse_address(f"/ip4/127.0.0.1/tcp/8701/p2p/{peer_id_of(node)}"),)
    assert said.contacts.peers == tuple(map(str, parse_join(join).peers))
    assert said.contacts.endpoints == ("http://127.0.0.1:8700",)


def test_without_libp2p_a_url_and_the_runs_id_are(tmp_path: Path, libp2p: Callable[[bool], None]) -> None:
    libp2p(False)
    said = opened(tmp_path, endpoints=("http://192.0.2.1:80/",))
    assert join_options(said) == f"--coordinator http://192.0.2.1:80 --run-id {RUN}"
    assert said.contacts == opening.Contacts(endpoints=("http://192.0.2.1:80",))


def test_other_peers_are_introduced_too(tmp_path: Path, libp2p: Callable[[bool], None]) -> None:
    libp2p(True)
    other = f"/dns/b.example/tcp/8701/p2p/{OTHER}"
    said = opened(tmp_path, with_peer=False, introduced=(other, other))
    assert join_options(said) == f"--join swarmproof://{RUN}{other}"
    assert said.contacts.peers == (other,)
    with said.peer:
        pass


def test_a_name_to_serve_at_is_an_address_to_the_peer(tmp_path: Path, libp2p: Callable[[bool], None]) -> None:
    libp2p(True)
    said = opened(tmp_path, host="localhost")
    assert "/ip4/127.0.0.1/tcp/8701/" in join_options(said)
    assert said.contacts.endpoints == ("http://localhost:8700",)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"endpoints": tuple(f"http://192.0.2.{n}" for n in range(17))}, "--endpoint"),
        ({"endpoints": ("http://a.example/" + "a" * 500,)}, "--endpoint"),
        ({"introduced": tuple(f"/dns/b{n}.example/tcp/1/p2p/{OTHER}" for n in range(33))}, "--introduce"),
        ({"introduced": ("http://b.example",)}, "--introduce"),
        ({"revoked": tuple(f"{n:064x}" for n in range(257))}, "--revoke"),
        ({"peer_addresses": ("here",)}, "--peer-address"),
        ({"peer_addresses": ("127.1:1",)}, "--peer-address"),
    ],
)
def test_what_no_node_would_accept_is_refused_before_it_is_signed(
    tmp_path: Path, libp2p: Callable[[bool], None], changes: dict[str, object], option: str
) -> None:
    """A descriptor with 257 revoked keys is one that every node refuses: the run would be over."""
    libp2p(True)
    with pytest.raises(click.BadParameter) as caught:
        opened(tmp_path, **changes)
    assert caught.value.param_hint == option
