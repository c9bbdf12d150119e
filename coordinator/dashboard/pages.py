"""The pages as HTML: one template for each, and the run's in sections that are made once a second for all who ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from coordinator.dashboard import formatting
from coordinator.dashboard.assets import Assets
from coordinator.dashboard.audits import AuditView
from coordinator.dashboard.figures import read_figures
from coordinator.dashboard.history import History
from coordinator.dashboard.series import plots_of
from coordinator.dashboard.submissions import SubmissionView
from coordinator.dashboard.visible import short, visible
from coordinator.dashboard.workers import Asked, WorkerTable, read_workers
from coordinator.run.service import Coordinator
from coordinator.storage.database import Connection

SNAPSHOT_SECONDS: Final = 1.0
PLOTS_SECONDS: Final = 10.0
"""How old the plots of a page that is open may be: their data is larger than all the rest."""

SECTIONS: Final = ("state", "cards", "relays", "reasons", "queue", "latest")
PLOTS: Final = "plots"


@dataclass(frozen=True, slots=True)
class RenderedRun:
    """The run's page as it was `at` (monotonic): what it is made of, and its HTML as most people ask for it."""

    at: float
    values: Mapping[str, Any]
    sections: Mapping[str, str]
    page: bytes


def export_run(coordinator: Coordinator, *, section: str) -> str:
    """Render the run's page as it is now into one file that loads nothing, runs nothing and links nowhere.

    `section` is HTML of the caller's, for a place below the run's figures.
    """
    return Pages(coordinator, Assets(), is_live=False).export(section)


class Pages:
    """Renders for one process; safe to use from several threads."""

    def __init__(self, coordinator: Coordinator, assets: Assets, *, is_live: bool = True) -> None:
        self._coordinator, self._assets, self._is_live = coordinator, assets, is_live
        self._history = History()
        self._lock = threading.Lock()
        self._snapshot: RenderedRun | None = None
        self._plots = (0.0, "")

    def sections(self) -> dict[str, str]:
        """Return the live sections of the run's page as HTML, and the plots' data as JSON."""
        snapshot = self._newest()
        with self._lock:
            if not self._plots[1] or snapshot.at - self._plots[0] >= PLOTS_SECONDS:
                self._plots = (snapshot.at, snapshot.sections[PLOTS])
            return {**snapshot.sections, PLOTS: self._plots[1]}

    def run(self, asked: Asked) -> bytes:
        """Render the run's page with the requested part of the table of workers."""
        snapshot = self._newest()
        if asked == Asked():
            return snapshot.page
        with self._coordinator.home.database.read() as connection:
            table = self._workers(connection, asked)
        return self._run_page(snapshot.values, snapshot.sections, table)

    def submission(self, view: SubmissionView) -> bytes:
        """Render a submission's page."""
        return self._render("submission.html.j2", view=view)

    def audit(self, view: AuditView) -> bytes:
        """Render the auditor's page."""
        return self._render("audit.html.j2", view=view)

    def missing(self, what: str) -> bytes:
        """Render the page for what does not exist."""
        return self._render("missing.html.j2", what=what)

    def _newest(self) -> RenderedRun:
        """Return the page, at most SNAPSHOT_SECONDS old; one thread renders it for all that wait."""
        with self._lock:
            if self._snapshot is None or time.monotonic() - self._snapshot.at >= SNAPSHOT_SECONDS:
                self._snapshot = self._take()
            return self._snapshot

    def export(self, section: str) -> str:
        """Render the run's page as one HTML file, with the HTML `section` in it; made for `is_live=False`."""
        return self._take(section).page.decode()

    def _take(self, section: str = "") -> RenderedRun:
        at, now = time.monotonic(), time.time()
        coordinator = self._coordinator
        with coordinator.home.database.read() as connection:
            figures = read_figures(connection, coordinator.relays, self._history, spec=coordinator.home.spec, now=now)
            table = self._workers(connection, Asked())
        plots = plots_of(figures)
        values: dict[str, Any] = {"figures": figures, "plots": plots, "now": now, "section": Markup(section)}  # noqa: S704
        sections = {name: self._render(f"sections/{name}.html.j2", **values).decode() for name in SECTIONS}
        # Markup: it is JSON in which what HTML knows is written otherwise.
        sections[PLOTS] = htmlsafe_json_dumps(plots.data, separators=(",", ":"))
        return RenderedRun(at, values, sections, self._run_page(values, sections, table))

    def _run_page(self, values: Mapping[str, Any], sections: Mapping[str, str], table: WorkerTable) -> bytes:
        rendered = {name: Markup(text) for name, text in sections.items()}  # noqa: S704  (by the same templates)
        return self._render("run.html.j2", **values, sections=rendered, table=table)

    def _workers(self, connection: Connection, asked: Asked) -> WorkerTable:
        return read_workers(connection, asked, spec=self._coordinator.home.spec, now=time.time())

    def _render(self, template: str, **values: Any) -> bytes:
        return self._environment.get_template(template).render(**values).encode(errors="replace")

    @cached_property
    def _environment(self) -> Environment:
        environment = Environment(
            loader=PackageLoader("coordinator.dashboard", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {
            "number": formatting.number,
            "seconds": formatting.seconds,
            "ago": formatting.ago,
            "clock": formatting.clock,
            "percent": formatting.percent,
            "reason": formatting.name_of,
            "meaning": formatting.meaning_of,
            "visible": visible,
            "short": short,
        }
        home = self._coordinator.home
        environment.globals |= {
            "asset": self._assets.url,
            "is_live": self._is_live,
            "stylesheet": Markup(self._assets.text("dashboard.css")),  # noqa: S704  (this package's own)
            "run_id": home.run_id,
            "run_name": visible(home.spec.name, most=100),
            "spec": home.spec,
            "endpoint": visible(next(iter(self._coordinator.descriptors.endpoints), "http://COORDINATOR")),
        }
        return environment
