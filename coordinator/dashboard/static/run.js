// The run's page, live: sections as the server renders them, and plots that can be read off.
// Without this script the page is complete, as of the moment it was asked for.
"use strict";

const POLL_MS = 10_000;
const STALE_MS = 45_000;
const own = document.currentScript;
const live = document.getElementById("live");
let plots = JSON.parse(document.getElementById("plots").textContent);
let heard = Date.now();

function say(state, words) {
  live.className = `live ${state}`;
  live.lastElementChild.textContent = words;
}

function now() {
  return new Date().toISOString().slice(11, 19);
}

function take(sections) {
  heard = Date.now();
  for (const [name, text] of Object.entries(sections)) {
    if (name === "plots") {
      plots = JSON.parse(text);
      draw();
      continue;
    }
    const place = document.getElementById(`s-${name}`);
    // Somebody who is in the middle of it keeps it until they leave.
    if (place && !place.contains(document.activeElement)) place.innerHTML = text;
  }
}

// -- news

let mark = "";

async function poll() {
  try {
    const reply = await fetch(`/v1/events/now?mark=${encodeURIComponent(mark)}`);
    if (!reply.ok) throw new Error(String(reply.status));
    const news = await reply.json();
    mark = news.mark;
    take(news.sections);
    say("slow", `every ${POLL_MS / 1000} s, ${now()} UTC`);
  } catch {
    say("off", "the coordinator does not answer");
  }
}

function pollForEver() {
  poll();
  setInterval(poll, POLL_MS);
}

function follow() {
  if (!("EventSource" in window)) {
    pollForEver();
    return;
  }
  const source = new EventSource("/v1/events");
  source.addEventListener("open", () => say("on", "live"));
  source.addEventListener("sections", (event) => {
    take(JSON.parse(event.data));
    say("on", `live, ${now()} UTC`);
  });
  source.addEventListener("error", () => {
    // The browser connects again by itself, unless it was refused.
    if (source.readyState === EventSource.CLOSED) pollForEver();
    else say("off", `no word since ${new Date(heard).toISOString().slice(11, 19)} UTC`);
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && Date.now() - heard > STALE_MS && source.readyState === EventSource.OPEN) draw();
  });
}

// -- plots

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const still = window.matchMedia("(prefers-reduced-motion: reduce)");

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {
    ink: of("--ink"), quiet: of("--quiet"), line: of("--line"), paper: of("--paper"), mark: of("--mark"),
    band: of("--band"), kinds: [0, 1, 2, 3, 4, 5, 6, 7].map((at) => of(`--f${at}`)),
  };
}

function layout(palette, height, more) {
  const axis = {
    gridcolor: palette.line, linecolor: palette.line, zeroline: false, fixedrange: true, automargin: true,
    tickfont: { color: palette.quiet, size: 12 }, nticks: 6,
  };
  return {
    height, margin: { l: 44, r: 8, t: 8, b: 28 }, paper_bgcolor: palette.paper, plot_bgcolor: palette.paper,
    font: { family: "system-ui, sans-serif", color: palette.ink, size: 12 }, showlegend: false, hovermode: "x unified",
    hoverlabel: { bgcolor: palette.paper, bordercolor: palette.line, font: { color: palette.ink, size: 12 } },
    ...more,
    xaxis: { ...axis, showgrid: false, ...(more.xaxis || {}) },
    yaxis: { ...axis, rangemode: "tozero", ...(more.yaxis || {}) },
  };
}

function clocks() {
  const { start, width } = plots.over;
  const days = start.length * width > 2 * 86400;
  // Of a few there would be ticks between them, with the same words.
  const ticks = start.length <= 8 ? { tickmode: "array", tickvals: moments() } : { nticks: 8 };
  return { tickformat: days ? "%-d %b" : "%H:%M", hoverformat: days ? "%-d %b, %H:%M" : "%H:%M", ...ticks };
}

function moments() {
  return plots.over.start.map((start) => new Date(1000 * start).toISOString());
}

const DRAWN = {
  reward(palette) {
    const { step, mean, spread } = plots.reward;
    if (!step.length) return null;
    const upper = mean.map((value, at) => Math.min(1, value + spread[at]));
    const lower = mean.map((value, at) => Math.max(0, value - spread[at]));
    const edge = { x: step, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    return [
      [
        { ...edge, y: upper },
        { ...edge, y: lower, fill: "tonexty", fillcolor: palette.band },
        {
          x: step, y: mean, mode: step.length > 1 ? "lines" : "markers", line: { color: palette.mark, width: 2 },
          customdata: spread, hovertemplate: "%{y:.3f} ± %{customdata:.3f}<extra></extra>",
        },
      ],
      { xaxis: { title: { text: "step", font: { color: palette.quiet, size: 12 } } }, yaxis: { range: [0, 1.02] } },
    ];
  },
  verdicts(palette) {
    if (!plots.over.start.length) return null;
    const x = moments();
    const kind = (key, at) => ({ admitted: 0, other: 5, undecided: 7 })[key] ?? [1, 2, 3, 4, 6][at - 1];
    const traces = plots.over.verdicts.map((one, at) => ({
      x, y: one.count, name: one.name, type: "bar", marker: { color: palette.kinds[kind(one.key, at)] },
      hovertemplate: "%{y:,}",
    }));
    const legend = {
      orientation: "h", y: -0.12, yanchor: "top", x: 0, traceorder: "normal", itemwidth: 30,
      font: { color: palette.quiet, size: 12 },
    };
    return [traces, { barmode: "stack", bargap: 0.12, showlegend: true, legend, xaxis: clocks() }];
  },
  rate(palette) {
    if (!plots.rate.tokens.length) return null;
    const template = "%{y:,.0f} tokens, %{customdata:.1f} slots a minute<extra></extra>";
    return [
      [{
        x: moments(), y: plots.rate.tokens, customdata: plots.rate.slots, mode: "lines+markers", marker: { size: 3 },
        line: { color: palette.mark, width: 2 }, hovertemplate: template,
      }],
      { xaxis: clocks() },
    ];
  },
  wait(palette) {
    if (!plots.wait.mean.length) return null;
    const line = (y, name, colour, width) => ({
      x: moments(), y, name, mode: "lines+markers", marker: { size: 3 }, line: { color: colour, width },
      hovertemplate: `%{y:.2f} s ${name}<extra></extra>`,
    });
    return [
      [line(plots.wait.longest, "longest", palette.kinds[5], 1), line(plots.wait.mean, "mean", palette.mark, 2)],
      { xaxis: clocks(), yaxis: { ticksuffix: " s" } },
    ];
  },
};

// One for each statistic of the trainer that there is: `plots.training` has them by the names of their places.
function trained(name, palette) {
  const { step } = plots.reward;
  const line = { color: palette.mark, width: 2 };
  const mode = step.length > 1 ? "lines" : "markers";
  return [
    [{ x: step, y: plots.training[name], mode, line, hovertemplate: "%{y:.4g}<extra></extra>" }],
    { yaxis: { nticks: 4 } },
  ];
}

function drawings() {
  const training = Object.keys(plots.training).map((name) => [name, (palette) => trained(name, palette)]);
  return [...Object.entries(DRAWN), ...training];
}

function heightOf(place) {
  if (place.classList.contains("small")) return 140;
  return place.classList.contains("low") ? 200 : 260;
}

let drawing = false;

function draw() {
  if (!window.Plotly || !drawing) return;
  const palette = colours();
  for (const [name, make] of drawings()) {
    const place = document.getElementById(`plot-${name}`);
    const made = make(palette);
    if (!made || !place) continue;
    // A statistic that came with a later step has had no place until now.
    place.closest("[hidden]")?.removeAttribute("hidden");
    let box = place.querySelector(".drawn");
    if (!box) {
      const said = place.querySelector("svg[role=img]")?.getAttribute("aria-label") || name;
      box = document.createElement("div");
      box.className = "drawn";
      box.setAttribute("role", "img");
      box.setAttribute("aria-label", said);
      place.replaceChildren(box);
    }
    const config = { displayModeBar: false, responsive: true, showTips: false };
    window.Plotly.react(box, made[0], layout(palette, heightOf(place), made[1]), config);
  }
}

function fetchPlotly() {
  const script = document.createElement("script");
  script.src = own.dataset.plotly;
  script.addEventListener("load", () => {
    drawing = true;
    draw();
  });
  document.head.append(script);
}

// After the first paint, and after what it is made of: it is larger than everything else together.
if (document.readyState === "complete") fetchPlotly();
else window.addEventListener("load", () => requestAnimationFrame(() => setTimeout(fetchPlotly, 0)));
dark.addEventListener("change", draw);
if (still.matches) document.documentElement.classList.add("still");
follow();
