"""Take the screenshots of docs/images from one demonstration (`make pictures`): ten minutes, with chromium."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parent.parent / "docs" / "images"
COLUMNS, LINES = 92, 30
WAIT_SECONDS = 900.0
PAGE, PHONE = {"width": 1280, "height": 1400}, {"width": 390, "height": 1400}
_REDRAWN = re.compile(r"\r?(?:\x1b\[\d*A|\x1b\[2K|\x1b\[J)+")


class Terminal:
    """A command on a pseudo-terminal, and the frames that it has drawn there, each over the one before."""

    def __init__(self, *arguments: str) -> None:
        near, far = pty.openpty()
        termios.tcsetwinsize(far, (LINES, COLUMNS))
        environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "OMP_NUM_THREADS": "1"}
        program = str(Path(sys.executable).parent / "swarmproof")
        self.process = subprocess.Popen(  # noqa: S603
            (program, *arguments), stdin=far, stdout=far, stderr=far, env=environment, start_new_session=True
        )
        os.close(far)
        self._written = bytearray()
        threading.Thread(target=self._read, args=(near,), daemon=True).start()

    def _read(self, near: int) -> None:
        try:
            while data := os.read(near, 65536):
                self._written += data
        except OSError:  # the command has ended
            pass

    @property
    def text(self) -> str:
        return bytes(self._written).decode(errors="replace")

    @property
    def frame(self) -> str:
        """The last frame that was drawn to its end."""
        return _REDRAWN.split(self.text)[-2]

    def wait(self, condition: Callable[[str], object]) -> None:
        """Wait until `condition(text)` is true; raises TimeoutError."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition(self.text):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(self.text[-2000:])
            time.sleep(0.2)


@contextmanager
def running(*arguments: str) -> Iterator[Terminal]:
    """A command that is interrupted, and waited for, when the context manager is left."""
    terminal = Terminal(*arguments)
    try:
        yield terminal
    finally:
        terminal.process.send_signal(signal.SIGINT)
        terminal.process.wait(60)


def shoot_frame(browser: Browser, frame: str, *, title: str, to: str) -> None:
    """Write a terminal's frame as a PNG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(frame.replace("\r\n", "\n").strip("\n")))
    page = browser.new_page(device_scale_factor=1.0)
    page.set_content(f"<body style='margin:0'>{console.export_svg(title=title)}</body>")
    page.locator("svg").first.screenshot(path=IMAGES / to, omit_background=True)
    page.close()


def shoot_page(browser: Browser, url: str, *, size: dict[str, int], to: str) -> None:
    """Write a web page as a PNG, `size` pixels wide and high."""
    page = browser.new_page(viewport=size)
    page.goto(url, wait_until="load")
    page.wait_for_timeout(1500)
    page.screenshot(path=IMAGES / to)
    page.close()


def rejected_submission(url: str) -> str:
    """Return the id of a submission that was rejected for its tokens or proofs."""
    with urllib.request.urlopen(f"{url}/v1/log/entries?start=0&end=1000") as reply:  # noqa: S310
        entries = [json.loads(line) for line in reply.read().splitlines() if line]
    wanted = [entry for entry in entries if entry.get("reason") in {"wrong_token", "proof_mismatch"}]
    return str(wanted[-1]["submission"])


def main() -> None:
    """Run the demonstration, with one more worker of a contributor's, and take every picture."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed: apt install chromium")
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        running("demo", "--keep", "--out", folder) as demo,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        demo.wait(lambda text: re.search(r"step 1[2-9]/30", text))
        (run,) = Path(folder).iterdir()
        said = (run / "logs" / "coordinator.log").read_text()
        url, join = re.search(r"serving at (\S+);.*?--join (\S+)", said, re.DOTALL).groups()
        with running("worker", "--join", join, "--state", f"{folder}/worker", "--slots", "2") as worker:
            demo.wait(lambda text: re.search(r"step 2[4-9]/30", text))
            shoot_frame(browser, demo.frame, title="make demo", to="demo.png")
            shoot_frame(browser, worker.frame, title="swarmproof worker", to="worker.png")
            shoot_page(browser, url, size=PAGE, to="run-page.png")
            shoot_page(browser, url, size=PHONE, to="run-page-phone.png")
        demo.wait(lambda text: "To audit it" in text)
        shoot_page(browser, f"{url}/submissions/{rejected_submission(url)}", size=PAGE, to="submission-page.png")
        shoot_page(browser, (run / "report.html").as_uri(), size=PAGE, to="report.png")
        browser.close()


if __name__ == "__main__":
    main()
