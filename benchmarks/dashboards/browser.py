"""The run's page in Chromium: when it is first painted, and what it takes over the wire."""

from __future__ import annotations

import shutil
import statistics
from typing import Any

PAINT = """() => new Promise(done => {
  const found = performance.getEntriesByName('first-contentful-paint')[0];
  if (found) done(found.startTime);
  new PerformanceObserver(list => list.getEntriesByName('first-contentful-paint')
    .forEach(entry => done(entry.startTime))).observe({ type: 'paint', buffered: true });
})"""


def look(url: str, *, loads: int) -> dict[str, Any]:
    """Measure `loads` first visits and a second one; return None for each figure without Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return dict.fromkeys(("first_paint_ms", "first_paint_bytes", "plots_ms", "bytes", "bytes_again"))
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  (only with a browser)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        visits = [_visit(browser, url) for _ in range(loads)]
        browser.close()
    return {
        "first_paint_ms": round(statistics.median(visit["paint"] for visit in visits), 1),
        "first_paint_bytes": visits[-1]["before"],
        "plots_ms": round(statistics.median(visit["plots"] for visit in visits), 1),
        "bytes": visits[-1]["bytes"],
        "bytes_again": visits[-1]["again"],
    }


def _visit(browser: Any, url: str) -> dict[str, float]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    received: dict[str, float] = {}
    names: dict[str, str] = {}
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    session.on("Network.responseReceived", lambda event: names.update({event["requestId"]: event["response"]["url"]}))
    session.on(
        "Network.loadingFinished",
        lambda event: received.update({event["requestId"]: event["encodedDataLength"]}),
    )
    page.goto(url, wait_until="load")
    paint = page.evaluate(PAINT)
    page.wait_for_selector(".drawn canvas", timeout=60_000)
    plots = page.evaluate("performance.now()")
    by_name = {names.get(request, request): size for request, size in received.items()}
    before = sum(size for name, size in by_name.items() if "uPlot" not in name and "/v1/" not in name)
    total = sum(by_name.values())
    received.clear()
    page.reload(wait_until="load")
    page.wait_for_selector(".drawn canvas", timeout=60_000)
    again = sum(received.values())
    context.close()
    return {"paint": paint, "plots": plots, "before": before, "bytes": total, "again": again}
