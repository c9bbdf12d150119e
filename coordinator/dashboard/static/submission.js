// The tokens of a completion: one at a time, by pointer or by arrow keys, with what was measured of it.
"use strict";

function words(token, at) {
  const { i, m, e, c } = token.dataset;
  const measured = m === undefined ? "not measured" : `margin ${m}, log-probability off by ${e}`;
  const chunk = c === undefined ? "" : `, chunk ${c}`;
  return `token ${at} (id ${i}): ${measured}${chunk}`;
}

for (const list of document.querySelectorAll(".tokens")) {
  const tokens = [...list.querySelectorAll(".t")];
  const readout = list.nextElementSibling;
  let at = -1;

  const show = (next) => {
    if (at >= 0) tokens[at].classList.remove("at");
    at = Math.max(0, Math.min(tokens.length - 1, next));
    tokens[at].classList.add("at");
    readout.textContent = words(tokens[at], at);
  };

  list.addEventListener("pointerover", (event) => {
    const found = tokens.indexOf(event.target.closest(".t"));
    if (found >= 0) show(found);
  });
  list.addEventListener("focus", () => show(Math.max(0, at)));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    show(Number.isFinite(step) ? at + step : step > 0 ? tokens.length - 1 : 0);
    tokens[at].scrollIntoView({ block: "nearest" });
  });
}
