"""What a person sees while the demonstration runs: a live page on a terminal, a line for each step elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from rich import box
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.lab.processes.layout import WorkerPlace
from coordinator.lab.processes.summary import Summary
from coordinator.lab.processes.watch import RelayNow, SwarmSnapshot, WorkerNow
from coordinator.metrics.reward import reward_figure
from node.runtime.terminal import LiveDisplay, sparkline

WIDTH = 86
MIN_SPAN = 0.2
"""Of the sparkline: rewards that differ by less do not fill its height."""
_AUDIT_WORDS: dict[int | None, str] = {0: "agrees", 1: "DISAGREES", 2: "incomplete"}


@dataclass(frozen=True, slots=True)
class SwarmPicture:
    """All that one picture shows. `note` says what is happening where the rest does not."""

    snapshot: SwarmSnapshot
    run_id: str
    total_steps: int
    elapsed_seconds: float
    restarts: Mapping[str, int]
    note: str = ""
    title: str = "swarmproof demo"


class LiveView(LiveDisplay):
    """Draw one frame over the other; use as a context manager."""

    def show(self, frame: SwarmPicture) -> None:
        """Draw this frame."""
        self.update(render(frame), refresh=True)


class PlainView:
    """One line for each step, for pipes and files."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._shown = 0
        self._note = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def show(self, frame: SwarmPicture) -> None:
        """Write what is new since the last call."""
        if frame.note and frame.note != self._note:
            self._note = frame.note
            self._write(f"{clock(frame.elapsed_seconds)}  {frame.note}")
        for step in frame.snapshot.status.get("steps", [])[self._shown : frame.snapshot.finished_steps]:
            self._shown += 1
            self._write(step_line(frame, step["step"], step["reward_mean"]))

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def step_line(frame: SwarmPicture, step: int, reward: float) -> str:
    """Format one line about a finished step."""
    workers = frame.snapshot.workers
    admitted, rejected = sum(w.admitted for w in workers), sum(w.rejected for w in workers)
    hostile = sum(w.rejected for w in workers if not w.place.honest)
    return (
        f"{clock(frame.elapsed_seconds)}  step {step + 1}/{frame.total_steps}  reward {reward:.3f}  "
        f"admitted {admitted}  rejected {rejected} ({hostile} of hostile workers)"
    )


def render(frame: SwarmPicture) -> RenderableType:
    """Render the page."""
    snapshot = frame.snapshot
    page = Group(
        _header(frame),
        Padding(_training(frame), (1, 0, 0, 0)),
        Padding(_workers(snapshot.workers), (1, 0)),
        Padding(_relays(snapshot.relays), (0, 0, 1, 0)),
        _footer(frame),
    )
    return Constrain(page, WIDTH)


def clock(seconds: float) -> str:
    """Format minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def label(place: WorkerPlace) -> str:
    """Return a worker's name for people."""
    return place.name if place.honest else f"hostile: {place.kind}"


def _header(frame: SwarmPicture) -> RenderableType:
    line = Table.grid(expand=True)
    line.add_column()
    line.add_column(justify="right")
    title = Text.assemble((frame.title, "bold"), ("   run ", "dim"), (f"{frame.run_id[:16]}…", "dim"))
    line.add_row(title, Text(clock(frame.elapsed_seconds), "bold"))
    return line


def _training(frame: SwarmPicture) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=8)
    grid.add_column(justify="right", width=6)
    grid.add_column(width=34)
    grid.add_column(style="dim")
    snapshot, rewards = frame.snapshot, frame.snapshot.rewards
    if snapshot.head_version < 0:
        done, total = int(snapshot.progress.get("done", 0)), int(snapshot.progress.get("total", 0))
        loss = snapshot.progress.get("loss")
        phase = str(snapshot.progress.get("phase", "starting"))
        grid.add_row("policy", "none", _bar(done, total, style="yellow"), f"{phase} {done}/{total}" if total else phase)
        grid.add_row("loss", f"{loss:.3f}" if isinstance(loss, float) else "-")
        return grid
    steps = f"step {snapshot.finished_steps}/{frame.total_steps}"
    grid.add_row(
        "policy", Text(str(snapshot.head_version), "bold cyan"), _bar(snapshot.finished_steps, frame.total_steps), steps
    )
    figure = reward_figure(rewards)
    value = Text("-" if figure is None else f"{figure.last:.2f}", "bold green")
    beside = "" if figure is None or len(rewards) < 2 else f"from {figure.first:.2f}, by {figure.span}"
    grid.add_row("reward", value, Text(sparkline(rewards[-34:], min_span=MIN_SPAN), "green"), beside)
    return grid


def _bar(done: int, total: int, *, style: str = "cyan") -> RenderableType:
    return ProgressBar(total=max(total, 1), completed=done, width=34, complete_style=style, finished_style=style)


def _workers(workers: tuple[WorkerNow, ...]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, header_style="bold")
    table.add_column("worker", min_width=20, no_wrap=True)
    for heading in ("policy", "tokens", "tok/s", "admitted"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=max(6, len(heading)))
    table.add_column("rejected", no_wrap=True, min_width=22)
    for worker in workers:
        table.add_row(
            Text(label(worker.place), "" if worker.place.honest else "red"),
            "-" if worker.version is None else str(worker.version),
            f"{worker.tokens:,}",
            f"{worker.tokens_per_second:,.0f}",
            Text(str(worker.admitted), "green" if worker.admitted else "dim"),
            _rejected(worker),
        )
    return table


def _rejected(worker: WorkerNow) -> Text:
    if not worker.rejected:
        return Text("0", "dim")
    return Text.assemble((f"{worker.rejected:>3} ", "bold red"), (worker.main_reason or "", "red"))


def _relays(relays: tuple[RelayNow, ...]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, header_style="bold")
    table.add_column("relay", min_width=20, no_wrap=True)
    table.add_column("policy", justify="right", min_width=6)
    table.add_column("broadcast", min_width=30)
    table.add_column("", style="dim", no_wrap=True, min_width=12)
    for relay in relays:
        bar = ProgressBar(
            total=max(relay.chunks_total, 1),
            completed=relay.chunks_held,
            width=30,
            finished_style="blue",
            complete_style="magenta",
        )
        state = f"{relay.chunks_held}/{relay.chunks_total} chunks" if relay.chunks_total else ""
        table.add_row(
            relay.name, "-" if relay.version is None else str(relay.version), bar, state if relay.answering else "away"
        )
    return table


def _footer(frame: SwarmPicture) -> RenderableType:
    slots = frame.snapshot.status.get("slots", {})
    queue = ", ".join(f"{slots[state]} {state}" for state in ("leased", "submitted", "admitted") if slots.get(state))
    again = ", ".join(f"{name} x{count}" for name, count in frame.restarts.items() if count)
    lines = [Text.assemble(("slots    ", "dim"), queue or "none in flight")]
    lines.append(Text.assemble(("restarts ", "dim"), (again or "none", "yellow" if again else "")))
    if frame.note:
        lines.append(Text(frame.note, "italic"))
    return Group(*lines)


def closing(summary: Summary, folder: Path) -> RenderableType:
    """Render the figures that a run ends with."""
    figures, audit = summary.figures, summary.audit
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    if (reward := reward_figure([step.reward_mean for step in summary.steps])) is not None:
        ends = f"{reward.first:.2f} -> {reward.last:.2f}, {reward.change:+.2f}"
        grid.add_row("reward", f"{ends}: means of the first and the last {reward.span}")
    grid.add_row(
        "hostile", f"{figures['hostile_slots_admitted']} of {figures['hostile_slots_submitted']} slots admitted"
    )
    honest = int(figures["honest_slots_admitted"] or 0) + int(figures["honest_slots_rejected"] or 0)
    grid.add_row("honest", f"{figures['honest_slots_rejected']} of {honest} slots rejected")
    if audit is not None:
        grid.add_row("audit", _AUDIT_WORDS.get(audit.exit_code, "failed"))
    if (saved := figures["broadcast_bytes_saved"]) is not None:
        grid.add_row("broadcast", f"deltas saved {saved:.0%} of the policies' bytes")
    grid.add_row("time", f"{clock(summary.seconds)}, at most {figures['peak_memory_gib']:.1f} GiB of memory")
    grid.add_row("report", str(folder / "report.html"))
    return Padding(grid, (1, 0))
