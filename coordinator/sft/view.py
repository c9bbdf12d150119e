"""What `swarmproof sft` shows: a line of progress, live on a terminal, and the curves at the end."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import click
from rich.text import Text

from coordinator.sft.recipe import PreparedSft
from coordinator.sft.run import SftResult
from coordinator.training.supervised import SupervisedStep
from node.runtime.terminal import LiveDisplay, sparkline

LINE_SECONDS = 10.0
"""Between two lines where nothing can be drawn over."""
WIDTH = 60
_MIN_SPAN = 0.01


class SftView:
    """Shows progress on `live`, or as lines, on stderr if `err`; time left is by this process's mean step."""

    def __init__(self, live: LiveDisplay | None, *, err: bool = False) -> None:
        self._live, self._err = live, err
        self._steps = self._first = self._tokens = 0
        self._started = self._shown = 0.0
        self._held_out = ""

    def begun(self, prepared: PreparedSft, *, steps: int, done: int) -> None:
        """Say what is trained on, and what was left out."""
        counts = prepared.counts
        click.echo(
            f"{counts.training:,} examples to train on, {counts.held_out:,} held out; {counts.tokens:,} tokens, of "
            f"which {counts.learnt_tokens:,} are learnt; {steps:,} steps",
            err=self._err,
        )
        if counts.too_long:
            lines = ", ".join(map(str, counts.too_long_lines))
            click.echo(f"left out: {counts.too_long:,} examples that are too long, such as of line {lines}", err=True)
        if done:
            click.echo(f"going on after step {done:,}", err=self._err)
        self._steps, self._first, self._started = steps, done, time.monotonic()

    def step(self, step: SupervisedStep, *, tokens: int) -> None:
        """Show a finished step, unless another one was shown a moment ago."""
        self._tokens += tokens
        now = time.monotonic()
        if self._live is None and step.step < self._steps and now - self._shown < LINE_SECONDS:
            return
        self._shown = now
        seconds = max(now - self._started, 1e-9)
        left = (self._steps - step.step) * seconds / (step.step - self._first)
        line = (
            f"step {step.step:,}/{self._steps:,}  loss {step.loss:.4f}{self._held_out}  lr {step.learning_rate:.2e}  "
            f"{self._tokens / seconds:,.0f} learnt tokens/s  ETA {clock(left)}"
        )
        if self._live is None:
            click.echo(line, err=self._err)
        else:
            self._live.update(Text(line), refresh=True)

    def evaluated(self, step: int, loss: float) -> None:
        """Show the held-out loss with the next line, or at once before the first step."""
        self._held_out = f"  held out {loss:.4f}"
        if step == 0:
            click.echo(f"held-out loss before training: {loss:.4f}", err=self._err)


def closing(result: SftResult) -> str:
    """Draw the curves, each with its first and last value."""
    curves = (("loss", result.losses), ("held out", result.held_out_losses))
    return "\n".join(
        f"{name:<9} {sparkline(_shortened(values), min_span=_MIN_SPAN)}  {values[0]:.4f} to {values[-1]:.4f}"
        for name, values in curves
        if values
    )


def clock(seconds: float) -> str:
    """Format hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _shortened(values: Sequence[float]) -> list[float]:
    """Return at most WIDTH values, each the mean of as many."""
    count = min(len(values), WIDTH)
    bounds = [len(values) * at // count for at in range(count + 1)]
    return [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(bounds)]
