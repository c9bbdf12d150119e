"""The report of a demonstration: the dashboard's page of the run as one file, with a section on who was caught."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from coordinator.dashboard import formatting
from coordinator.dashboard.pages import export_run
from coordinator.lab.processes.summary import Summary
from coordinator.metrics.reward import reward_figure
from coordinator.run.service import Coordinator


def render_report(summary: Summary, coordinator: Coordinator) -> str:
    """Render the page; the run's database may be in use by its processes."""
    return export_run(coordinator, section=render_summary(summary))


def render_summary(summary: Summary) -> str:
    """Render the section as HTML. What came from outside is escaped by the template engine."""
    environment = Environment(
        loader=PackageLoader("coordinator.lab.demo", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(formatting, name) for name in ("seconds", "number", "clock", "percent")}
    return environment.get_template("summary.html.j2").render(
        summary=summary,
        reward=reward_figure([step.reward_mean for step in summary.steps]),
    )
