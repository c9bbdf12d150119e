"""What the benchmarks' commands share: options, progress lines, and the result that each prints last."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

CPUINFO = Path("/proc/cpuinfo")
_STARTED = time.monotonic()
_SCALARS = (str, int, float, type(None))


def make_parser(description: str | None, **settings: Any) -> argparse.ArgumentParser:
    """Make a parser with `--json` that shows `description` as it is written."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter, **settings)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(line: str) -> None:
    """Print a progress line on standard error, after the seconds since the start."""
    print(f"{time.monotonic() - _STARTED:7.1f} s  {line}", file=sys.stderr, flush=True)


def report(
    name: str,
    options: argparse.Namespace,
    figures: Mapping[str, Any],
    notes: Mapping[str, Any] | None = None,
    **sections: Any,
) -> None:
    """Print the result: one JSON object with `--json`, otherwise tables.

    Args:
        figures: numbers by key; None could not be measured, and `notes` says why under the same key.
        sections: further members of the JSON object; a list of rows becomes a table of its plain columns.
    """
    machine, notes = describe_machine(), dict(notes or {})
    if options.json:
        result = {"benchmark": name, "machine": machine, "figures": dict(figures), "notes": notes}
        print(json.dumps(result | sections), flush=True)
        return
    for title, value in (machine | notes).items():
        print(f"{title:>46}  {value}")
    print()
    for title, value in figures.items():
        print(f"{title:>46}  {_text(value)}")
    for title, section in sections.items():
        for subtitle, rows in section.items() if isinstance(section, dict) else ((None, section),):
            if isinstance(rows, list) and rows:
                print(f"\n{title}" if subtitle is None else f"\n{title}: {subtitle}")
                _print_rows(rows)


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = [name for name, value in rows[0].items() if isinstance(value, _SCALARS)]
    lines = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe_machine() -> dict[str, str | int]:
    """Describe the machine: CPU model, cores usable by this process, versions, GPU."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _cpu_model() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
