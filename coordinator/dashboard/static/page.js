// On every page: whether the run works, buttons that copy, and moments in the reader's own time.
"use strict";

const HEALTH_MS = 15_000;
const health = document.getElementById("s-health");

async function readHealth() {
  if (document.hidden) return;
  try {
    const reply = await fetch("/health-line");
    if (!reply.ok) throw new Error(String(reply.status));
    health.innerHTML = await reply.text();
  } catch {
    health.innerHTML = '<p class="health stopped"><b>The coordinator does not answer.</b></p>';
  }
}

// The run's own page has it among its sections, as they change.
if (!document.getElementById("live")) {
  setInterval(readHealth, HEALTH_MS);
  document.addEventListener("visibilitychange", readHealth);
}

async function copy(text) {
  // Browsers keep the clipboard's own interface for pages by TLS, and a run may be served without.
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("not copied");
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const words = button.textContent;
  try {
    await copy(document.getElementById(button.dataset.copy).textContent.trim());
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
    button.textContent = "Selected: Ctrl-C";
  }
  setTimeout(() => { button.textContent = words; }, 2000);
});

document.addEventListener("pointerover", (event) => {
  const moment = event.target.closest?.("time[datetime]");
  if (!moment || moment.title) return;
  moment.title = new Date(moment.dateTime).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
});
