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
    quiet: of("--quiet"), line: of("--line"), mark: of("--mark"), band: of("--band"),
    kinds: [0, 1, 2, 3, 4, 5, 6, 7].map((at) => of(`--f${at}`)),
  };
}

function clock(seconds) {
  const { start, width } = plots.over;
  const text = new Date(1000 * seconds).toISOString();
  return start.length * width > 2 * 86400 ? `${text.slice(5, 10)} ${text.slice(11, 16)}` : text.slice(11, 16);
}

const numbers = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const told = (value, more = "") => (value === null || value === undefined ? "-" : numbers.format(value) + more);

const BY_STEP = { label: "step", value: (plot, step) => told(step) };
const BY_TIME = { label: "UTC", value: (plot, at) => (at === null ? "-" : clock(at)) };

// What each place draws: the x column with its series, the y columns with theirs, and options of uPlot's.
const DRAWN = {
  reward(palette) {
    const { step, mean, spread } = plots.reward;
    const edge = { stroke: "transparent", width: 0, points: { show: false }, class: "unheard" };
    return {
      by: BY_STEP, x: step,
      ys: [
        mean.map((value, at) => Math.min(1, value + spread[at])), mean.map((value, at) => Math.max(0, value - spread[at])),
        mean,
      ],
      series: [
        { ...edge, label: "upper" }, { ...edge, label: "lower" },
        {
          label: "reward", stroke: palette.mark, width: 2,
          value: (plot, value, series, at) => (value === null ? "-" : `${value.toFixed(3)} ± ${spread[at].toFixed(3)}`),
        },
      ],
      bands: [{ series: [1, 2], fill: palette.band }], top: 1.02,
    };
  },
  verdicts(palette) {
    const kinds = plots.over.verdicts;
    const colour = (key, at) => palette.kinds[({ admitted: 0, other: 5, undecided: 7 })[key] ?? [1, 2, 3, 4, 6][at - 1]];
    const sums = kinds.map((kind, at) => plots.over.start.map(
      (start, when) => kinds.slice(0, at + 1).reduce((sum, one) => sum + one.count[when], 0)));
    return {
      by: BY_TIME, x: plots.over.start, ys: sums.toReversed(), bars: true,
      // The tallest is drawn first, and the others stand before it.
      series: kinds.map((kind, at) => ({
        label: kind.name, fill: colour(kind.key, at), width: 0, points: { show: false },
        paths: uPlot.paths.bars({ size: [0.85, 100], align: 1 }), value: (plot, sum, series, when) => told(kind.count[when]),
      })).toReversed(),
    };
  },
  rate(palette) {
    const value = (plot, tokens, series, at) => `${told(tokens)}, ${told(plots.rate.slots[at])} slots`;
    return {
      by: BY_TIME, x: plots.over.start, ys: [plots.rate.tokens],
      series: [{ label: "tokens a minute", stroke: palette.mark, width: 2, value }],
    };
  },
  wait(palette) {
    const value = (plot, seconds) => told(seconds, " s");
    return {
      by: BY_TIME, x: plots.over.start, ys: [plots.wait.longest, plots.wait.mean],
      series: [
        { label: "longest", stroke: palette.kinds[5], width: 1, value },
        { label: "mean", stroke: palette.mark, width: 2, value },
      ],
    };
  },
};

// One for each statistic of the trainer that there is: `plots.training` has them by the names of their places.
function trained(name, palette) {
  const series = [{ label: "value", stroke: palette.mark, width: 2, value: (plot, value) => told(value) }];
  return { by: BY_STEP, x: plots.reward.step, ys: [plots.training[name]], series };
}

const ROUND = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1440, 7200, 14400, 100_000];

function options(made, palette, place) {
  const height = place.classList.contains("small") ? 112 : place.classList.contains("low") ? 172 : 232;
  const font = "12px system-ui, sans-serif";
  const axis = { stroke: palette.quiet, font, ticks: { show: false }, gap: 6 };
  const width = plots.over.width;
  const first = made.x[0];
  const last = made.x.at(-1);
  // Of a single moment uPlot would show a thousand days.
  const across = made.by === BY_TIME ? { range: [first, made.bars || first === last ? last + width : last] } : {};
  const up = (plot, least, most) => [Math.min(0, least ?? 0), made.top ?? (most > 0 ? 1.05 * most : 1)];
  return {
    width: Math.max(200, place.clientWidth), height, padding: [8, 18, 0, 0], bands: made.bands,
    scales: { x: { time: made.by === BY_TIME, ...across }, y: { range: up } },
    axes: [
      {
        ...axis, size: 26, grid: { show: false }, incrs: ROUND.map((one) => one * (made.by === BY_TIME ? width : 1)),
        values: (plot, at) => at.map((one) => (made.by === BY_TIME ? clock(one) : told(one))),
      },
      { ...axis, size: 46, grid: { stroke: palette.line, width: 1 }, values: (plot, at) => at.map((one) => told(one)) },
    ],
    series: [made.by, ...made.series],
    cursor: { drag: { x: false, y: false }, y: false },
    legend: { markers: { width: 0, fill: (plot, at) => made.series[at - 1].fill ?? made.series[at - 1].stroke } },
    hooks: { setLegend: [showNewest] },
  };
}

// Away from the pointer, the newest values are read off.
function showNewest(plot) {
  if (plot.legend.idx !== null) return;
  const newest = plot.data.at(-1).findLastIndex((value) => value !== null);
  if (newest >= 0) plot.setLegend({ idx: newest }, false);
}

const charts = new Map();
let drawing = false;

function draw({ anew = false } = {}) {
  if (!drawing) return;
  const palette = colours();
  const training = Object.keys(plots.training).map((name) => [name, () => trained(name, palette)]);
  for (const [name, make] of [...Object.entries(DRAWN), ...training]) {
    const place = document.getElementById(`plot-${name}`);
    const made = make(palette);
    if (!place || !made.x.length || !made.ys.length) continue;
    // A statistic that came with a later step has had no place until now.
    place.closest("[hidden]")?.removeAttribute("hidden");
    const labels = made.series.map((one) => one.label).join();
    const held = charts.get(name);
    // The series' functions read the plots of the moment at which they were made.
    held?.chart.destroy();
    const box = held?.box ?? boxIn(place, name);
    const at = anew || held?.labels !== labels ? null : held.chart.cursor.left;
    const chart = new uPlot(options(made, palette, place), [made.x, ...made.ys], box);
    chart.root.querySelector(".u-legend")?.setAttribute("aria-hidden", "true");
    if (at > 0) chart.setCursor({ left: at, top: 1 });
    else showNewest(chart);
    charts.set(name, { chart, box, labels });
  }
}

function boxIn(place, name) {
  const said = place.querySelector("svg[role=img]")?.getAttribute("aria-label") || name;
  const box = document.createElement("div");
  box.className = "drawn";
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", said);
  place.replaceChildren(box);
  return box;
}

function fetchLibrary() {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = own.dataset.style;
  const script = document.createElement("script");
  script.src = own.dataset.library;
  script.addEventListener("load", () => {
    drawing = true;
    draw();
    let wide = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth !== wide) draw({ anew: true });
      wide = innerWidth;
    });
  });
  document.head.append(style, script);
}

// After the first paint, and after what it is made of: the page is whole without it.
if (document.readyState === "complete") fetchLibrary();
else window.addEventListener("load", () => requestAnimationFrame(() => setTimeout(fetchLibrary, 0)));
dark.addEventListener("change", () => draw({ anew: true }));
if (still.matches) document.documentElement.classList.add("still");
follow();
