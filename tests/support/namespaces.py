"""A small internet of network namespaces: an operator, a street, and a home behind a router that translates addresses.

    operator 10.77.1.2 ---+
                          +--- net ---+--- router 10.77.3.2 | 192.168.7.1 --- home 192.168.7.2
    street   10.77.2.2 ---+

The router is one of nftables, as in every home: it gives what leaves the home its own address, and lets in only what
answers. Names carry this process's id, so that two test sessions do not meet, and what a killed one left is told apart.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from locations import ROOT

OPERATOR, STREET, ROUTER, HOME = "10.77.1.2", "10.77.2.2", "10.77.3.2", "192.168.7.2"
PLACES = ("net", "operator", "street", "router", "home")
_LINKS = (
    # place, interface and address at either end
    ("net", "operator", "10.77.1.1/24", "operator", "uplink", f"{OPERATOR}/24"),
    ("net", "street", "10.77.2.1/24", "street", "uplink", f"{STREET}/24"),
    ("net", "router", "10.77.3.1/24", "router", "outside", f"{ROUTER}/24"),
    ("router", "inside", "192.168.7.1/24", "home", "uplink", f"{HOME}/24"),
)
_ROUTES = (
    ("operator", "default", "10.77.1.1"),
    ("street", "default", "10.77.2.1"),
    ("router", "default", "10.77.3.1"),
    ("home", "default", "192.168.7.1"),
    # A provider has no such route. With it, whoever is kept out is kept out by the router.
    ("net", "192.168.7.0/24", ROUTER),
)
_NAT = """
table ip home {
  chain leaving { type nat hook postrouting priority srcnat; oifname "outside" masquerade; }
  chain passing {
    type filter hook forward priority filter; policy drop;
    iifname "inside" accept
    ct state established,related accept
  }
  chain arriving {
    type filter hook input priority filter; policy drop;
    iifname "inside" accept
    ct state established,related accept
  }
}
"""
GRACE_SECONDS = 10.0


def _run(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done


@functools.cache
def why_not() -> str:
    """What stands against namespaces here; empty if they can be had."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing (Debian: iproute2, nftables)"
    name = f"vs-{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
            _run("ip", "netns", "exec", name, "nft", "-f", "-", text=_NAT)
        finally:
            _run("ip", "netns", "del", name)
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces are not permitted here ({error})"
    return ""


needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be had")


@dataclass
class Internet:
    """The places, and the processes in them."""

    logs: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What `swarmproof` is in a place; the checkout's where a place is not named."""

    def name(self, place: str) -> str:
        """Of its namespace."""
        return f"vs-{os.getpid()}-{place}"

    def build(self) -> None:
        """Make the namespaces, and wire them up."""
        for place in PLACES:
            _run("ip", "netns", "add", self.name(place))
            _run("ip", "-n", self.name(place), "link", "set", "lo", "up")
        for one, interface, address, other, far, there in _LINKS:
            peer = ("peer", "name", far, "netns", self.name(other))
            _run("ip", "-n", self.name(one), "link", "add", interface, "type", "veth", *peer)
            for place, end, at in ((one, interface, address), (other, far, there)):
                _run("ip", "-n", self.name(place), "addr", "add", at, "dev", end)
                _run("ip", "-n", self.name(place), "link", "set", "dev", end, "up")
        for place in ("net", "router"):
            _run(*self._inside(place), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for place, to, via in _ROUTES:
            _run("ip", "-n", self.name(place), "route", "add", to, "via", via)
        _run(*self._inside("router"), "nft", "-f", "-", text=_NAT)

    def forbid(self, source: str, host: str, port: int) -> None:
        """Keep who comes from the address `source` from a port."""
        rule = f"ip saddr {source} ip daddr {host} tcp dport {port} reject with tcp reset"
        chain = f"chain passing {{ type filter hook forward priority filter; {rule}; }}"
        _run(*self._inside("net"), "nft", "-f", "-", text=f"table ip closed {{ {chain}; }}")

    def start(self, name: str, place: str, *arguments: str) -> None:
        """Run `swarmproof` with these arguments in a place."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self._swarmproof(place, arguments), cwd=ROOT, env=_environment(), stdout=log, stderr=log
            )

    def ask(self, place: str, *arguments: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """The same, to its end."""
        command = self._swarmproof(place, arguments)
        return subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=seconds, check=False
        )

    def can_connect(self, place: str, host: str, port: int) -> bool:
        """Whether TCP from there to `host` works."""
        code = f"import socket; socket.create_connection(({host!r}, {port}), timeout=2).close()"
        command = [*self._inside(place), sys.executable, "-c", code]
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=20, check=False).returncode == 0

    def get(self, place: str, url: str) -> bytes:
        """What is at `url`, seen from there; nothing where nobody answers."""
        code = "import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(sys.argv[1], timeout=5).read())"
        command = [*self._inside(place), sys.executable, "-c", code, url]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False
        ).stdout

    def log(self, name: str, lines: int = 15) -> str:
        """The end of what a process said."""
        path = self.logs / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def end(self) -> None:
        """Stop all processes, those included that they started, and remove every namespace that there is."""
        for process in self.processes.values():
            process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for place in PLACES:
            with contextlib.suppress(OSError):
                for pid in map(int, _run("ip", "netns", "pids", self.name(place)).stdout.split()):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", self.name(place))

    def _inside(self, place: str) -> list[str]:
        return ["ip", "netns", "exec", self.name(place)]

    def _swarmproof(self, place: str, arguments: tuple[str, ...]) -> list[str]:
        program = self.programs.get(place, (sys.executable, "-m", "node.cli"))
        return [*self._inside(place), *program, *arguments]


@contextlib.contextmanager
def internet(logs: Path) -> Iterator[Internet]:
    """One, while the block runs."""
    net = Internet(logs)
    try:
        net.build()
        yield net
    finally:
        net.end()


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
